"""``mmrl replay``: whole runs of the fake engine, their steps taken again, records spoilt and other rules tried."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmrl.commands.cli import main
from mmrl.commands.replay.recorded_run import load_recorded
from mmrl.engine_api import UpdateResult
from mmrl.interfaces import Monitor
from mmrl.rollout.records import recorded_steps
from mmrl.rollout.rewards.scorer import Scorer
from mmrl.runs.monitoring import recorded_alarms
from mmrl.viewer.folder import ViewedRun
from mmrl.viewer.groups import group_document
from mmrl.viewer.steps import prompt_document
from tests.faults.fake_engine import FakeEngine
from tests.faults.runs import REWARDS, Runs, fake, records, rollouts

KL = {"kl": {"coef": 0.1, "target": 0.05, "horizon": 10.0}}
EARLY = [{"name": f"{REWARDS}:early"}]
TWICE = {"learner": {"lr": 1e-2, "minibatches": 2, "epochs": 2}}
OTHERS = {"sft", "gigpo", "papo", "noisy_rollout", "dpo", "kto", "mpo", "orpo", "simpo", "bradley_terry"}
ALGORITHMS = sorted({entry.name for entry in entry_points(group="mmrl.algorithms")} - OTHERS)
"""Those that learn from completions of texts, each with a reward."""
PARTS = ("rewards", "selection", "advantages", "updates", "metrics", "loss", "log-probs")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, models: Callable[[str], Path]) -> Iterator[Runs]:
    """One for all tests of this module: rewards' workers are started once."""
    with fake(tmp_path_factory.mktemp("replays"), models("qwen2")) as found:
        yield found


@pytest.fixture(scope="module")
def plain(runs: Runs) -> Path:
    """A run of two optimizer steps for each batch, for tests that only read it."""
    assert runs.train(runs.config("plain", **TWICE)) == 0
    return runs.folder / "plain"


@pytest.fixture
def spoilt(plain: Path, tmp_path: Path) -> Path:
    """The same to be spoilt."""
    return Path(shutil.copytree(plain, tmp_path / "spoilt", ignore=shutil.ignore_patterns("checkpoints")))


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[dict[str, Any]]]]:
    """Replays; returns the exit code and a report of each step."""

    def run(path: Path, *words: object) -> tuple[int, list[dict[str, Any]]]:
        capsys.readouterr()
        code = main(["replay", str(path), *map(str, words), "--json"])
        answer = capsys.readouterr()
        assert answer.out, answer.err
        found = json.loads(answer.out)
        assert found["differs"] is any(step["differs"] for step in found["steps"]) is (code == 6)
        return code, found["steps"]

    return run


@pytest.fixture
def fresh_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays ask files as they are now, not workers that have read them before."""
    monkeypatch.setattr("mmrl.commands.replay.replay.Scorer", Scorer)


def rewrite(run: Path, step: int, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Change the record of a step; it is lines of JSON then, as older versions wrote it."""
    found = rollouts(run, step)
    change(found)
    file = recorded_steps(run)[step]
    file.unlink()
    file.with_suffix(".jsonl").write_text("".join(json.dumps(record) + "\n" for record in found))


def test_a_replay_needs_no_column_that_its_rule_does_not_ask_for(spoilt: Path, replay):
    file = recorded_steps(spoilt)[1]
    table = pq.read_table(file)
    rollouts = table["rollouts"].combine_chunks()
    fields = [(field, values) for field, values in zip(rollouts.values.type, rollouts.values.flatten(), strict=True)]
    kept = [(field, values) for field, values in fields if field.name != "reference_logprobs"]
    members = pa.StructArray.from_arrays([values for _, values in kept], fields=[field for field, _ in kept])
    column = pa.ListArray.from_arrays(rollouts.offsets, members)
    pq.write_table(table.set_column(table.schema.get_field_index("rollouts"), "rollouts", column), file)
    code, (report,) = replay(spoilt, "--step", 1)
    assert code == 0 and differences(report) == {} and report["notes"] == []


