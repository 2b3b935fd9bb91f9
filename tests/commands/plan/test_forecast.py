"""``mmrl plan`` on whole configs: numbers by hand, what does not fit, and a measured step."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors import safe_open

from mmrl.commands.cli import main
from mmrl.commands.plan.episodes import limit_lines
from mmrl.engine import device

Plan = Callable[..., tuple[int, dict[str, Any], str]]
ROWS = 6


def test_a_plan_counts_parameters_images_and_rows(plan: Plan, models: Callable[[str], Path]) -> None:
    code, found, _ = plan("--completion-tokens", "6")
    assert code == 0 and found["errors"] == []
    with safe_open(models("qwen2_5_vl") / "model.safetensors", "np") as file:
        sizes = {name: file.get_tensor(name).size for name in file.keys()}  # noqa: SIM118
    trained = {part: each["trained"] for part, each in found["model"]["parts"].items()}
    assert sum(trained.values()) == sum(sizes.values())
    assert trained["projector"] == sum(size for name, size in sizes.items() if ".merger." in name)
    data, step = found["data"], found["step"]
    assert data["patches"] == {"mean": 24.0, "max": 24} and data["image_tokens"] == {"mean": 6.0, "max": 6}
    prompt = data["prompt_tokens"]["max"]
    assert step["sample_tokens"] == 3 * 4 * (prompt + 6)
    # Each prompt once, and of each completion all but its last token.
    assert step["row_tokens_per_update"] == 3 * (prompt + 4 * 5) and step["patches_per_update"] == 3 * 24
    assert (step["updates"], step["microbatches_per_update"]) == (1, 1)
    total = sum(sizes.values())
    learner = found["learner"]
    assert (learner["weights"], learner["master"], learner["optimizer"]) == (4 * total, 4 * total, 8 * total)
    assert learner["activations_with_checkpointing"] < learner["activations_without_checkpointing"]
    assert found["sampler"]["cache_per_token"] == 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, size, float32


def test_scored_views_are_in_the_rows_too(plan: Plan) -> None:
    papo = {"algorithm": {"name": "import:mmrl_algorithms.papo:PAPO"}}
    (_, plain, _), (code, found, _) = (plan("--completion-tokens", "6", **sections) for sections in ({}, papo))
    assert code == 0
    for key in ("row_tokens_per_update", "patches_per_update"):
        assert found["step"][key] == 2 * plain["step"][key]
    assert found["step"]["sample_tokens"] == plain["step"]["sample_tokens"]


def test_a_plan_tells_what_a_run_on_its_device_would_refuse(plan: Plan, models: Callable[[str], Path]) -> None:
    model = models("qwen3_5_text")
    code, found, _ = plan(model=model)
    (said,) = [each for each in found["warnings"] if "refused" in each]
    assert code == 0 and said.startswith("sampler.name: vllm: ") and said.endswith("such a run is refused on a CPU")
    _, found, _ = plan("--memory", "80", model=model)
    assert not [each for each in found["warnings"] if "refused" in each]


def test_sharing_ranks_and_minibatches_change_the_rows(plan: Plan) -> None:
    sections = {"learner": {"tokens_per_microbatch": 60, "minibatches": 2, "zero_stage": 3, "share_prefix": "off"}}
    ray = {"cluster": {"name": "ray", "ranks": 2}}
    _, found, _ = plan("--memory", "1", **sections, **ray)
    prompt = found["data"]["prompt_tokens"]["max"]
    assert found["step"]["row_tokens_per_update"] == 8 * (prompt + 9)  # two of three groups, nothing shared
    assert found["step"]["patches_per_update"] == 8 * 24
    assert found["step"]["updates"] == 2 and found["step"]["microbatches_per_update"] >= 2
    total = sum(each["trained"] for each in found["model"]["parts"].values())
    assert found["model"]["precision"] == "bfloat16" and found["learner"]["weights"] == total  # half of 2 bytes each
    assert found["learner"]["optimizer"] == 4 * total


ENVIRONMENT = """
from mmrl import Environment, Observation

class Echo(Environment):
    def reset(self, prompt, seed):
        return None

    def step(self, turn):
        return Observation(turn.text)
