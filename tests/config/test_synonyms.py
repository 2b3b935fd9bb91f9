"""Words of other trainers' configs: in messages, and translated."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from mmrl.commands.cli import main
from mmrl.config.critic import CriticConfig
from mmrl.config.load import from_mapping, load_config, to_yaml
from mmrl.config.plugin_specs import EnvironmentSpec
from mmrl.config.sections import Config
from mmrl.config.synonyms import _WORDS, spelled, synonym
from mmrl.config.translation import Translation, _flat, translate
from mmrl.config.yaml_tree import read_tree
from mmrl.errors import ConfigError
from mmrl.plugin_host.registry import options_class
from mmrl.policy_gradient import PolicyGradient
from mmrl.runs.resumption import changed_config, plain_config
from mmrl_datasets.table import Table

SMALL = "model: {path: m}\ndata: {train: {name: table, path: x}}\nrewards: [{name: exact}]\nalgorithm: {name: grpo}\n"
EASYR1 = """\
data:
  train_files: hiyouga/geometry3k@train
  val_files: hiyouga/geometry3k@test
  prompt_key: problem
  answer_key: reference
  image_key: images
  max_prompt_length: 1024
  max_response_length: 512
  rollout_batch_size: 512
  format_prompt: ./math.jinja
  min_pixels: null
algorithm:
  adv_estimator: reinforce_plus_plus
  use_kl_loss: true
  kl_penalty: low_var_kl
  kl_coef: 1.0e-2
worker:
  actor:
    global_batch_size: 128
    padding_free: true
    clip_ratio_high: 0.3
    tau_positive: 1.0
    micro_batch_size_per_device_for_update: 4
    model: {model_path: Qwen/Qwen2.5-VL-3B-Instruct, freeze_vision_tower: true, lora: {rank: 0, alpha: 64}}
    optim: {lr: 1.0e-6, strategy: adamw}
    fsdp: {enable_full_shard: false}
  rollout: {n: 5, top_p: 0.9, gpu_memory_utilization: 0.6}
  reward: {reward_function: "math.py:compute_score"}
trainer: {max_steps: 60, logger: [console, tensorboard, other], n_gpus_per_node: 4, val_freq: -1, save_freq: 5}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text(SMALL)
    return path


def failure(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([path], overrides, options_class=options_class)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("data.train.prompt_key=q", "did you mean prompt?"),
        ("data.train.image_key=q", "did you mean images?"),
        ("data.eval={name: table, path: x, answer_key: q}", "did you mean answer?"),
        ("data.prompt_key=q", "did you mean data.train.prompt?"),
        ("data.max_response_length=9", "did you mean sampler.max_new_tokens?"),
        ("data.max_prompt_length=9", "did you mean data.max_prompt_tokens?"),
        ("data.rollout_batch_size=9", "did you mean trainer.prompts_per_step? (counted in prompts;"),
        ("learning_rate=1e-6", "did you mean learner.lr?"),
        ("sampler.n=4", "did you mean sampler.group_size?"),
        ("num_generations=4", "did you mean sampler.group_size?"),
        ("actor_rollout_ref.rollout.n=4", "did you mean sampler.group_size?"),
        ("worker.rollout.n=4", "unknown key worker.rollout.n"),
        ("worker.rollout.temperature=1", "did you mean sampler.temperature?"),
        ("worker={rollout: {n: 4}, actor: {optim: {lr: 1}, what: 1}}", "worker.actor.optim.lr is learner.lr"),
        ("beta=0.1", "did you mean algorithm.kl.coef?"),
        ("algorithm.kl_coef=0.1", "did you mean kl.coef?"),
        ("algorithm.adv_estimator=gspo", "did you mean name: gspo?"),
        ("adv_estimator=reinforce_plus_plus", "did you mean algorithm.name: reinforce_pp?"),
        ("my_rule=gspo", "did you mean algorithm.name: gspo?"),
        ("trainer.total_epochs=3", "did you mean trainer.epochs? (in place of trainer.steps)"),
        ("trainer.logger=[console]", "did you mean trackers? (a list such as [{name: ...}]"),
        ("trainer.n_gpus_per_node=8", "did you mean cluster.ranks? (all GPUs together"),
        ("per_device_train_batch_size=2", "did you mean learner.tokens_per_microbatch? (counted in tokens"),
        ("algorithm.gamma=1", "discounts are options of algorithms that have them: algorithm.gamma"),
        ("learner.lrr=1", "did you mean lr?"),
        ("max_tool_calling_iterations=4", "did you mean environment.max_turns? (turns of the policy"),
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4", "did you mean environment.max_turns?"),
        ("scale_rewards=group", "that is the algorithm's own: choose it by algorithm.name"),
        ("multi_objective_aggregation=x", "did you mean algorithm.reward_norm?"),
        ("critic.optim.lr=1e-5", "did you mean critic.lr?"),
        ("worker.critic.model.path=m", "a critic has the section critic (path, lr, pretrain_steps, ...)"),
        ("critic_warmup=20", "did you mean critic.pretrain_steps?"),
        ("worker.ref.fsdp.enable_cpu_offload=true", "the reference is the initial policy"),
        ("reward_model.model.path=m", "a model that scores is a reward: see rewards"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature=0", "an evaluation is greedy"),
        ("actor_rollout_ref.rollout.val_kwargs.n=4", "did you mean trainer.eval_samples?"),
        ("delta=2", "did you mean algorithm.dual_clip?"),
        ("reward=math", "did you mean rewards? write 'rewards=[{name: math}]'"),
        ("tracker=wandb", "did you mean trackers? write 'trackers=[{name: wandb}]'"),
        ("report_to=wandb", "need none) write 'trackers=[{name: wandb}]'"),
        ("dataset=x.jsonl", "write 'data.train={name: table, path: x.jsonl}'"),
        ("environment_factory=Game", "did you mean environment? ({name: path/to/file.py:Class}"),
    ],
)  # fmt: skip
def test_a_word_of_others_is_answered_with_ours(path: Path, override: str, hint: str) -> None:
    text = failure(path, override)
    assert hint in text
    assert "errors in the config" not in text


