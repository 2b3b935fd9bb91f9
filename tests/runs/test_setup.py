"""What is checked before a run starts: plugins against the run, and what `check` and `train` say of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from PIL import Image

from mmrl.cluster.launch import check_devices
from mmrl.commands.check.networks import critic_lines, teacher_lines
from mmrl.commands.cli import main
from mmrl.config.load import from_mapping, load_config
from mmrl.config.sections import Config
from mmrl.engine.machine.host_memory import HostMemory, check_hosts
from mmrl.engine.network.family import FAMILIES
from mmrl.errors import ConfigError, PluginError, ResourceError
from mmrl.runs.run_warnings import config_warnings, model_warnings
from mmrl.runs.setup import RunSetup

REWARDS = """
from mmrl.interfaces import Reward

class Plain(Reward):
    def __init__(self, config):
        raise RuntimeError("as large as a model, made in the driver")

    def score(self, rollouts):
        return [0.0] * len(rollouts)

class Careful(Reward):
    penalty = True

    class Config(Reward.Config):
        answer: str | list[str] = []

    def check(self, run):
        if self.config.answer == "refuse":
            raise ValueError(f"groups of {run.group_size} are refused")
        if self.config.answer == "fail":
            raise KeyError("oops")
        return self.config.answer

    def score(self, rollouts):
        return [float(f"{{{rollout.answer}}}" in rollout.text) for rollout in rollouts]
"""
ALGORITHM = """
from mmrl.interfaces import Aggregation, Algorithm

class Strict(Algorithm):
    aggregation = Aggregation("token-mean")

    def check(self, run):
        if run.updates_per_batch > 4:
            raise ValueError(f"{run.updates_per_batch} updates are too many")
        return [f"{run.prompts_per_step} x {run.group_size} rollouts of {run.max_new_tokens} for {run.rewards}"]

    def credit(self, batch): ...

    def loss(self, tokens): ...