"""


def test_tokens_and_images_of_observations_count(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(ENVIRONMENT)
    echo = {"name": f"{tmp_path / 'echo.py'}:Echo", "max_turns": 3, "max_observation_tokens": 30, "max_images": 2}
    _, plain, _ = plan("--memory", "80")
    code, found, _ = plan("--memory", "80", environment=echo)
    assert code == 0
    # Two of three turns are answered: 10 tokens of the policy and 2 * 30, and one for each row less when packed.
    step, before = found["step"], plain["step"]
    assert (before["completion_tokens"], step["completion_tokens"]) == (10, 70)
    assert step["sample_tokens"] - before["sample_tokens"] == 12 * 60
    assert step["row_tokens_per_update"] - before["row_tokens_per_update"] == 12 * 60
    # An image of at most 30 tokens is a square of 5 x 5, of 4 patches each; each of 12 episodes has two of its own.
    assert step["patches_per_update"] - before["patches_per_update"] == 12 * 2 * 100
    assert step["episode"] == {
        "turns": 3,
        "turn_tokens": 10,
        "policy_tokens": 10,
        "observation_tokens": 30,
        "tokens": 10 + 3 * 30,
        "images": 2,
        "images_assumed": 2,
        "patches_assumed": 200,
        "branched": 0,
    }
    longest = plain["sampler"]["longest_sequence"]
    assert found["sampler"]["longest_sequence"] == longest + 90
    assert found["learner"]["activations"] > plain["learner"]["activations"]
    _, short, _ = plan("--completion-tokens", "40", environment={**echo, "max_images": 0, "max_tokens": 40})
    assert short["step"]["completion_tokens"] == 40 and short["sampler"]["longest_sequence"] == longest + 30
    assert short["step"]["patches_per_update"] == before["patches_per_update"]
    code, _, err = plan("--completion-tokens", "41", environment={**echo, "max_tokens": 40})
    assert code == 2 and "possible: 1 to the limits of an episode: 40" in err


def test_episodes_that_go_on_from_others_are_counted_whole_and_told(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(ENVIRONMENT)
    echo = {"name": f"{tmp_path / 'echo.py'}:Echo", "max_turns": 3, "max_observation_tokens": 30}
    _, plain, _ = plan(environment=echo)
    code, found, _ = plan(environment=echo, algorithm={"name": "import:tests.faults.trees:Trees"})
    assert (code, found["step"]["episode"].pop("branched"), plain["step"]["episode"].pop("branched")) == (0, 2, 0)
    assert found["step"]["sample_tokens"] == plain["step"]["sample_tokens"]
    assert limit_lines({**found["step"]["episode"], "branched": 2})[-1].startswith("2 episodes of each group go on")


def test_a_plan_looks_at_no_more_rows_than_it_samples(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan()[1]["data"]["prompt_tokens"]
    monkeypatch.setattr("mmrl.commands.plan.forecast.SAMPLED", ROWS - 2)
    code, found, _ = plan()
    assert code == 0 and found["data"]["prompt_tokens"] == whole  # its rows are of one length


def test_sizes_come_from_the_config_where_no_weights_are(plan: Plan, models: Callable[[str], Path], tmp_path) -> None:
    bare = tmp_path / "bare_vl"
    shutil.copytree(models("qwen2_5_vl"), bare, ignore=shutil.ignore_patterns("*.safetensors"))
    assert plan(model=bare)[1]["model"] == plan()[1]["model"]
    code, _, err = plan("--measure", model=bare)
    assert code == 2 and "no model folder" in err


def test_what_does_not_fit_is_an_error_with_what_to_do(plan: Plan) -> None:
    code, found, err = plan("--memory", "3")  # CUDA and vLLM are allowed more
    assert code == 5 and "the smallest setting needs" in err and "GB are missing" in err
    assert {each["exit_code"] for each in found["errors"]} == {5} and "proposal" not in found
    code, found, err = plan("--memory", "8", "--gpus", "2", sampler={"gpu_memory_utilization": 0.9})
    assert code == 5 and "sampling may take" in err and "set cluster.name=ray, cluster.ranks=2" in err
    assert found["memory"]["phase"] == "sample" and found["memory"]["kind"] == "sampler"
    assert found["proposal"].keys() == {"cluster.name", "cluster.ranks", "sampler.gpu_memory_utilization"}
    code, _, err = plan("--memory", "8", sampler={"gpu_memory_utilization": 0.1})
    assert code == 5 and "not one sequence" in err


def test_a_step_may_have_more_prompts_than_there_are(plan: Plan) -> None:
    code, found, _ = plan("--completion-tokens", "6", trainer={"prompts_per_step": 50})
    assert code == 0 and found["data"]["prompts_looked_at"] == ROWS and found["step"]["completions"] == 200


def test_a_run_on_demonstrations_has_the_noun_that_check_has(
    config: Callable[..., Path], models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(
        models("qwen2"),
        algorithm={"name": "sft"},
        rewards=[],
        data={"train": {"name": "table", "path": str(tmp_path / "rows.jsonl"), "demonstration": "answer"}},
    )
    assert main(["plan", str(path)]) == 0
    assert "3 demonstrations of 2 tokens (mean)" in capsys.readouterr().out


def test_a_plan_on_pairs_counts_whole_groups_and_a_reference_and_no_sampler(
    plan: Plan, models: Callable[[str], Path], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    Image.new("RGB", (84, 56), "white").save(tmp_path / "white.png")
    answers = [("one two", "three"), ("four", "five six seven eight nine"), ("ten", "eleven twelve")]
    rows = [{"problem": "<image>which?", "images": ["white.png"], "chosen": c, "rejected": r} for c, r in answers]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = AutoTokenizer.from_pretrained(models("qwen2_5_vl"))
    lengths = [[len(tokenizer(text)["input_ids"]) + 1 for text in pair] for pair in answers]
    train = {"name": "table", "path": str(tmp_path / "pairs.jsonl")}
    sections: dict[str, Any] = {"algorithm": {"name": "dpo"}, "rewards": [], "data": {"train": train}}
    sections["sampler"] = {"max_new_tokens": 40}
    two = {"cluster": {"name": "ray", "ranks": 2}, "learner": {"zero_stage": 3, "tokens_per_microbatch": 30}}
    code, found, _ = plan("--memory", "80", **sections, **two)
    assert code == 0 and "sampler" not in found
    (prompt,) = {found["data"]["prompt_tokens"][kind] for kind in ("mean", "max")}
    step = found["step"]
    assert step["completions"] == 6 and step["completion_tokens"] == pytest.approx(sum(map(sum, lengths)) / 6, abs=0.05)
    assert step["sample_tokens"] == sum(2 * prompt + c + r for c, r in lengths)
    assert step["row_tokens_per_update"] == sum(prompt + c + r - 2 for c, r in lengths)  # the prompt once for both
    assert step["patches_per_update"] == 3 * 24  # and its image
    assert step["microbatches_per_update"] == 2  # three pairs on two ranks, each longer than a micro-batch
    weights = found["learner"]["weights"]
    assert found["learner"]["reference"] == weights == sum(each["trained"] for each in found["model"]["parts"].values())
    phases = found["memory"]["phases"]
    assert set(phases) == {"logprob", "update", "step"}
    assert {phase["runtime"] for phase in phases.values()} == {device.RUNTIME_BYTES["cuda"]}  # none for a sampler
    code, _, err = plan("--memory", "0.0005", **sections)
    assert code == 5 and "are missing" in err and "gpu_memory_utilization" not in err


def test_without_its_data_a_plan_assumes_the_longest_prompts(plan: Plan) -> None:
    data = {"train": {"name": "geometry3k"}, "max_prompt_tokens": 100}
    code, found, _ = plan(data=data, rewards=[{"name": "math"}])
    assert code == 0 and "prompts of data.max_prompt_tokens are assumed" in found["notes"][0]
    assert found["data"]["prompt_tokens"]["max"] == 100 and 0 < found["data"]["image_tokens"]["max"] <= 75
    assert found["sampler"]["longest_sequence"] == 110


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--completion-tokens", "11"), "1 to sampler.max_new_tokens"),
        (("--memory", "8", "--measure"), "leave one"),
        (("--gpus", "2"), "and --memory GB of each"),
    ],
)
def test_assumptions_that_cannot_be_are_refused(words: tuple[str, ...], said: str, plan: Plan) -> None:
    code, _, err = plan(*words)
    assert code == 2 and said in err


@pytest.mark.full
def test_a_measured_step_tells_seconds(
    config: Callable[..., Path], models: Callable[[str], Path], mmrl: Callable[..., Any]
) -> None:
    path = config(models("qwen2"), sampler={"name": "hf", "group_size": 4, "max_new_tokens": 10})
    process = mmrl("plan", path, "--measure", "--json")
    assert process.returncode == 0, process.stderr
    time = json.loads(process.stdout)["time"]
    measured = time["measured"]
    assert measured["prompts"] == 3 and 1 <= measured["completion_tokens"] <= 10
    assert measured["update_flops"] > 0 and measured["update_flops_per_s"] > 0
    assert 0 < time["update_s"] < time["step_s"] < 600
    assert time["step_s"] == pytest.approx(sum(time[f"{n}_s"] for n in ("sync", "generate", "logprob", "update")))


@pytest.mark.full
def test_measured_pairs_have_no_seconds_of_a_sampler(
    config: Callable[..., Path], models: Callable[[str], Path], mmrl: Callable[..., Any], tmp_path: Path
) -> None:
    rows = [{"problem": f"what is {i}+1?", "chosen": str(i + 1), "rejected": str(i)} for i in range(4)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": {"name": "table", "path": str(tmp_path / "pairs.jsonl")}}
    process = mmrl("plan", config(models("qwen2"), algorithm={"name": "dpo"}, rewards=[], data=data), "--measure")
    assert process.returncode == 0, process.stderr
    said = process.stdout.partition("\ntime ")[2]
    assert "candidates of 2 tokens" in said and "log-probs" in said and "update" in said
    assert not any(word in said for word in ("generate", "sync", "scoring"))


SHOWN = """
from dataclasses import replace