def test_a_required_name_is_found_in_the_word_of_others(path: Path) -> None:
    path.write_text(SMALL.replace("{name: grpo}", "{adv_estimator: grpo, kl_coef: 1}"))
    text = failure(path)
    assert "algorithm.name is required" in text
    assert "write name: grpo in place of adv_estimator; kl_coef is algorithm.kl.coef" in text


def test_an_algorithm_is_found_in_the_spelling_of_others() -> None:
    assert {spelled(name) for name in ("reinforce++", "REINFORCE_plus_plus", "reinforce-pp")} == {"reinforce_pp"}


def test_every_synonym_leads_to_a_key_that_exists() -> None:
    options = {"algorithm": PolicyGradient.Config, "data.train": Table.Config, "data.eval": Table.Config}
    clips = options_class("algorithm", "grpo").model_fields
    for key in _WORDS:
        section, _, name = key.partition(".")
        plugin = next((each for each in options if key.startswith(each + ".")), None)
        if plugin is not None:
            first = key[len(plugin) + 1 :].split(".")[0]
            assert first == "name" or first in options[plugin].model_fields or first in clips, key
        elif section == "environment":
            assert not name or name in EnvironmentSpec.model_fields, key
        elif section == "critic":
            assert name in CriticConfig.model_fields, key
        elif section != "rewards" and name:
            assert name.split(".")[0] in Config.model_fields[section].annotation.model_fields, key
    assert synonym("n").key == "sampler.group_size"  # type: ignore[union-attr]
    assert synonym("nothing.of.the.kind") is None


