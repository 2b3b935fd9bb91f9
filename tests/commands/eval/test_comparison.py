"""`mmrl eval` on pairs, with networks whose log-probs are a rule: its numbers by hand, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.cluster import launch
from mmrl.commands.cli import main
from mmrl.engine.spec import EngineSpec
from mmrl.engine_api import Learner
from mmrl.rollout.records import read_lines
from mmrl.types import FloatArray, Sample


class Rule:
    """A network that gives each token a log-prob by its id."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def score(self, samples: Sequence[Sample], **options: Any) -> list[FloatArray]:
        return [(-self._factor * (1 + sample.token_ids % 5)).astype(np.float32) for sample in samples]

    def final_values(self, samples: Sequence[Sample]) -> FloatArray:
        return np.array([self._factor * float((sample.token_ids % 5).mean()) for sample in samples], np.float32)


class Engine(Learner):
    """An engine that learns nothing: its policy's log-probs are twice the reference's."""

    def __init__(self, spec: EngineSpec) -> None:
        assert not spec.trains and not spec.with_sampler and spec.checkpoint is None
        self.networks: Any = {role: Rule(1.0 if role == "policy" else 0.5) for role in spec.roles}
        self.initial, self.closed = spec.initial, False

    @contextmanager
    def learning(self) -> Iterator[Learner]:
        yield self

    def save(self, folder: Path) -> Any:
        raise AssertionError("nothing is trained")

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    started: list[Engine] = []

    def start(spec: EngineSpec) -> Engine:
        started.append(Engine(spec))
        return started[-1]

    monkeypatch.setattr(launch, "start_engine", start)
    return started


@pytest.fixture
def evaluate(tmp_path: Path, models: Callable[[str], Path], engines: list[Engine]) -> Callable[..., int]:
    """Runs the command on six pairs, of which the last two are a tie and equal candidates; policy and reference are one
    folder by two names."""
    answers = [
        ("blue", "red or green"),
        ("yes", "no"),
        ("left of the box", "7"),
        ("a", "seven"),
        ("x", "y"),
        ("z",) * 2,
    ]
    rows = [
        {"prompt": f"What is {n}?", "candidates": pair, "scores": [1, 1 if n == 4 else 0], "topic": topic, "of": of}
        for n, (pair, topic, of) in enumerate(
            zip(answers, ["a/b", "a/b", "c", None, "c", "c"], ["one", "two"] * 3, strict=True)
        )
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "trained").symlink_to(models("qwen2"))
    config = {
        "model": {"path": str(models("qwen2"))},
        "data": {"eval": {"name": "table", "path": str(tmp_path / "pairs.jsonl"), "category": "topic", "source": "of"}},
        "algorithm": {"name": "dpo", "beta": 0.5},
        "sampler": {"max_new_tokens": 30},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))

    def run(*words: object, model: str = "trained") -> int:
        named = ["--model", str(tmp_path / model)] if model else []
        return main(["eval", str(tmp_path / "config.yaml"), *named, *map(str, words)])

    return run


def by_hand(records: Sequence[dict[str, Any]], beta: float, reference: float) -> list[float]:
    """The margin of each pair."""

    def reward(record: dict[str, Any]) -> float:
        return beta * (1 - reference) * -sum(1 + token % 5 for token in record["token_ids"])

    return [reward(records[at]) - reward(records[at + 1]) for at in range(0, len(records), 2)]