from mmrl_algorithms.grpo import GRPO

class Shown(GRPO):
    def needs(self):
        return replace(super().needs(), demonstration=True)
"""
WITH_CRITIC = """
from dataclasses import replace

from mmrl_algorithms.grpo import GRPO

class WithCritic(GRPO):
    def needs(self):
        return replace(super().needs(), values=True)

    def value_loss(self, tokens):
        raise AssertionError("nothing learns here")
"""


@pytest.fixture
def critic(tmp_path: Path) -> dict[str, Any]:
    """The sections of a run with a critic."""
    (tmp_path / "with_critic.py").write_text(WITH_CRITIC)
    return {"algorithm": {"name": f"{tmp_path / 'with_critic.py'}:WithCritic"}, "critic": {}}


def sizes_of(model: Path) -> tuple[int, int, int, int]:
    """Parameters of a model, those of its body, the width of its states and its embedding, from its files."""
    with safe_open(model / "model.safetensors", "np") as file:
        shapes = {name: file.get_tensor(name).shape for name in file.keys()}  # noqa: SIM118
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    body = sum(size for name, size in sizes.items() if "lm_head" not in name)
    (embedding,) = (shape for name, shape in shapes.items() if "embed_tokens" in name)
    return sum(sizes.values()), body, embedding[1], math.prod(embedding)


def test_a_plan_counts_a_critic_of_its_own(plan: Plan, critic: dict[str, Any], models: Callable[[str], Path]) -> None:
    """By hand: a body and a score, in float32 at stage 1; its update lacks the products with the head.

    Each of 12 completions of 6 tokens meets the head, forward and backward for inputs and weights: 6 operations of
    each weight.
    """
    (_, plain, _), (code, found, _) = (plan("--completion-tokens", "6", **sections) for sections in ({}, critic))
    whole, body, width, embedding = sizes_of(models("qwen2_5_vl"))
    assert code == 0
    learner, before, size = found["learner"], plain["learner"], body + width
    assert learner["critic"]["trained"] == size and not learner["critic"]["on_base"]
    for name, each in {"weights": 4, "master": 4, "optimizer": 8}.items():
        assert learner[name] - before[name] == learner["critic"][name] == each * size
    assert learner["gradients"] == 4 * max(whole, size) and before["gradients"] == 4 * whole, "one at a time"
    assert learner["buckets"] == before["buckets"] and learner["activations"] == before["activations"]
    assert found["step"]["flops"] == 2 * plain["step"]["flops"] - 12 * 6 * 6 * embedding


def test_a_plan_counts_a_demonstration_beside_completions_as_one_more(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(SHOWN)
    algorithm = {"name": f"{tmp_path / 'shown.py'}:Shown"}
    data = {"train": {"name": "table", "path": str(tmp_path / "rows.jsonl"), "demonstration": "answer"}}
    code, found, err = plan("--completion-tokens", "6", algorithm=algorithm, data=data)
    assert code == 0, err
    prompt, step = found["data"]["prompt_tokens"]["max"], found["step"]
    assert step["completions"] == 3 * 5 and step["row_tokens_per_update"] == 3 * (prompt + 5 * 5)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_critic_with_adapters_is_on_the_policys_weights_below_zero_3(
    stage: int, plan: Plan, critic: dict[str, Any]
) -> None:
    words = "--memory", "80", "--gpus", "2", "model.lora.rank=4", f"learner.zero_stage={stage}"
    (_, plain, _), (code, found, _) = (plan(*words, **sections) for sections in ({}, critic))
    assert code == 0
    own, trained = found["learner"]["critic"], found["learner"]["critic"]["trained"]
    adapters = sum(each["trained"] for each in found["model"]["parts"].values())
    width = trained - adapters
    assert 0 < width < 1000 and own["on_base"] == (stage == 1), "the same adapters, and a score"
    more = {name: found["learner"][name] - plain["learner"][name] for name in ("weights", "optimizer", "gradients")}
    frozen = 0 if stage == 1 else own["frozen"]
    assert more["weights"] == pytest.approx((frozen + trained) * 2 / (1 if stage == 1 else 2), abs=1)
    assert more["optimizer"] == 8 * -(-trained // 2)
    assert more["gradients"] == (2 * width if stage == 1 else 4 * -(-trained // 2)), "at stage 3 both keep"