def test_a_key_that_was_renamed_works_and_says_its_new_name(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load_config([path], ["sampler.memory_fraction=0.3"])
    assert loaded.config.sampler.gpu_memory_utilization == 0.3
    assert loaded.origins["sampler.gpu_memory_utilization"] == "override sampler.memory_fraction=0.3"
    assert main(["show", str(path), "sampler.memory_fraction=0.3"]) == 0
    out, err = capsys.readouterr()
    assert err.count("sampler.memory_fraction is now called sampler.gpu_memory_utilization") == 1
    assert "memory_fraction" not in out.replace("override sampler.memory_fraction", "")
    text = failure(path, "sampler.memory_fraction=0.3", "sampler.gpu_memory_utilization=0.4")
    assert "and both are set" in text and "remove sampler.memory_fraction" in text


def test_a_run_with_the_old_name_of_a_key_has_not_changed() -> None:
    now = plain_config(
        from_mapping({"model": {"path": "m"}, "data": {"train": {"name": "x"}}, "algorithm": {"name": "a"}})
    )
    before = {**now, "sampler": {**now["sampler"]}}
    before["sampler"]["memory_fraction"] = before["sampler"].pop("gpu_memory_utilization")
    assert changed_config(before, now) == []


def test_a_run_of_a_version_without_a_key_had_its_default() -> None:
    plain = {"model": {"path": "m"}, "data": {"train": {"name": "x"}}, "algorithm": {"name": "a"}}
    now = plain_config(from_mapping(plain))
    other = plain_config(
        from_mapping({**plain, "learner": {"routing": "replayed"}, "model": {"path": "m", "lora": {}}})
    )
    older = deepcopy(now)
    for section, key in (("learner", "routing"), ("learner", "router_aux_loss_coef"), ("sampler", "group_size")):
        del older[section][key]
    del older["model"]["quantize"]
    assert changed_config(older, now) == []
    found = {str(change) for change in changed_config(older, other) if change.matters}
    assert found == {
        "learner.routing: own -> replayed",
        "model.lora.rank: null -> 16",
        "model.lora.alpha: null -> 32",
        "model.lora.targets.0: null -> language",
    }


def test_an_easyr1_config_is_translated_and_the_rest_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, out = tmp_path / "easyr1.yaml", tmp_path / "ours.yaml"
    theirs.write_text(EASYR1)
    (tmp_path / "math.jinja").write_text("{{ content | trim }} Think. {{content}}\n")
    (tmp_path / "math.py").write_text("def compute_score(rollouts):\n    return [0.0 for _ in rollouts]\n")
    monkeypatch.chdir(tmp_path)
    assert main(["init", "config", str(out), "--from", str(theirs), "worker.rollout.n=6"]) == 0
    said = capsys.readouterr().out
    config = load_config([out], options_class=options_class).config
    assert config.model.path == "Qwen/Qwen2.5-VL-3B-Instruct" and config.model.freeze == ("vision", "projector")
    assert config.model.lora is None
    train = {key: value for key, value in config.data.train.options.items() if value is not None}
    assert train | {"path": "hiyouga/geometry3k", "split": "train", "prompt": "problem", "answer": "reference"} == train
    assert config.data.eval is not None and config.data.eval.options["split"] == "test"
    assert config.data.prompt_template == "{{ prompt | trim }} Think. {{prompt}}"
    assert (config.data.max_prompt_tokens, config.sampler.max_new_tokens) == (1024, 512)
    assert (config.sampler.group_size, config.sampler.gpu_memory_utilization) == (6, 0.6)
    assert (config.learner.minibatches, config.learner.zero_stage) == (4, 2)
    assert config.algorithm.name == "reinforce_pp" and config.algorithm.options["clip_high"] == 0.3
    kl = config.algorithm.options["kl"]
    assert (kl["coef"], kl["where"], kl["estimator"]) == (0.01, "loss", "k3")
    assert config.rewards[0].name == "math.py:compute_score"
    assert (config.trainer.steps, config.trainer.prompts_per_step, config.trainer.save_every) == (60, 512, 5)
    assert (config.cluster.name, config.cluster.ranks) == ("ray", 4)
    assert [tracker.name for tracker in config.trackers] == ["tensorboard"]
    left = (
        "worker.rollout.top_p: 0.9",
        "worker.actor.tau_positive: 1.0",
        "worker.actor.micro_batch_size_per_device_for_update: 4  (learner.tokens_per_microbatch: counted in tokens",
        "trainer.logger: other  (no installed tracker is called so)",
    )
    for line in left:
        assert f"  {line}" in said and f"#   {line}" in out.read_text()
    assert said.count("\n  ") == len(left) and "padding_free" not in said


def test_plain_numbers_of_other_trainers_are_translated_too() -> None:
    theirs = {
        "actor_rollout_ref": {"rollout": {"n": 4}, "actor": {"optim": {"lr": 1e-5}}, "model": {"path": "m"}},
        "critic": {"optim": {"lr": 1}},
        "bf16": True,
    }
    found = translate(theirs, dataset="files", algorithms=(), trackers={}, near=Path())
    assert found.values == {"sampler": {"group_size": 4}, "learner": {"lr": 1e-5}, "model": {"path": "m"}}
    assert [key for key, _, _ in found.left_out] == ["critic.optim.lr", "bf16"]


@pytest.mark.parametrize(
    "key",
    ["actor_rollout_ref.actor.ulysses_sequence_parallel_size", "ring_attn_size", "cp_size", "sequence_parallel_size"],
)
def test_ranks_that_share_a_row_are_translated(key: str) -> None:
    theirs: dict[str, Any] = {"critic": {"ulysses_sequence_parallel_size": 8}}
    place = theirs
    *parents, last = key.split(".")
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = 4
    found = translate(theirs, dataset="files", algorithms=(), trackers={}, near=Path())
    assert found.values == {"learner": {"sequence_parallel_size": 4}}
    assert [key for key, _, _ in found.left_out] == ["critic.ulysses_sequence_parallel_size"]


def test_easyr1s_ranks_that_share_a_row_are_translated(path: Path) -> None:
    path.write_text(EASYR1_KEYS.replace("ulysses_size: 1", "ulysses_size: 2"))
    assert of(read_tree([path])[0].plain()).values["learner"]["sequence_parallel_size"] == 2


TRACKERS = {"w": ("mode", "project", "experiment"), "m": ("experiment",), "t": ()}
EASYR1_KEYS = """
data: {train_files: a@train, val_files: b@test, prompt_key: problem, answer_key: answer, image_key: images,
  video_key: videos, image_dir: null, video_fps: 2.0, max_prompt_length: 2048, max_response_length: 2048,
  rollout_batch_size: 512, mini_rollout_batch_size: 256, val_batch_size: 1024, format_prompt: null,
  override_chat_template: "{{ x }}", shuffle: true, seed: 1, min_pixels: 262144, max_pixels: 4194304,
  filter_overlong_prompts: true, filter_overlong_prompts_workers: 16}
algorithm: {adv_estimator: grpo, disable_kl: false, use_kl_loss: true, kl_penalty: low_var_kl, kl_coef: 1.0e-2,
  online_filtering: true, filter_key: accuracy, filter_low: 0.01, filter_high: 0.99, kl_type: fixed, kl_horizon: 10000,
  kl_target: 0.1, gamma: 1.0, lam: 1.0}
worker:
  actor: {global_batch_size: 128, micro_batch_size_per_device_for_update: 4, max_grad_norm: 1.0, padding_free: true,
    dynamic_batching: true, ulysses_size: 1, use_torch_compile: true, loss_type: default, tau_positive: 1.0,
    tau_negative: 1.05, model: {model_path: m, tokenizer_path: null, override_config: {a: 1},
    enable_gradient_checkpointing: true, trust_remote_code: false, freeze_vision_tower: false},
    optim: {lr: 1.0e-6, weight_decay: 1.0e-2, betas: [0.9, 0.999], strategy: adamw, lr_warmup_ratio: 0.1,
    min_lr_ratio: 0.1}, fsdp: {enable_full_shard: true, fsdp_size: -1, torch_dtype: bf16},
    offload: {offload_params: true}}
  rollout: {n: 5, temperature: 1.0, top_p: 0.99, top_k: 50, seed: 1, limit_images: 2, dtype: bf16, ignore_eos: true,
    gpu_memory_utilization: 0.6, enforce_eager: false, enable_chunked_prefill: true, tensor_parallel_size: 2,
    max_model_len: 4096, max_num_batched_tokens: 8192, disable_log_stats: true,
    val_override_config: {temperature: 0.6, top_p: 0.95, n: 1}}
  ref: {fsdp: {enable_full_shard: true, enable_cpu_offload: true}, offload: {offload_params: false}}
  reward: {reward_type: batch, reward_function: "f.py:compute_score", skip_special_tokens: true, num_cpus: 2}
  critic: {optim: {lr: 1.0e-5}}
trainer: {total_epochs: 15, max_steps: null, project_name: easy_r1, experiment_name: mine, logger: [console, w],
  nnodes: 1, n_gpus_per_node: 8, max_try_make_batch: 20, critic_warmup: 0, val_freq: 5, val_before_train: true,
  val_only: false, val_generations_to_log: 3, save_freq: 5, save_limit: 3, save_model_only: false,
  save_checkpoint_path: null, load_checkpoint_path: c, ray_timeline: t, find_last_checkpoint: true, unheard_of: 3}
"""


def test_each_key_that_is_not_translated_has_its_reason(path: Path) -> None:
    path.write_text(EASYR1_KEYS)
    found = of(read_tree([path])[0].plain())
    reasons = {key: note for key, _, note in found.left_out}
    assert [key for key, note in reasons.items() if not note] == []
    for key, part in {
        "worker.rollout.top_p": "sampler.top_p: only 1.0: the learner cannot reproduce",
        "worker.reward.reward_type": "a function of one rollout or of several is told apart by its parameters",
        "trainer.max_try_make_batch": "algorithm.dynamic_sampling.max_rounds: rounds of replacements",
        "worker.ref.fsdp.enable_cpu_offload": "the reference is the initial policy",
        "worker.critic.optim.lr": "critic.lr",
        "worker.rollout.max_model_len": "data.max_prompt_tokens and sampler.max_new_tokens together",
        "trainer.unheard_of": "no key of mmrl's is known for it",
    }.items():
        assert part in reasons[key], key


@pytest.mark.parametrize(
    ("logger", "expected"),
    [
        ("w", [{"name": "w", "project": "p"}]),
        (["console", "m"], [{"name": "m", "experiment": "p"}]),
        (["w", "m"], [{"name": "w", "project": "p"}, {"name": "m", "experiment": "p"}]),
        ("t", [{"name": "t"}]),
        ("console", None),
    ],
)
def test_the_project_of_others_is_the_trackers(logger: object, expected: object) -> None:
    found = of({"trainer": {"logger": logger, "project_name": "p", "experiment_name": "e"}})
    assert found.values.get("trackers") == expected and found.values["trainer"]["run_dir"] == "runs/e"
    named = expected is not None and len(expected[0]) > 1  # type: ignore[index]
    assert [key for key, _, _ in found.left_out] == ([] if named else ["trainer.project_name"])


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("enforce_eager", False, False),
        ("enforce_eager", True, True),
        ("enable_chunked_prefill", True, False),
        ("enable_chunked_prefill", False, True),
    ],
)
def test_an_engines_setting_that_is_vllms_default_is_not_copied(name: str, value: bool, kept: bool) -> None:
    found = of({"worker": {"rollout": {"n": 2, name: value}}})
    assert found.values["sampler"] == {"group_size": 2, **({"engine": {name: value}} if kept else {})}
    assert found.left_out == []