def test_pairs_are_compared_by_the_algorithms_rewards_against_the_configs_model(
    evaluate: Callable[..., int], engines: list[Engine], tmp_path: Path, models: Any, capsys: Any
) -> None:
    assert evaluate("--output", tmp_path / "out", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "out" / "results.json").read_text())
    [engine] = engines
    assert engine.closed and engine.initial is not None and engine.initial.path == str(models("qwen2"))
    records = list(read_lines(tmp_path / "out" / "samples.jsonl"))
    assert [record["completion"] for record in records[:3]] == ["blue", "red or green", "yes"] and len(records) == 8
    margins = by_hand(records, 0.5, 0.5)
    right = [float(margin > 0) if margin else 0.5 for margin in margins]
    assert len(set(right)) > 1, "the rule tells some of them wrong"
    metrics = {name: each["value"] for name, each in found["metrics"].items()}
    assert metrics["eval/margin"] == pytest.approx(np.mean(margins))
    assert metrics["eval/accuracy"] == np.mean(right)
    assert metrics["eval/loss"] == pytest.approx(np.mean(np.log1p(np.exp(-np.array(margins)))), rel=1e-6)
    assert (metrics["eval/accuracy/a_b"], metrics["eval/accuracy/c"]) == (np.mean(right[:2]), right[2])
    assert metrics["eval/macro_accuracy"] == (np.mean(right[:2]) + right[2]) / 2
    assert metrics["eval/uncategorised_fraction"] == 0.25
    assert {name: each["prompts"] for name, each in found["categories"].items()} == {"": 1, "a/b": 2, "c": 1}
    assert found["sources"]["two"]["metrics"]["eval/margin"]["value"] == pytest.approx(np.mean(margins[1::2]))
    assert found["counts"] == {"prompts": 4, "completions": 8, "unscored": 0, "with_images": 0, "dropped": 2}
    assert found["settings"]["reference"] == str(models("qwen2"))
    first = records[0]
    assert first["learner_logprobs"] == [2 * each for each in first["reference_logprobs"]] and first["rewards"]["score"]
    assert evaluate("--output", tmp_path / "out", "--limit", 2) == 2
    assert "holds another evaluation" in capsys.readouterr().err


def test_an_algorithm_without_a_reference_compares_a_model_by_itself(
    evaluate: Callable[..., int], engines: list[Engine], capsys: Any
) -> None:
    assert evaluate("algorithm={name: simpo}", model="") == 0
    shown = capsys.readouterr().out
    assert "4 comparisons by simpo" in shown and "against" not in shown and "2 rows dropped" in shown
    assert [line.split()[0] for line in shown.splitlines() if line.startswith(("a/b", "c ", "(none)", "mean"))] == [
        "(none)",
        "a/b",
        "c",
        "mean",
    ]
    assert set(engines[0].networks) == {"policy"} and engines[0].initial is None