def differences(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Those of each part that has any."""
    return {name: part["differences"] for name, part in report["parts"].items() if part["differences"]}


def trained(runs: Runs, replay: Any, name: str, steps: int = 2, **sections: Any) -> Path:
    """A run whose steps were taken again without a difference."""
    trainer = {"steps": steps, **sections.pop("trainer", {})}
    assert runs.train(runs.config(name, trainer=trainer, **sections)) == 0
    code, reports = replay(runs.folder / name, "--step", f"1-{steps}")
    assert [differences(report) for report in reports] == [{}] * steps and code == 0
    for report in reports:
        assert report["notes"] == [] and list(report["parts"]) == list(PARTS)
        compared = {part: found["compared"] for part, found in report["parts"].items()}
        if compared.pop("updates"):  # else the step was skipped
            assert all(compared.values()) and compared["rewards"] >= 12 and compared["metrics"] >= 15
            assert compared["loss"] >= 5
    return runs.folder / name


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_replay_of_any_algorithm_finds_no_difference(name, runs: Runs, replay):
    critic = {"critic": {"lr": 1e-2, "pretrain_steps": 1}} if name == "ppo" else {}
    trained(runs, replay, f"of-{name}", algorithm={"name": name}, **critic)


@pytest.mark.parametrize("target", ["dpo:DPO", "mpo:MPO", pytest.param("simpo:SimPO", marks=pytest.mark.full)])
def test_a_replay_of_sampled_pairs_finds_no_difference(target, runs: Runs, replay):
    algorithm = {"name": f"import:mmrl_algorithms.{target}", "data": "sampled"}
    run = trained(runs, replay, f"of-{target.partition(':')[0]}", 4, algorithm=algorithm, learner={"lr": 1e-1})
    step = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert 0 <= step["preference/accuracy"] <= 1 and step["preference/logprob_chosen"] < 0
    if target == "mpo:MPO":
        assert step["preference/reward_shift"] != 0  # the algorithm's state matters


STEERED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"name": "grpo", **KL}, TWICE),
    ({"name": "grpo", "entropy_coef": 0.1, "mask_truncated": True, "correction": {"mode": "token-mask"}}, {}),
    ({"name": "reinforce_pp", **KL}, TWICE),
    ({"name": "remax"}, {"rewards": [*EARLY, {"name": "overlong"}], **TWICE}),
    ({"name": "gspo"}, {"learner": {"lr": 1e-1, "minibatches": 3}}),
]


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(STEERED)))
def test_a_replay_of_steered_and_repeated_updates_finds_no_difference(index, runs: Runs, replay):
    algorithm, sections = STEERED[index]
    run = trained(runs, replay, f"more-{index}", algorithm=algorithm, **sections)
    step = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert "kl" not in algorithm or step["kl/coef"] != 0.1  # it was steered, so its state matters
    assert algorithm["name"] != "gspo" or step["policy/clip_fraction_high"] > 0
    if "kl" in algorithm:  # a changed coefficient begins anew, rather than from where the run's had come to
        _, (report,) = replay(run, "algorithm.kl.coef=2.5")
        assert report["what_if"]["metrics"]["kl/coef"]["would_be"] == 2.5
        assert any("state before the step is that of a new run" in note for note in report["notes"])
        _, (report,) = replay(run, f"rewards.0.name={REWARDS}:early")
        assert report["what_if"]["metrics"]["kl/coef"]["would_be"] == step["kl/coef"]
        assert not any("state before the step" in note for note in report["notes"])


@pytest.mark.parametrize("starved", ["train_partial", "skip"])
def test_a_replay_of_refilled_and_carried_groups_finds_no_difference(starved, runs: Runs, replay):
    sampling = {"max_rounds": 1, "on_starvation": starved}
    sections = {"rewards": EARLY, "sampler": {"group_size": 2}, "trainer": {"prompts_per_step": 6}}
    dapo = {"name": "dapo", "dynamic_sampling": sampling}
    run = trained(runs, replay, f"dapo-{starved}", 6, algorithm=dapo, **sections, learner={"minibatches": 2})
    found = [record for step in range(1, 7) for record in rollouts(run, step)]
    assert {record["kept"] for record in found} == {True, False} and {r["place"][0] for r in found if r["place"]} == {
        0,
        1,
    }
    assert any(record["place"] is None for record in found) is (starved == "skip")


def test_skipped_updates_unscored_rollouts_and_seeded_rewards_are_no_difference(
    runs: Runs, replay, monkeypatch, tmp_path
):
    (tmp_path / "some.py").write_text(
        "import random\n\ndef some(rollouts):\n"
        "    return [random.random() if 'a' in each.text else None for each in rollouts]\n"
    )
    update, count = FakeEngine.update, iter(range(99))

    def faulty(self: FakeEngine, rows: Any) -> UpdateResult:
        if next(count) % 3 != 1:
            return update(self, rows)
        nothing = [np.full(len(row.mask), np.nan, np.float32) for row in rows]
        return UpdateResult({}, nothing, nothing, "the loss is nan")

    monkeypatch.setattr(FakeEngine, "update", faulty)
    for name, sections in {"one": {}, "several": TWICE}.items():
        rewards = [{"name": f"{tmp_path / 'some.py'}:some"}]
        trained(runs, replay, f"skipped-{name}", rewards=rewards, sampler={"group_size": 12}, **sections)
    found = rollouts(runs.folder / "skipped-several", 1)
    assert {record["valid"] for record in found} == {True, False}
    assert any(len(each) == 0 for record in found for each in record["update_entropy"])


@pytest.mark.parametrize(
    "algorithm", [{"name": "remax"}, {"name": "grpo", "reward_norm": "group", "reward_clip": [-9.0, 9.0]}]
)
def test_components_of_a_reward_are_logged_and_replayed(algorithm, runs: Runs, replay, tmp_path):
    (tmp_path / "easy.py").write_text(
        "def compute_score(reward_inputs):\n"
        "    return [one(each['response']) if each['response'] else None for each in reward_inputs]\n\n"
        "def one(text):\n"
        "    return {'overall': len(text) / 9, 'early': float(text[:1] < 'd')}\n"
    )
    name = f"components-{algorithm['name']}"
    rewards = [{"name": f"{tmp_path / 'easy.py'}:compute_score", "label": "easy"}]
    rows = {"name": "table", "path": str(runs.rows)}
    sections = {"data": {"train": rows, "eval": rows}, "trainer": {"eval_metric": "easy/early", "eval_every": 1}}
    run = trained(runs, replay, name, rewards=rewards, algorithm=algorithm, **sections)
    found = rollouts(run, 2)
    early = [each["rewards"]["easy/early"] for each in found if not each["greedy"] and each["valid"]]
    assert {*early} == {0.0, 1.0} and all(
        each["reward"] == pytest.approx(each["rewards"]["easy"]) for each in found if each["valid"]
    )
    step = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert step["reward/easy/early_mean"] == pytest.approx(np.mean(early))
    assert step["eval/accuracy"] == step["eval/easy/early_mean"] != step["eval/easy_mean"]


def test_after_a_reward_has_changed_the_right_rows_are_told(runs: Runs, replay, tmp_path, fresh_workers, capsys):
    file = tmp_path / "own.py"
    file.write_text("def own(rollouts):\n    return [float(len(r.text)) for r in rollouts]\n")
    assert runs.train(runs.config("own", rewards=[{"name": f"{file}:own"}])) == 0
    run = runs.folder / "own"
    assert replay(run)[0] == 0
    file.write_text("def own(rollouts):\n    return [float(len(r.text)) + (r.text[:1] < 'd') for r in rollouts]\n")
    code, (report,) = replay(run, "--step", 2)
    found = rollouts(run, 2)
    expected = {(r["prompt_id"], r["index"]): r["reward"] for r in found if r["completion"][:1] < "d"}
    rows = report["parts"]["rewards"]["differences"]
    assert code == 6 and 0 < len(expected) < 12
    assert {(row["prompt"], row["member"]): row["was"] for row in rows} == expected
    assert all(row["now"] == row["was"] + 1 and "its file was" in row["why"][0] for row in rows)
    assert list(differences(report)) == ["rewards"]  # with the recorded rewards, all else is as it was
    assert len(report["reasons"]) == 1 and report["reasons"][0].startswith("own: its file was")
    means = report["what_if"]["metrics"]["reward/mean"]
    assert means["would_be"] == pytest.approx(means["was"] + len(expected) / 12)
    assert main(["replay", str(run), "--step", "2"]) == 6
    out = capsys.readouterr().out
    assert f"{len(expected)} differ" in out and "what if: the rewards as they are now" in out


def test_a_reward_that_is_not_deterministic_is_told(runs: Runs, replay, tmp_path):
    (tmp_path / "odd.py").write_text(
        "import os\n\ndef odd(rollouts):\n    return [os.urandom(2)[0] for _ in rollouts]\n"
    )
    assert runs.train(runs.config("odd", rewards=[{"name": f"{tmp_path / 'odd.py'}:odd"}], trainer={"steps": 1})) == 0
    code, (report,) = replay(runs.folder / "odd")
    rows = report["parts"]["rewards"]["differences"]
    assert code == 6 and len(rows) > 6
    assert sum(any("not deterministic" in why for why in row.get("why", ())) for row in rows) >= len(rows) - 2


def test_what_a_reward_failed_on_in_the_run_is_told(runs: Runs, replay, tmp_path, fresh_workers, monkeypatch):
    flag, file = tmp_path / "flag", tmp_path / "shaky.py"
    file.write_text(
        f"import os\n\ndef shaky(rollouts):\n    bad = rollouts[0].text == {{}} and os.path.exists({str(flag)!r})\n"
        "    return [1 / (not bad) + len(rollout.text) for rollout in rollouts]\n"
    )
    source = file.read_text()
    monkeypatch.setattr("mmrl.rollout.rewards.failures.MAX_FAILED_SHARE", 0.5)
    trainer = {"steps": 1, "prompts_per_step": 8}
    plain = runs.config("before", sampler={"group_size": 1}, trainer=trainer)
    assert runs.train(plain, "algorithm.name=reinforce_pp") == 0
    texts = [record["completion"] for record in rollouts(runs.folder / "before", 1)]
    only = next(text for text in texts if texts.count(text) == 1)
    file.write_text(source.replace("{}", repr(only)))
    flag.touch()
    words = (f"rewards=[{{name: {file}:shaky, on_error: skip}}]", f"trainer.run_dir={runs.folder / 'shaky'}")
    assert runs.train(plain, "algorithm.name=reinforce_pp", *words) == 0
    flag.unlink()
    code, (report,) = replay(runs.folder / "shaky")
    (row,) = report["parts"]["rewards"]["differences"]
    assert code == 6 and row["was"] is None and row["now"] == 1 + len(only)
    assert any(why.startswith("in the run it raised ZeroDivisionError") for why in row["why"])


SPOILS: dict[str, tuple[Callable[[list[dict[str, Any]]], Any], str, str]] = {
    "advantage": (lambda r: r[5]["advantage"].__setitem__(1, 0.125), "advantages", "advantage of token 1"),
    "learner": (lambda r: r[5]["learner_logprobs"].__setitem__(1, -9.5), "log-probs", "log-prob of token 1"),
    "sampler": (lambda r: r[5]["sampler_logprobs"].__setitem__(1, -9.5), "log-probs", "log-prob of token 1"),
    "reward": (lambda r: r[5]["rewards"].update(letters=0.25), "rewards", "letters"),
    "sum": (lambda r: r[5].update(reward=0.25), "rewards", "the sum"),
}


@pytest.mark.parametrize("what", SPOILS)
def test_what_is_spoilt_in_a_record_is_found_and_named(what, spoilt: Path, replay):
    change, part, name = SPOILS[what]
    rewrite(spoilt, 3, change)
    code, (report,) = replay(spoilt, "--step", 3)
    (found,) = differences(report)[part]
    record = rollouts(spoilt, 3)[5]
    assert code == 6 and found["what"].find(name) >= 0
    assert (found["prompt"], found["epoch"], found["member"]) == (record["prompt_id"], record["epoch"], record["index"])
    if part == "log-probs":  # which the metrics show too, to the last digit
        assert "mismatch/logprob_abs_mean" in {each["what"] for each in differences(report)["metrics"]}
    if part == "advantages":
        assert found["was"] == 0.125 != found["now"]
    assert replay(spoilt, "--step", 2)[0] == 0


def test_spoilt_updates_selection_and_metrics_are_found(spoilt: Path, replay):
    rewrite(spoilt, 3, lambda r: r[5]["update_logprobs"][1].__setitem__(0, -9.5))
    assert {each["what"] for each in differences(replay(spoilt, "--step", 3)[1][0])["loss"]} >= {"loss/policy"}
    rewrite(spoilt, 2, lambda r: [each.update(kept=False) for each in r if each["group"] == 1])
    (report,) = replay(spoilt, "--step", 2)[1]
    assert [(each["was"], each["now"]) for each in differences(report)["selection"]] == [(False, True)]
    ledger = (spoilt / "ledger.jsonl").read_text().splitlines()
    first = json.loads(ledger[0])
    lost = first["samples"].pop()
    (spoilt / "ledger.jsonl").write_text("\n".join([json.dumps(first), *ledger[1:]]) + "\n")
    lines = records(spoilt / "metrics.jsonl")
    lines[1]["loss/policy"] *= 1.001
    lines[1]["advantage/max"] += 1e-9
    (spoilt / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (report,) = replay(spoilt, "--step", 1)[1]
    found = differences(report)
    (missing,) = found["updates"]
    assert [missing["epoch"], missing["prompt"], missing["member"]] == lost and missing["what"] == "in optimizer step 1"
    assert [each["what"] for each in found["loss"]] == ["loss/policy"]
    assert [each["what"] for each in found["metrics"]] == ["advantage/max"]


def test_another_reward_and_algorithm_are_a_what_if(plain: Path, replay, tmp_path, capsys):
    found = rollouts(plain, 3)
    early = np.array([[float(r["completion"][:1] < "h") for r in found if r["group"] == g] for g in range(3)])
    letters = np.array([[r["reward"] for r in found if r["group"] == g] for g in range(3)])
    code, (report,) = replay(plain, "--step", 3, f"rewards.0.name={REWARDS}:early", "algorithm.name=dr_grpo")
    assert code == 0 and not report["parts"] and not report["differs"]
    metrics = {name: pair["would_be"] for name, pair in report["what_if"]["metrics"].items()}
    assert metrics["reward/mean"] == pytest.approx(early.mean())
    assert metrics["group/zero_signal_fraction"] == np.mean(np.ptp(early, 1) == 0)
    assert report["what_if"]["metrics"]["reward/letters_mean"]["would_be"] is None
    would_be = (early - early.mean(1, keepdims=True)).ravel()
    was = (letters - letters.mean(1, keepdims=True)) / (letters.std(1, ddof=1, keepdims=True) + 1e-6)
    change = report["what_if"]["advantages"]
    assert change["correlation"] == pytest.approx(np.corrcoef(would_be, was.ravel())[0, 1])
    assert change["flipped"] == int((would_be * was.ravel() < 0).sum()) > 0
    rows = report["what_if"]["rewards"]["differences"]
    assert {(row["was"], row["now"]) for row in rows} == {
        pair for pair in zip(letters.ravel(), early.ravel(), strict=True) if pair[0] != pair[1]
    }
    assert any("completions are those of the recorded policy" in note for note in report["notes"])
    (tmp_path / "other.yaml").write_text("algorithm: {clip_high: 0.001, clip_low: 0.001}\nlearner: {lr: 0.5}\n")
    code, (report,) = replay(plain, "--config", tmp_path / "other.yaml")
    clipped = report["what_if"]["metrics"]["policy/clip_fraction_high"]
    assert code == 0 and clipped["would_be"] > clipped["was"] == 0
    assert report["what_if"]["advantages"]["changed"] == 0 and not report["what_if"]["rewards"]["differences"]
    assert "not replayed: learner.lr: 0.01 -> 0.5" in report["notes"]
    capsys.readouterr()
    assert main(["replay", str(plain), f"rewards.0.name={REWARDS}:early"]) == 0
    out = capsys.readouterr().out
    assert "what if: rewards.0.name: " in out and re.search(r"reward/mean +\S+ +\S+\n", out)
    assert "log-probs of optimizer steps after the first, are those of when the run took the rollout in" in out
    assert main(["replay", str(plain), "algorithm.name=grpo"]) == 0
    out = capsys.readouterr().out
    assert "what if: nothing changed, the config is the run's" in out and "would be" not in out


def test_a_what_if_tells_which_groups_are_rejected(runs: Runs, plain: Path, replay):
    early = [f"rewards=[{{name: {REWARDS}:early}}]", "algorithm.name=dapo"]
    for step in range(1, 5):
        found = rollouts(plain, step)
        values: dict[str, set[bool]] = {}
        for record in found:
            values.setdefault(record["prompt_id"], set()).add(record["completion"][:1] < "h")
        rejected = [prompt for prompt, each in values.items() if len(each) == 1]
        _, (report,) = replay(plain, "--step", step, *early)
        removed = report["what_if"]["advantages"]["removed"]
        assert sorted(name.split("'")[1] for name in removed) == sorted(rejected)
        if rejected:
            break
    assert rejected and any("in place of rejected ones" in note for note in report["notes"])
    sections = {"sampler": {"group_size": 2}, "trainer": {"steps": 1, "prompts_per_step": 6}}
    assert runs.train(runs.config("picky", rewards=EARLY, algorithm={"name": "dapo"}, **sections)) == 0
    found = rollouts(runs.folder / "picky", 1)
    later = {record["prompt_id"] for record in found if record["place"][0]}
    rejected = {record["prompt_id"] for record in found if not record["kept"] and not record["place"][0]}
    _, (report,) = replay(runs.folder / "picky", "algorithm.name=grpo")
    change = report["what_if"]["advantages"]
    assert later and {name.split("'")[1] for name in change["added"]} == rejected
    kept_later = {record["prompt_id"] for record in found if record["place"][0] and record["trained"]}
    assert {name.split("'")[1] for name in change["removed"]} == kept_later
    first = [record["reward"] for record in found if not record["place"][0]]
    assert len(first) == 12
    assert report["what_if"]["metrics"]["reward/mean"]["would_be"] == pytest.approx(np.mean(first))
    assert any("would not have been there" in note for note in report["notes"])
    assert any("sampler's log-probs stand in" in note for note in report["notes"])


def test_older_records_are_compared_as_far_as_they_go(spoilt: Path, runs: Runs, replay):
    new = ("place", "trained", "reference_logprobs", "update_logprobs", "update_entropy")

    def age(found: list[dict[str, Any]]) -> None:
        for record in found:
            for key in new:
                record.pop(key)

    rewrite(spoilt, 4, age)
    code, (report,) = replay(spoilt)
    assert code == 0 and list(report["parts"]) == ["rewards"]
    assert "no record of what each optimizer step began from" in report["notes"][0]
    assert runs.train(runs.config("old", trainer={"steps": 1})) == 0
    rewrite(runs.folder / "old", 1, age)
    code, (report,) = replay(runs.folder / "old")
    assert code == 0 and list(report["parts"]) == list(PARTS) and report["notes"] == [
        "not on record, so not compared: policy/entropy"
    ]  # fmt: skip
    sections = {"sampler": {"group_size": 2}, "trainer": {"steps": 1, "prompts_per_step": 6}, "rewards": EARLY}
    assert runs.train(runs.config("old-dapo", algorithm={"name": "dapo"}, **sections)) == 0
    rewrite(runs.folder / "old-dapo", 1, age)
    code, (report,) = replay(runs.folder / "old-dapo")
    assert code == 0 and list(report["parts"]) == ["rewards"]
    assert "no record of the rounds in which groups were sampled" in report["notes"][0]
    assert main(["replay", str(runs.folder / "old-dapo"), "algorithm.name=grpo"]) == 3


def test_a_step_that_was_undone_is_told_and_not_taken_by_default(spoilt: Path, replay):
    assert replay(spoilt)[1][0]["step"] == 4
    with (spoilt / "attempts.jsonl").open("a") as file:
        file.write(json.dumps({"attempt": 2, "resumed_from": 2}) + "\n")
    assert replay(spoilt)[1][0]["step"] == 2
    (report,) = replay(spoilt, "--step", 4)[1]
    assert report["notes"][0] == "step 4 was undone by attempt 2, which went on from step 2"
    assert replay(spoilt, "--step", 2)[1][0]["notes"] == []
    (again,) = [line for line in records(spoilt / "metrics.jsonl") if line["step"] == 3]
    with (spoilt / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**again, "attempt": 2}) + "\n")
    (report,) = replay(spoilt)[1]
    assert report["step"] == 3 and report["notes"] == []
    with (spoilt / "attempts.jsonl").open("a") as file:
        file.write(json.dumps({"attempt": 3, "resumed_from": None}) + "\n")
    (report,) = replay(spoilt)[1]
    assert report["step"] == 4 and "undone by attempt 2" in report["notes"][0]  # there is no other


def test_a_step_that_ended_before_it_was_trained_is_told(spoilt: Path, capsys, replay):
    def end(found: list[dict[str, Any]]) -> None:
        for record in found:
            record.update(trained=False, advantage=[], learner_logprobs=[], update_logprobs=[], update_entropy=[])

    rewrite(spoilt, 4, end)
    lines = [line for line in records(spoilt / "metrics.jsonl") if line["step"] < 4]
    (spoilt / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ledger = [line for line in records(spoilt / "ledger.jsonl") if line["step"] < 4]
    (spoilt / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ledger))
    assert replay(spoilt)[1][0]["step"] == 3
    capsys.readouterr()
    assert main(["replay", str(spoilt), "--step", "4"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"advantages +0 +rollouts +nothing to compare", out)
    assert "it was not finished" in out and "the step ended before anything was trained" in out


def test_histories_without_the_newest_keys_are_read_as_far_as_they_go(spoilt: Path, replay):
    (spoilt / "environment.json").write_text("[1")
    with (spoilt / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "reward_failed"}) + "\n{}\n")
    lines = [{k: v for k, v in line.items() if k != "attempt"} for line in records(spoilt / "metrics.jsonl")]
    (spoilt / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert replay(spoilt)[0] == 0
    rewrite(spoilt, 4, lambda r: r[0].update(reward=0.25))
    (report,) = replay(spoilt)[1]
    assert report["differs"] and "nothing is known of the versions" in report["reasons"][0]


def test_an_algorithm_may_observe_what_no_record_holds(runs: Runs, replay, monkeypatch):
    def observe(self: Any, metrics: Any) -> dict[str, float]:
        return {"watching/sum": metrics["policy/grad_norm"] + 0 * metrics["perf/step_s"]}

    monkeypatch.setattr("mmrl_algorithms.grpo.GRPO.observe", observe)
    run = trained(runs, replay, "watching", 1)
    assert "watching/sum" in records(run / "metrics.jsonl")[-1]


def test_what_the_routers_of_experts_add_to_the_loss_is_no_difference(runs: Runs, replay, monkeypatch):
    update = FakeEngine.update

    def routed(self: Any, rows: Any) -> UpdateResult:
        found = update(self, rows)
        total = found.metrics["loss/total"] + 0.25
        more = {"loss/total": total, "loss/router_aux": 0.25, "mismatch/rerouted_tokens": 0.5}
        return replace(found, metrics={**found.metrics, **more})

    monkeypatch.setattr(FakeEngine, "update", routed)
    run = trained(runs, replay, "routed", 1, **TWICE)
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    (run / "metrics.jsonl").write_text(json.dumps(line | {"loss/total": line["loss/total"] + 0.1}) + "\n")
    code, (report,) = replay(run, "--step", 1)
    assert code == 6 and [each["what"] for each in differences(report)["loss"]] == ["loss/total"]


def test_a_later_change_of_the_config_is_told(spoilt: Path, replay):
    with (spoilt / "attempts.jsonl").open("a") as file:
        file.write(json.dumps({"attempt": 2, "resumed_from": 3, "changes": ["rewards.0.weight: 0.5 -> 1.0"]}) + "\n")
    rewrite(spoilt, 3, lambda r: r[0].update(reward=0.25))
    (report,) = replay(spoilt, "--step", 3)[1]
    assert report["reasons"] == ["config.yaml is of a later attempt: rewards.0.weight: 0.5 -> 1.0"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--step", "9"], 2, r"no record of step 9[\s\S]*1-4"),
        (["--step", "5-9"], 2, "no record of step 5-9"),
        (["--step", "last"], 2, "--step cannot be 'last'"),
        (["sampler.temperature=0.5"], 2, r"no record can tell what sampler.temperature would[\s\S]*rewards, algorithm"),
        (["algorithm.clip_hig=1"], 2, "did you mean clip_high"),
        (["algorithm.name=sft"], 2, "groups are rollouts, and this algorithm learns from demonstrations"),
        (["algorithm.name=reinforce_pp"], 3, "no record of the reference policy's log-probs"),
        (["algorithm.name=remax"], 3, "no record of greedy rollouts"),
        (["algorithm.name=nowhere"], 4, "nowhere"),
        (["--config", "nowhere.yaml"], 2, "nowhere.yaml"),
    ],
)
def test_what_no_record_can_answer_is_refused(words, code, message, plain: Path, capsys):
    assert main(["replay", str(plain), *words]) == code
    assert re.search(message, capsys.readouterr().err)


def test_what_is_no_run_or_damaged_is_named(spoilt: Path, runs: Runs, tmp_path, capsys):
    assert main(["replay", str(tmp_path)]) == 2
    assert "this is no run" in capsys.readouterr().err
    assert main(["replay", str(runs.folder / "plain" / "checkpoints" / "step-000002")]) == 2
    assert re.search(rf"this is a checkpoint[\s\S]*give its run, {runs.folder / 'plain'}", capsys.readouterr().err)
    rewrite(spoilt, 3, lambda r: r[7]["learner_logprobs"].pop())
    rewrite(spoilt, 2, lambda r: r.pop(6))
    rewrite(spoilt, 1, list.clear)
    for step, message in {3: "learner_logprobs has shape", 2: "members of its group", 1: "no rollouts"}.items():
        assert main(["replay", str(spoilt), "--step", str(step)]) == 3
        error = capsys.readouterr().err
        assert message in error and f"step-{step:06d}.jsonl" in error
    shutil.rmtree(spoilt / "rollouts")
    assert main(["replay", str(spoilt)]) == 3
    assert "the run has recorded no rollouts" in capsys.readouterr().err


class Counting(Monitor):
    """Counts the groups of each step."""

    def __init__(self, config):
        super().__init__(config)
        self.seen: dict[int, int] = {}

    def measure(self, record):
        self.seen[record.step] = len(record.groups) + len(record.evaluation)
        return {}

    def look(self, view):
        return ()


@pytest.mark.parametrize("name", ["once", "twice"])
def test_a_run_on_demonstrations_is_replayed_as_any_other(name, runs: Runs, replay, capsys):
    """Its rewards score evaluations alone."""
    data = {"train": {"name": "table", "path": str(runs.rows), "demonstration": "written"}}
    sections = {"data": data, "algorithm": {"name": "sft"}, "trainer": {"steps": 2}} | (
        TWICE if name == "twice" else {}
    )
    assert runs.train(runs.config(f"sft-{name}", **sections)) == 0
    run = runs.folder / f"sft-{name}"
    code, reports = replay(run, "--step", "1-2")
    assert code == 0 and [differences(report) for report in reports] == [{}, {}]
    compared = {part: found["compared"] for part, found in reports[0]["parts"].items()}
    assert compared.pop("log-probs") == compared.pop("rewards") == 0  # nothing sampled, nothing scored
    assert all(compared.values()) and reports[0]["notes"] == []
    code, (report,) = replay(run, "algorithm.aggregation=seq-mean-token-sum")
    assert code == 0 and "loss/policy" in report["what_if"]["metrics"]
    assert "the same rows" in report["notes"][0] and not re.search("completions|sampled", str(report["notes"]))
    assert main(["replay", str(run), "algorithm.name=grpo", "rewards=[]"]) == 2
    assert "the run's groups are demonstrations, and this algorithm learns from rollouts" in capsys.readouterr().err
    assert main(["rollouts", str(run), "--step", "1"]) == 0
    shown = capsys.readouterr().out
    assert "demonstration: " in shown and "reward" not in shown and "rollout 0" not in shown
    assert main(["rollouts", str(run), "--step", "1", "--where", "reward=null", "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["reward"], each["sampler_logprobs"]) for each in shown] == [(None, [])] * 3
    assert main(["rollouts", str(run), "--where", "reward<0.5", "--json"]) == 0 and capsys.readouterr().out == ""
    document = group_document(ViewedRun(run), "step", 1, 0)
    (member,) = document["members"]
    assert document["why"] == "The dataset's own; trained on." and member["reward"] is None
    assert "learner_logprob" in member["tokens"] and not {"sampler_logprob", "gap"} & member["tokens"].keys()
    (shown, *_) = prompt_document(ViewedRun(run), document["prompt_id"])
    assert [member["reward"] for member in shown["members"]] == [None]
    monitor = Counting(Counting.Config())
    assert list(recorded_alarms(run, load_recorded(run), lambda *fault: None, {"counting": monitor})) == []
    assert monitor.seen == {1: 0, 2: 0}  # a monitor is shown what is sampled
    rewrite(run, 1, lambda records: records[0]["advantage"].__setitem__(0, 2.0))
    code, (report,) = replay(run, "--step", 1)
    assert code == 6 and [each["what"] for each in differences(report)["advantages"]] == ["advantage of token 0"]


@pytest.mark.parametrize("turns", ["all", "last"])
def test_demonstrations_are_replayed_with_the_turns_that_were_learned(turns, runs: Runs, replay, capsys):
    says = [("user", "one plus one"), ("assistant", "it is 2"), ("user", "plus one"), ("assistant", "then 3")]
    row = {"messages": [{"role": role, "content": text} for role, text in says]}
    file = runs.folder / "talks.jsonl"
    file.write_text("".join(json.dumps({"id": f"t{n}", **row}) + "\n" for n in range(4)))
    data = {"train": {"name": "table", "path": str(file)}}
    config = runs.config(f"turns-{turns}", data=data, algorithm={"name": "sft", "turns": turns}, trainer={"steps": 1})
    assert runs.train(config) == 0
    run, other = runs.folder / f"turns-{turns}", {"all": "last", "last": "all"}[turns]
    assert replay(run)[0] == replay(run, "algorithm.aggregation=seq-mean-token-sum")[0] == 0
    capsys.readouterr()
    assert main(["replay", str(run), "rewards=[{name: exact}]"]) == 0
    shown = capsys.readouterr().out
    assert re.search("rewards +nothing to compare", shown) and re.search("advantages +0 of 3 rollouts change", shown)
    assert main(["replay", str(run), f"algorithm.turns={other}"]) == 3
    wanted = {"all": "demonstrations with all turns", "last": "demonstrations with the last turn alone"}[other]
    assert f"no record of {wanted} to learn" in capsys.readouterr().err
    assert main(["rollouts", str(run)]) == 0
    (shown,) = set(re.findall(r"stop\n((?:    .*\n)+)", capsys.readouterr().out))
    assert shown == {"all": "    turn 1: it is 2\n    turn 2: then 3\n", "last": "    then 3\n"}[turns]