def of(theirs: dict[str, Any], near: Path = Path()) -> Translation:
    return translate(theirs, dataset="files", algorithms=("grpo",), trackers=TRACKERS, near=near)


def nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]


def left(theirs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value, _ in of(theirs).left_out}


def test_sampling_of_the_evaluation_is_not_that_of_the_training() -> None:
    found = of({"worker": {"rollout": {"val_override_config": {"temperature": 0.6, "max_tokens": 64}}}})
    key = "worker.rollout.val_override_config"
    assert found.values == {}
    assert [each[:2] for each in found.left_out] == [(f"{key}.temperature", 0.6), (f"{key}.max_tokens", 64)]
    verl = of({"rollout": {"val_kwargs": {"temperature": 0}, "temperature": 1.0}})
    assert verl.values == {"sampler": {"temperature": 1.0}}
    assert verl.left_out == [
        (
            "rollout.val_kwargs.temperature",
            0,
            "an evaluation is greedy, or has trainer.eval_samples completions at sampler.temperature",
        )
    ]


def test_a_penalty_that_is_off_there_is_not_turned_on() -> None:
    off = of({"algorithm": {"use_kl_in_reward": False, "kl_ctrl": {"kl_coef": 0.001}}})
    assert off.values == {} and ("algorithm.kl_ctrl.kl_coef", 0.001, "KL is off there") in off.left_out
    on = of({"algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.001}}})
    assert on.values == {"algorithm": {"kl": {"coef": 0.001}}}


def test_a_penalty_without_its_coefficient_is_listed() -> None:
    found = of({"algorithm": {"use_kl_loss": True, "kl_penalty": "kl"}})
    assert found.values == {} and {key for key, _, _ in found.left_out} == {
        "algorithm.use_kl_loss",
        "algorithm.kl_penalty",
    }
    assert "  (EasyR1 has a kl_coef of 1e-3 where none is written; see algorithm.kl.coef)" in found.lines()[0]


@pytest.mark.parametrize("files", [{}, {"train_files": ["a", "b"]}, {"train_files": 5}])
def test_columns_of_files_that_are_not_translated_are_listed(files: dict[str, Any]) -> None:
    columns = {"prompt_key": "q", "answer_key": "a"}
    found = of({"data": {**files, **columns}})
    assert "train" not in found.values.get("data", {})
    assert {key for key, _, _ in found.left_out} == {f"data.{key}" for key in (*files, *columns)}


def test_a_second_value_for_one_key_is_listed() -> None:
    found = of({"lr": 1e-5, "learning_rate": 1e-6, "actor": {"lr": 1e-5}})
    assert found.values == {"learner": {"lr": 1e-5}}
    assert found.left_out == [("learning_rate", 1e-6, "learner.lr")]


@pytest.mark.parametrize(
    "theirs",
    [
        nested("data.format_prompt", 5),
        nested("data.train_files", 5),
        nested("data.rollout_batch_size", "${BS}") | {"worker": {"actor": {"global_batch_size": 8}}},
        {"trainer": {"n_gpus_per_node": "${oc.env:NGPU}", "nnodes": 2}},
        nested("trainer.nnodes", "2"),
        nested("trainer.save_freq", "5"),
        nested("trainer.save_limit", "3"),
        nested("trainer.save_limit", -1),
        nested("trainer.max_steps", "60"),
        nested("trainer.logger", 5),
        nested("trainer.save_checkpoint_path", 5),
        nested("algorithm.kl_coef", "${KL}"),
        nested("algorithm.online_filtering", "${F}"),
        nested("algorithm.adv_estimator", ["grpo"]),
        nested("worker.actor.loss_avg_mode", ["token"]),
        nested("worker.actor.clip_ratio_low", "${C}"),
        nested("worker.actor.optim.lr_scheduler_type", ["linear"]),
        nested("worker.actor.fsdp.enable_full_shard", "${F}"),
        nested("worker.actor.model.lora.rank", "${R}"),
        nested("worker.actor.model.freeze_vision_tower", "${F}"),
        nested("worker.reward.reward_function", 5),
        nested("worker.rollout.temperature", 0),
        nested("worker.rollout.n", 1.5),
    ],
)
def test_a_value_that_ours_cannot_have_is_listed_and_nothing_else(theirs: dict[str, Any]) -> None:
    assert of(theirs).values == {}
    assert left(theirs) == dict(_flat(theirs))


def test_what_easyr1_takes_where_nothing_is_written_is_taken_too() -> None:
    model = nested("worker.actor.model.model_path", "m")
    found = of(model)
    assert found.left_out == []
    assert found.values == {
        "model": {"path": "m"},
        "algorithm": {
            "kl": {"coef": 1e-3, "where": "reward", "estimator": "k1"},
            "clip_low": 0.2,
            "clip_high": 0.3,
            "dual_clip": 3.0,
            "aggregation": "token-mean",
        },
        "learner": {"weight_decay": 0.01},
    }
    without = of({**model, "algorithm": {"disable_kl": True, "adv_estimator": "grpo"}})
    assert without.values["algorithm"]["kl"] == {"coef": 0.0} and without.left_out == []


@pytest.mark.full
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "remax", "reinforce_plus_plus"])
def test_each_estimator_of_easyr1_becomes_a_config_that_clips_and_has_its_kl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], estimator: str
) -> None:
    theirs, out = tmp_path / "easyr1.yaml", tmp_path / "ours.yaml"
    theirs.write_text(EASYR1)
    (tmp_path / "math.py").write_text("def compute_score(rollouts):\n    return [0.0 for _ in rollouts]\n")
    words = [f"algorithm.adv_estimator={estimator}", "worker.actor.clip_ratio_high=0.28", "algorithm.disable_kl=true"]
    words += [f"worker.reward.reward_function={tmp_path / 'math.py'}:compute_score"]
    assert main(["init", "config", str(out), "--from", str(theirs), *words]) == 0
    options = load_config([out], options_class=options_class).config.algorithm.options
    assert options["kl"]["coef"] == 0 and options.get("loss", "ppo_clip") == "ppo_clip"
    has_no_clip = f"algorithm.clip_high: 0.28  ({estimator} has no such option)" in capsys.readouterr().out
    assert has_no_clip != (options.get("clip_high") == 0.28)