def test_a_reward_model_is_judged_by_its_scores_with_ties_one_half_and_each_category_once(
    evaluate: Callable[..., int], engines: list[Engine], tmp_path: Path, capsys: Any
) -> None:
    data = [f"data.eval.path={tmp_path / 'graded.jsonl'}", "algorithm={name: bradley_terry, centre: 0}"]
    rows = [
        ("topic a", ["blue", "red or green", "x"], [2, 1, 0]),
        ("topic a", ["yes", "no"], [0, 1]),
        ("topic b", ["seven", "7"], [1, 0]),
    ]
    lines = [
        {"prompt": f"What is {n}?", "candidates": texts, "scores": scores, "topic": topic, "of": "one"}
        for n, (topic, texts, scores) in enumerate(rows)
    ]
    (tmp_path / "graded.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert evaluate(*data, "--output", tmp_path / "out", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(engines[0].networks) == {"reward"} and engines[0].initial is None
    records, right, margins = list(read_lines(tmp_path / "out" / "samples.jsonl")), [], []
    for _, members in groupby(records, key=lambda record: record["group"]):
        scored = [(each["rewards"]["score"], each["final_value"]) for each in members]
        pairs = [a - b for one, a in scored for other, b in scored if one > other]
        margins.append(np.mean(pairs))
        right.append(np.mean([0.5 * (1 + np.sign(each)) for each in pairs]))
    metrics = {name: each["value"] for name, each in found["metrics"].items()}
    assert metrics["eval/margin"] == pytest.approx(np.mean(margins), rel=1e-6)
    assert metrics["eval/accuracy"] == pytest.approx(np.mean(right), rel=1e-6)
    assert metrics["eval/macro_accuracy"] == pytest.approx((np.mean(right[:2]) + right[2]) / 2, rel=1e-6)
    assert metrics["eval/score_chosen"] - metrics["eval/score_rejected"] == pytest.approx(metrics["eval/margin"])
    assert found["settings"]["reference"] is None and all(not each["learner_logprobs"] for each in records)
    assert evaluate(*data) == 0
    shown = capsys.readouterr().out
    assert "3 comparisons by bradley_terry" in shown and "score chosen" in shown and "mean of categories" in shown


@pytest.mark.parametrize(
    ("words", "model", "message"),
    [
        (["--samples", 2], "trained", "--samples is of sampled completions"),
        (["--temperature", 0], "trained", "--temperature is of sampled completions"),
        (["--best-of", 2], "trained", "--best-of is of sampled completions"),
        (["--limit", 0], "trained", "--limit is 0"),
        (["--blank-images"], "trained", "no prompt has an image to leave out"),
        ([], "", "compares with a reference, and there is none"),
        (["algorithm={name: dpo, data: sampled}"], "trained", "algorithm 'dpo' needs a reward"),
        (["algorithm={name: opd}"], "trained", "evaluation needs at least one reward"),
        (["model.path=nowhere"], "trained", "the reference cannot be opened"),
        (["reference.reset_every=5"], "trained", "with the initial policy as reference, and the run had another one"),
        (["reference.path=teacher"], "trained", "with the initial policy as reference, and the run had another one"),
        (["data.eval.candidates=null", "data.eval.chosen=nothing"], "trained", "no column 'nothing' for its chosen"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_an_engine_starts(
    words: list[object], model: str, message: str, evaluate: Callable[..., int], engines: list[Engine], capsys: Any
) -> None:
    assert evaluate(*words, model=model) != 0
    assert message in capsys.readouterr().err and not engines


def test_a_model_is_not_compared_with_itself(
    evaluate: Callable[..., int], engines: list[Engine], tmp_path: Path, capsys: Any
) -> None:
    assert evaluate(f"model.path={tmp_path / 'trained'}") == 2
    assert "that is the model itself, so that each margin would be 0" in capsys.readouterr().err and not engines


def test_without_a_reward_and_an_algorithm_nothing_tells_right_from_wrong(
    evaluate: Callable[..., int], engines: list[Engine], tmp_path: Path, capsys: Any
) -> None:
    data = ["data.eval.name=table", f"data.eval.path={tmp_path / 'pairs.jsonl'}"]
    assert main(["eval", "--model", str(tmp_path / "trained"), *data]) == 2
    said = capsys.readouterr().err
    assert "nothing tells right from wrong: there is no reward, and no algorithm" in said and not engines
    assert "rewards=[{name: ...}]" in said


def test_one_of_several_sets_is_compared_and_labels_of_single_answers_have_no_accuracy(
    evaluate: Callable[..., int], engines: list[Engine], tmp_path: Path, capsys: Any
) -> None:
    rows = [
        {"prompt": f"What is {n}?", "completion": "a b" * n, "label": n % 2 == 0, "topic": "c"} for n in range(1, 5)
    ]
    (tmp_path / "judged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs, judged = ({"name": "table", "path": str(tmp_path / f"{name}.jsonl")} for name in ("pairs", "judged"))
    config = json.loads((tmp_path / "config.yaml").read_text())
    config["data"]["eval"] = {"graded": pairs, "labels": {**judged, "answer": "", "category": "topic"}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    assert evaluate() == 2 and "one is evaluated at a time" in capsys.readouterr().err
    assert evaluate("--on", "graded", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["on"] == "graded" and found["counts"]["prompts"] == 4 and "categories" not in found
    assert "eval/accuracy" in found["metrics"] and "eval/macro_accuracy" not in found["metrics"]
    assert evaluate("--on", "labels", "algorithm={name: kto}", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"]["completions"] == 4 and "eval/accuracy" not in found["metrics"]
    rewards = {name: found["metrics"][f"eval/reward_{name}"]["value"] for name in ("chosen", "rejected")}
    assert rewards["chosen"] < 0 and rewards["rejected"] < 0 and "categories" not in found