"""


@pytest.fixture
def config(package: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    """Sections of a run with an algorithm and rewards of third parties; the last reward answers as it is told."""
    package(REWARDS, "plain = {module}:Plain\ncareful = {module}:Careful", name="rewards-kit")
    package(ALGORITHM, "strict = {module}:Strict", name="algorithm-kit", group="algorithms")

    def build(answer: str | list[str], **sections: Any) -> dict[str, Any]:
        return {
            "model": {"path": "m"},
            "data": {"train": {"name": "table", "path": "none"}},
            "rewards": [{"name": "plain"}, {"name": "careful", "label": "care", "answer": answer}],
            "algorithm": {"name": "strict"},
            "sampler": {"group_size": 3, "max_new_tokens": 7},
            "trainer": {"prompts_per_step": 5},
            "learner": {"minibatches": 2, "epochs": 2},
            **sections,
        }

    return build


@pytest.fixture
def plan(config: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., RunSetup]:
    def build(answer: str | list[str] = [], **sections: Any) -> RunSetup:  # noqa: B006
        checked: Config = from_mapping(config(answer, **sections))
        return RunSetup(checked, tmp_path)

    return build


def test_plugins_warn_of_a_run_that_they_know(plan):
    assert config_warnings(plan(["beware"])) == [
        "algorithm: strict: 5 x 3 rollouts of 7 for ('plain', 'care')",
        "rewards.1: careful: beware",
    ]


def test_parts_that_are_as_long_as_completions_are_told_of(plan):
    def told(engine_steps):
        sampler = {"group_size": 3, "max_new_tokens": 20, "partial": {"engine_steps": engine_steps}}
        return [each for each in config_warnings(plan(["beware"], sampler=sampler)) if "sampler.partial" in each]

    assert told(19) == [] and "is finished in as many steps, so none is cut" in told(20)[0]


@pytest.mark.parametrize("asked", ["auto", "off"])
@pytest.mark.parametrize("can", [True, False])
def test_a_model_that_cannot_share_a_prompt_is_told_of(plan, asked, can):
    from transformers import LlamaConfig

    made = plan(learner={"share_prefix": asked})
    made.folder = SimpleNamespace(family=replace(FAMILIES["llama"], shares_prefix=can), config=LlamaConfig())
    told = ["learner.share_prefix: models of type llama cannot share a prompt: each completion is packed with its own"]
    assert model_warnings(made) == (told if asked == "auto" and not can else [])


def test_linear_attention_in_plain_torch_on_a_gpu_is_told_of(plan, monkeypatch):
    from transformers import Qwen3_5TextConfig

    made = plan()
    made.folder = SimpleNamespace(family=FAMILIES["qwen3_5_text"], config=Qwen3_5TextConfig(num_hidden_layers=4))
    assert model_warnings(made) == []
    monkeypatch.setattr("mmrl.engine.device.lacks_state_kernels", lambda kind: True)
    assert ["pip install flash-linear-attention" in warning for warning in model_warnings(made)] == [True]


def test_every_plugin_that_refuses_the_run_is_named_with_its_key(plan):
    with pytest.raises(ConfigError) as caught:
        config_warnings(plan("refuse", learner={"minibatches": 5}))
    assert str(caught.value) == (
        "2 errors in the config\n\n"
        "5 updates are too many\n  where:    algorithm: strict\n\n"
        "groups of 3 are refused\n  where:    rewards.1: careful"
    )


@pytest.mark.parametrize(("answer", "fragment"), [("fail", "KeyError: 'oops'"), ("a text", "expected a list of texts")])
def test_a_check_that_fails_is_the_plugins_error(plan, answer, fragment):
    with pytest.raises(PluginError, match=r"Careful\.check raised") as caught:
        config_warnings(plan(answer))
    assert fragment in str(caught.value)


def test_penalties_go_by_the_names_of_their_components(plan):
    assert plan().penalties == {"care"}


def test_rewards_that_share_a_label_are_all_penalties_or_none(plan):
    rewards = [{"name": name, "label": "one", "sources": [name]} for name in ("plain", "careful")]
    with pytest.raises(ConfigError, match="one of the rewards called 'one' is a penalty"):
        _ = plan(rewards=rewards).penalties


@pytest.fixture
def config_file(config: Callable[..., Any], models: Callable[[str], Path], tmp_path: Path) -> str:
    """A run that is complete up to the engine."""
    rows = [{"problem": f"what is {i}+1?", "answer": str(i + 1)} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {
        "model": {"path": str(models("qwen2"))},
        "data": {"train": {"name": "table", "path": str(tmp_path / "rows.jsonl")}, "max_prompt_tokens": 64},
        "rewards": [{"name": "careful", "answer": ["beware"]}],
        "trainer": {"prompts_per_step": 5, "run_dir": str(tmp_path / "run")},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config([], **sections)))
    return str(path)


def test_check_shows_warnings_as_lines_and_as_json(config_file, capsys):
    assert main(["check", config_file]) == 0
    assert "warning    rewards.0: careful: beware" in capsys.readouterr().out.splitlines()
    assert main(["check", config_file, "--json"]) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert [warning.partition(":")[0] for warning in warnings] == ["algorithm", "rewards.0"]


def test_train_shows_warnings_before_the_engine_starts(config_file, capsys, monkeypatch, tmp_path):
    def fails(*arguments: Any, **options: Any) -> None:
        raise ResourceError("no device today")

    monkeypatch.setattr("mmrl.cluster.launch.start_engine", fails)
    assert main(["train", config_file]) == 5
    assert "warning: rewards.0: careful: beware" in capsys.readouterr().out.splitlines()
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["warning", "warning", "error"]
    assert events[1]["message"] == "rewards.0: careful: beware"


@pytest.fixture
def mixed(plan, models, tmp_path) -> Callable[..., RunSetup]:
    """A run on two datasets of three rows each, with two rewards whose sources are given, and an evaluation or none."""

    def build(first: list[str] | None, second: list[str] | None, **evaluation: Any) -> RunSetup:
        specs = {}
        for name in ("sums", "products", "held"):
            rows = [{"problem": f"what is {i}+1?", "answer": str(i + 1)} for i in range(3)]
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            specs[name] = {"name": "table", "label": name, "path": str(tmp_path / f"{name}.jsonl")}
        data = {"train": {**specs["sums"], "weight": 3}, "mix": [{**specs["products"], "weight": 1}]}
        return plan(
            model={"path": str(models("qwen2"))},
            data={**data, "max_prompt_tokens": 64} | ({"eval": specs["held"] | evaluation} if evaluation else {}),
            rewards=[{"name": "plain", "sources": first}, {"name": "careful", "sources": second}],
        )

    return build


def test_mixed_datasets_are_one_source_whose_rows_know_theirs(mixed):
    source = mixed(None, ["sums"]).training
    assert source.sources == {"sums": 3, "products": 3}
    assert source[0].id.startswith("sums/") and source[5].source == "products"
    batch = [source[row].source for _, row in source.order(seed=0).take(0, 8)]
    assert batch.count("sums") == 6


def test_rows_that_no_reward_scores_are_an_error_that_lists_both_sides(mixed):
    with pytest.raises(ConfigError, match="no reward scores the rows of products") as caught:
        _ = mixed(["sums"], ["sums"]).training
    assert "sums (3), products (3)" in caught.value.where and "rewards for sums" in caught.value.possible
    with pytest.raises(ConfigError, match="no reward scores the rows of held"):
        _ = mixed(["sums", "products"], ["sums"], limit=2).evaluations


def test_the_categories_of_an_evaluation_are_counted_and_bounded(mixed, monkeypatch):
    found = mixed(None, None, category="answer").evaluations[""]
    assert found.categories == {"1": 1, "2": 1, "3": 1}
    monkeypatch.setattr("mmrl.runs.checks.MOST", 2)
    with pytest.raises(ConfigError, match=r"the rows of data\.eval are of 3 categories, such as 1, 2, 3") as caught:
        _ = mixed(None, None, category="answer").evaluations
    assert caught.value.possible == "at most 2 categories" and caught.value.where == "data.eval.category"
    assert len(mixed(None, None, limit=2).evaluations) == 1


def test_a_reward_for_rows_that_are_not_there_is_an_error(mixed):
    with pytest.raises(ConfigError, match="meant for rows of summs, and there are none") as caught:
        _ = mixed(None, ["summs"]).training
    assert caught.value.possible == "products, sums"
    assert len(mixed(None, ["held"], limit=2).training) == 6


@pytest.mark.parametrize("command", ["check", "plan", "train"])
def test_heads_that_the_sampler_cannot_divide_are_refused_with_the_sizes_that_it_can(config_file, capsys, command):
    sizes = ["sampler.tensor_parallel_size=3", "cluster.name=ray", "cluster.ranks=6"]
    assert main([command, config_file, *sizes]) == 2
    error = capsys.readouterr().err
    assert "3 ranks cannot share one copy of the sampler's weights: the model has 4 attention heads" in error
    assert "1, 2 (with cluster.ranks: 6)" in error
    sizes[2:] = ["cluster.sampler_ranks=6", "cluster.learner_ranks=1"]
    assert main([command, config_file, *sizes]) == 2
    assert "1, 2 (with cluster.sampler_ranks: 6)" in capsys.readouterr().err


def mixture(models: Callable[[str], Path], tmp_path: Path, columns: int) -> str:
    """A folder of a mixture of experts with so many columns each; its weights are of no use."""
    folder = shutil.copytree(models("qwen3_moe"), tmp_path / "mixture")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": columns}))
    return f"model.path={folder}"


@pytest.mark.parametrize(("columns", "error"), [(768, ""), (771, "each of the model's experts has 771 columns")])
def test_experts_that_ranks_cannot_divide_are_refused(columns, error, models, config_file, tmp_path, capsys):
    sizes = ["sampler.tensor_parallel_size=2", "cluster.name=ray", "cluster.ranks=2"]
    code = main(["check", config_file, mixture(models, tmp_path, columns), *sizes])
    assert code == (2 if error else 0) and error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("columns", "settings", "error"),
    [
        (48, {}, "a multiple of 32 columns of each expert: a rank has 48"),
        (48, {"sampler": {"name": "hf"}, "learner": {"routing": "replayed"}}, ""),
        (32, {}, ""),
        (32, {"learner": {"routing": "compared"}}, "vLLM on a CPU does not tell the experts that it chooses"),
    ],
)
def test_experts_that_vllm_cannot_take_on_this_device_end_a_run_before_its_engines_start(
    columns, settings, error, models, tmp_path, config
):
    from mmrl.engine.network.experts import experts_refusal
    from mmrl.engine.network.folder import ModelFolder
    from mmrl.engine.rank import RankEngine
    from mmrl.engine.spec import EngineSpec

    folder = ModelFolder.open(mixture(models, tmp_path, columns).partition("=")[2])
    checked = from_mapping(config([], **settings))
    found = experts_refusal(folder, checked, "cpu")
    assert error in str(found) if error else found is None
    assert experts_refusal(folder, checked, "cuda") is None
    if "routing" in settings.get("learner", {}):  # of no use to an evaluation
        assert experts_refusal(folder, checked, "cpu", learns=False) is None
    if error:
        spec = EngineSpec(checked, folder, None, object(), 0, with_sampler=True)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="experts"):
            RankEngine(spec, "cpu")


@pytest.mark.parametrize("setting", ["learner.router_aux_loss_coef=0.01", "learner.routing=replayed"])
def test_a_dense_model_is_asked_nothing_about_experts(setting, config_file, capsys):
    assert main(["check", config_file, setting]) == 2
    error = capsys.readouterr().err
    assert "a model of type qwen2 has no experts" in error and setting.partition("=")[0] in error


def test_experts_cannot_be_replayed_where_nothing_is_sampled(models, config_file, capsys, tmp_path):
    words = ["algorithm.name=sft", "sampler.temperature=1", "learner.routing=replayed"]
    assert main(["check", config_file, mixture(models, tmp_path, 32), *words]) != 0
    assert "demonstrations are not sampled" in capsys.readouterr().err


def test_more_stages_of_the_sampler_than_the_model_has_layers_are_refused(config_file, capsys):
    sizes = ["sampler.pipeline_parallel_size=3", "cluster.name=ray", "cluster.ranks=6"]
    assert main(["check", config_file, *sizes]) == 2
    error = capsys.readouterr().err
    assert "layers cannot be divided into 3 parts: the model has 2" in error and "1 to 2" in error


def test_a_gpu_too_small_for_any_setting_is_refused_before_an_engine_starts(config_file, capsys, monkeypatch):
    monkeypatch.setattr("mmrl.cluster.local.start_engine", lambda *_, **__: pytest.fail("an engine starts"))
    monkeypatch.setattr("mmrl.engine.device.total_memory_bytes", lambda kind: 3 * 10**9)
    assert main(["train", config_file]) == 5
    error = capsys.readouterr().err
    # CUDA is allowed 1.5 GB, the sampler 3 beside its weights; the model is nothing.
    assert "a GPU of this machine has 3.0 GB, and the smallest setting needs about 4.5 GB: 1.5 GB are missing" in error
    assert "model.lora" in error


def test_a_machine_with_too_little_memory_is_refused_before_an_engine_starts(config_file, capsys, monkeypatch):
    monkeypatch.setattr("mmrl.cluster.local.start_engine", lambda *_, **__: pytest.fail("an engine starts"))
    monkeypatch.setattr("mmrl.engine.device.total_memory_bytes", lambda kind: 80 * 10**9)
    monkeypatch.setattr("mmrl.cluster.launch.total_bytes", lambda: 2 * 10**9)
    assert main(["train", config_file]) == 5
    error = capsys.readouterr().err
    # A process is allowed 3 GB; beside it vLLM keeps the state of a tiny model.
    said = "this machine has 2.0 GB of memory, and 1 rank there would take about 3.0 GB: 1.0 GB are missing"
    assert said in error and "allowed for the process 3.0 GB" in error


def test_a_cpu_is_asked_for_memory_only_if_something_is_offloaded(config_file, capsys, monkeypatch):
    started = list[str]()

    def start(*_: Any, **__: Any) -> None:
        started.append("an engine")
        raise ResourceError("enough", where="here")

    monkeypatch.setattr("mmrl.cluster.local.start_engine", start)
    monkeypatch.setattr("mmrl.cluster.launch.total_bytes", lambda: 2 * 10**9)
    assert main(["train", config_file]) == 5 and started == ["an engine"]
    assert main(["train", config_file, "learner.zero_stage=1", "learner.offload=optimizer"]) == 5
    assert started == ["an engine"] and "learner.offload: none" in capsys.readouterr().err


def test_ranks_of_a_machine_share_its_memory():
    needed = HostMemory(sampler=10**9, reference=6 * 10**9)
    check_hosts([("a", 40 * 10**9)] * 4 + [("b", 10 * 10**9)], needed)
    with pytest.raises(ResourceError, match=r"a has 40\.0 GB .* 5 ranks there .* 50\.0 GB: 10\.0 GB are missing"):
        check_hosts([("a", 40 * 10**9)] * 5 + [("b", 10 * 10**9)], needed)
    with pytest.raises(ResourceError, match=r"b has .* 1 rank there") as caught:
        check_hosts([("b", 9 * 10**9)], needed)
    assert "set learner.zero_stage: 3; or raise sampler.tensor_parallel_size" in str(caught.value.remedy)
    check_hosts([("c", 1)], HostMemory())


def test_ranks_of_a_cluster_are_asked_for_their_gpus():
    ask = [("a", None), ("b", 9 * 10**9), ("c", 7 * 10**9)]
    with pytest.raises(ResourceError, match=r"a GPU of c has 7\.0 GB, .*8\.0 GB: 1\.0 GB are missing"):
        check_devices(ask, lambda: 8 * 10**9)
    check_devices(ask, lambda: 7 * 10**9)
    check_devices([("a", None)], lambda: pytest.fail("nobody has a GPU"))


@pytest.fixture
def taught(models: Callable[..., Path], tmp_path: Path) -> Callable[..., RunSetup]:
    """A run on pictures, or on text alone, whose reference is another model."""

    def build(family: str = "qwen2", *, pictured: bool = True, **sections: Any) -> RunSetup:
        Image.new("RGB", (56, 56), (9, 9, 9)).save(tmp_path / "0.png")
        row = (
            {"problem": "<image>which?", "answer": "1", "images": ["0.png"]}
            if pictured
            else {"problem": "which?", "answer": "1"}
        )
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row | {"id": str(i)}) + "\n" for i in range(4)))
        config = {
            "model": {"path": str(models("qwen2_5_vl"))},
            "data": {"train": {"name": "table", "path": str(tmp_path / "rows.jsonl")}},
            "rewards": [{"name": "exact"}],
            "algorithm": {"name": "grpo", "kl": {"coef": 0.1}},
            "reference": {"path": str(models(family))},
            "trainer": {"prompts_per_step": 2},
        }
        return RunSetup(from_mapping(config | sections), tmp_path / "media")

    return build


def test_a_teacher_that_nobody_asks_is_refused(taught):
    made = taught("qwen2_5_vl", algorithm={"name": "grpo"})
    with pytest.raises(ConfigError, match="'grpo' asks for no reference's log-probs") as caught:
        _ = made.teachers
    assert "reference.path: " in caught.value.where and "algorithm.kl.coef" in caught.value.possible


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ({"revision": "main"}, r"reference\.revision is set, and reference\.path is null"),
        ({"path": "a", "reset_every": 3}, r"reset_every makes the policy the reference, and reference\.path names"),
        ({"reset_every": 3, "teachers": [{"path": "a"}]}, r"and reference\.teachers names another model"),
        ({"path": "a", "teachers": [{"path": "b"}]}, r"reference\.path names a teacher, and reference\.teachers"),
        ([{"path": "a"}, {"path": "b"}], "both teach rows of all sources, and not both have a weight"),
        (
            [{"path": "a", "weight": 2.0}, {"path": "b", "sources": ["x", "y"]}],
            r"reference\.teachers\.0 and reference\.teachers\.1 both teach rows of x, rows of y",
        ),
        (
            [{"path": "a", "sources": ["x", "y"]}, {"path": "b", "sources": ["y"], "weight": 1.0}],
            "teach rows of y, and",
        ),
        ([{"sources": ["x"]}], r"reference\.teachers\.0\.path"),
    ],
)
def test_a_reference_that_contradicts_itself_is_refused(taught, reference, message):
    with pytest.raises(ConfigError, match=message):
        taught(reference=reference)


def test_teachers_share_the_sources_without_a_gap(taught, models):
    path = str(models("qwen2_5_vl"))
    known = taught(reference=[{"path": path, "sources": ["table"]}])
    assert known.training.sources == {"table": 4}
    assert known.fingerprints["reference.teachers.0.path"] == known.fingerprints["model"]
    with pytest.raises(ConfigError, match="no teacher teaches rows of table") as caught:
        _ = taught(reference=[{"path": path, "sources": ["other"]}]).training
    assert caught.value.possible == "other" and "row " in caught.value.where
    more = [{"path": path, "sources": ["table"]}, {"path": path, "sources": ["other"]}]
    with pytest.raises(ConfigError, match="teachers are meant for rows of other, and there are none"):
        _ = taught(reference=more).training
    several = [{"path": path, "weight": 2.0}, {"path": path, "weight": 1.0}]
    assert len(taught(reference=several).teachers) == 2


def test_a_reference_that_is_reset_is_refused_where_none_is_used(taught):
    with pytest.raises(ConfigError, match="'grpo' asks for no reference's log-probs") as caught:
        _ = taught(algorithm={"name": "grpo"}, reference={"reset_every": 2}).teachers
    assert "reference.reset_every: 2" in caught.value.where


def test_a_text_teacher_is_for_rows_without_images(taught, monkeypatch):
    monkeypatch.setattr("mmrl.engine.network.teacher._of_ids", lambda *args: ())  # the tiny models' ids differ
    assert taught(pictured=False).training.max_images == 0
    with pytest.raises(ConfigError, match="the teacher reads text alone, and rows of table have images") as caught:
        _ = taught().training
    assert caught.value.where.startswith("reference.path: ")


def test_a_teachers_files_are_known_to_a_run_that_goes_on(taught):
    made = taught("qwen2_5_vl")
    found = made.fingerprints
    assert found["reference.path"] == found["model"]  # the same files


def test_check_says_that_a_text_teacher_reads_no_images(taught):
    path = str(taught("qwen2").config.reference.path)
    made = taught("qwen2", pictured=False)
    assert teacher_lines(made) == [f"{path} (qwen2): the policy's token ids; it reads text alone"]
    (line,) = teacher_lines(taught("qwen2_5_vl"))
    assert line.endswith("(qwen2_5_vl): the policy's token ids and image tokens")


OWN = "the reference alone, so the policy is held where it is; name another model, a teacher"


@pytest.mark.parametrize("reference", [{}, {"path": "POLICY"}, [{"path": "POLICY"}]], ids=["none", "own", "listed"])
def test_distillation_from_the_policy_itself_is_told_of(taught, models, reference):
    policy = str(models("qwen2_5_vl"))
    reference = json.loads(json.dumps(reference).replace("POLICY", policy))
    (warning,) = config_warnings(taught(reference=reference, algorithm={"name": "opd"}, rewards=[]))
    which = f"{policy} is the policy's own folder" if reference else "null is the policy as it is at the start"
    assert warning == f"reference.path: {which}, and opd learns from {OWN}"
    assert config_warnings(taught(reference=reference, algorithm={"name": "opd", "reward_coef": 1.0})) == []
    assert config_warnings(taught("qwen2_5_vl", reference=reference)) == []
    other = [{"path": policy, "weight": 1}, {"path": "elsewhere", "weight": 1}]
    assert config_warnings(taught(reference=other, algorithm={"name": "opd"}, rewards=[])) == []


def test_entries_of_teachers_that_say_too_little_are_named_with_their_place(taught, tmp_path):
    with pytest.raises(
        ConfigError, match=r"reference\.teachers\.0\.sources should have 1 value at least, and has none"
    ):
        taught(reference=[{"path": "a", "sources": []}])
    (tmp_path / "run.yaml").write_text("reference:\n  - {path: a}\n  - {path: b, sources: [x]}\n")
    with pytest.raises(ConfigError, match=r"both teach rows of x.*\n  where:    .*run\.yaml:2, .*run\.yaml:3"):
        load_config([tmp_path / "run.yaml"])


def test_check_names_the_teacher_and_why_it_does_not_agree(taught, models, capsys, tmp_path):
    made = taught("qwen2_5_vl")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(made.config.model_dump(mode="json")))
    main(["check", str(path), "--json"])
    assert json.loads(capsys.readouterr().out)["reference"] == [str(models("qwen2_5_vl"))]
    assert main(["check", str(path), f"reference.path={models('qwen3_vl')}"]) != 0
    assert "the teacher is of type qwen3_vl, and the policy of type qwen2_5_vl" in capsys.readouterr().err


def test_a_critics_files_are_known_to_a_run_that_goes_on_and_checked_before_an_engine_starts(taught, models, tmp_path):
    own = str(models("qwen2_5_vl"))
    made = taught(reference={}, algorithm={"name": "ppo"}, critic={"path": own})
    assert made.fingerprints["critic.path"] == made.fingerprints["model"]
    assert critic_lines(made) == [f"begins from {own} with a head of zeros"]
    assert taught(reference={}, algorithm={"name": "ppo"}, critic={}).critic is None
    with pytest.raises(ConfigError, match="the critic is of type qwen3_vl, and the policy of type qwen2_5_vl"):
        _ = taught(reference={}, algorithm={"name": "ppo"}, critic={"path": str(models("qwen3_vl"))}).critic
    lora = {"path": own, "lora": {"targets": ["language"]}}
    for stage, base in ((2, "the policy's weights"), (3, "a copy of the weights")):
        made = taught(reference={}, algorithm={"name": "ppo"}, critic={}, model=lora, learner={"zero_stage": stage})
        (line,) = critic_lines(made)
        assert line.endswith(f"; adapters of its own on {base} in memory")
        assert [each for each in config_warnings(made) if "gives the critic a copy" in each] == (
            ["learner.zero_stage: 3 gives the critic a copy of the policy's weights: below 3 its adapters are on the "
             "policy's own"] if stage == 3 else []
        )  # fmt: skip