def test_several_files_to_evaluate_on_are_sets_by_their_names() -> None:
    files = ["data/geo.parquet", "owner/charts@test", "owner/charts@val", "8.jsonl", "name.csv"]
    found = of({"data": {"val_files": files, "prompt_key": "question"}, "trainer": {"val_freq": 5}}).values
    evaluated = found["data"]["eval"]
    assert [*evaluated] == ["geo", "charts", "charts_3", "set_8", "set_name"]
    assert evaluated["charts_3"] == {"name": "files", "path": "owner/charts", "split": "val", "prompt": "question"}
    assert found["trainer"] == {"eval_every": 5}
    assert of({"data": {"val_files": ["x.parquet"]}}).values["data"]["eval"] == {"name": "files", "path": "x.parquet"}
    assert left({"data": {"val_files": [{"path": "x"}]}}) == {"data.val_files": [{"path": "x"}]}


def test_values_of_evaluations_as_text_are_listed() -> None:
    theirs = {
        "data": {"val_files": "x"},
        "trainer": {"val_freq": "5"},
        "worker": {"rollout": {"val_override_config": {"n": "1"}}},
    }
    assert left(theirs) == {"trainer.val_freq": "5", "worker.rollout.val_override_config.n": "1"}


@pytest.mark.parametrize(
    ("exclude", "listed"), [(".*visual.*", {}), (None, {"worker.actor.model.freeze_vision_tower": True})]
)
def test_nothing_is_frozen_beside_adapters(path: Path, exclude: str | None, listed: dict[str, Any]) -> None:
    lora = {"rank": 64, "alpha": 32, "target_modules": "all-linear", "exclude_modules": exclude}
    theirs = {"worker": {"actor": {"model": {"freeze_vision_tower": True, "lora": lora}}}}
    parts = ["language", "vision", "projector"] if exclude is None else ["language"]
    assert of(theirs).values == {"model": {"lora": {"rank": 64, "alpha": 32, "targets": parts}}}
    assert left(theirs) == listed


@pytest.mark.parametrize(
    ("theirs", "ours", "listed"),
    [
        ({"max_steps": -1, "num_train_epochs": 1}, {"epochs": 1}, {}),
        ({"num_train_epochs": 3, "max_steps": 100}, {"steps": 100}, {"num_train_epochs": 3}),
        ({"trainer": {"total_epochs": 15, "max_steps": None}}, {"epochs": 15}, {}),
        ({"trainer": {"total_epochs": 15, "max_steps": 9}}, {"steps": 9}, {"trainer.total_epochs": 15}),
    ],
)
def test_steps_win_over_epochs(theirs: dict[str, Any], ours: dict[str, Any], listed: dict[str, Any]) -> None:
    assert of(theirs).values == {"trainer": ours}
    assert left(theirs) == listed


def test_options_of_a_reward_keep_their_mappings() -> None:
    options = {"table": {"a": 1, "b": 2}, "w": None, "weight": 2, "strict": True}
    theirs = {"worker": {"reward": {"reward_function": "a.py:f", "reward_function_kwargs": options}}}
    assert of(theirs).values == {"rewards": [{"name": "a.py:f", "table": {"a": 1, "b": 2}, "strict": True}]}
    kwargs = "worker.reward.reward_function_kwargs"
    assert left(theirs) == {f"{kwargs}.w": None, f"{kwargs}.weight": 2}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ('{{ content if content else "content" }}', '{{ prompt if prompt else "content" }}'),
        ("{% if content %}{{content}}{%- endif %}, content", "{% if prompt %}{{prompt}}{%- endif %}, content"),
        ("{# content #}{{ x.content ~ content | trim }}\nb", "{# content #}{{ x.content ~ prompt | trim }}\nb"),
        ("{{ content", None),
    ],
)
def test_a_template_names_the_prompt_wherever_it_named_the_content(
    tmp_path: Path, theirs: str, ours: str | None
) -> None:
    (tmp_path / "a.jinja").write_text(theirs)
    found = of({"data": {"format_prompt": "./a.jinja"}}, tmp_path)
    assert found.values == ({"data": {"prompt_template": ours}} if ours else {})
    assert [key for key, _, _ in found.left_out] == ([] if ours else ["data.format_prompt"])


def test_a_translated_config_is_written_as_it_is_read(path: Path) -> None:
    config = load_config([path]).config
    path.write_text(to_yaml(config))
    assert load_config([path]).config == config
