"""Runs with a critic on the fake engine: pretraining, what they write, a kill, replay, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from mmrl.commands.cli import main
from mmrl.engine_api import UpdateResult
from mmrl.rollout.records import read_step, recorded_steps
from mmrl.types import TrainingRow
from tests.faults.comparison import metrics
from tests.faults.fake_critic import FakeCritic
from tests.faults.runs import Runs, events, fake, outcome, records, rollouts

PRETRAINED = 2
PPO: dict[str, Any] = {"name": "ppo", "kl": {"coef": 0.0}, "whiten": False, "lam": 0.5, "mask_truncated": True}
SECTIONS: dict[str, Any] = {
    "algorithm": PPO,
    "critic": {"lr": 1e-2, "pretrain_steps": PRETRAINED},
    "learner": {"lr": 1e-2, "minibatches": 2, "epochs": 2},
    "trainer": {"steps": 4, "keep_checkpoints": 9},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, models: Callable[[str], Path]) -> Iterator[Runs]:
    with fake(tmp_path_factory.mktemp("critics"), models("qwen2")) as found:
        yield found


@pytest.fixture(scope="module")
def finished(runs: Runs) -> Path:
    """A run of two steps of pretraining and two of training, for tests that only read it."""
    assert runs.train(runs.config("finished", **SECTIONS)) == 0
    return runs.folder / "finished"


def weights(run: Path, step: int, role: str) -> np.ndarray:
    folder = {"policy": "model", "critic": "critic/model"}[role]
    (found,) = load_file(run / f"checkpoints/step-{step:06d}" / folder / "model.safetensors").values()
    return found


def test_pretraining_leaves_the_policy_as_it_is(finished: Path) -> None:
    for step in range(1, 5):
        moved = {role: not np.array_equal(weights(finished, step, role), weights(finished, step - 1, role))
                 for role in ("policy", "critic")}  # fmt: skip
        assert moved == {"policy": step > PRETRAINED, "critic": True}
    versions = {step: {record["weight_version"] for record in rollouts(finished, step)} for step in (1, 2, 3, 4)}
    assert versions == {1: {0}, 2: {0}, 3: {0}, 4: {4}}  # two minibatches in each of two epochs
    assert {record["step"] for record in records(finished / "ledger.jsonl")} == {3, 4}
    assert events(finished, "no_signal") == []


def test_metrics_of_the_critic_have_a_section_of_their_own(finished: Path) -> None:
    found = metrics(finished)
    of_critic = {"loss", "explained_variance", "clip_fraction", "grad_norm", "lr", "value_mean", "return_mean"}
    for step in range(1, 5):
        names = {name for name in found[step] if name.startswith("critic/")}
        assert names == {f"critic/{name}" for name in (*of_critic, "skipped_updates")}
        of_policy = {name for name in found[step] if name.startswith(("loss/", "policy/", "advantage/"))}
        assert ("loss/policy" in of_policy) is ("advantage/mean" in of_policy) is (step > PRETRAINED)
        assert step > PRETRAINED or of_policy == {"policy/skipped_updates"}
    assert found[1]["critic/explained_variance"] == 0  # all values are 0


def test_a_record_has_values_and_returns_which_are_the_advantages_of_the_tokens(finished: Path) -> None:
    for step in range(1, 5):
        told: list[tuple[float, float]] = []
        for record in rollouts(finished, step):
            values, returns, earned = (np.array(record[name]) for name in ("value", "return", "advantage"))
            assert len(values) == len(returns) == len(record["token_ids"])
            assert [len(each) for each in record["update_value"]] == [len(values)] * 2  # one in each epoch
            assert "final_value" not in record
            told += zip(values, returns, strict=True)
            lam = 1.0 if step <= PRETRAINED else 0.5
            after = advantage = 0.0
            for t in range(len(values) - 1, -1, -1):
                reward = record["reward"] if t == len(values) - 1 else 0.0
                advantage = reward + after - values[t] + lam * advantage
                after = values[t]
                assert returns[t] == pytest.approx(advantage + values[t], abs=1e-6)
                trains = step > PRETRAINED and record["finish_reason"] == "stop"
                assert earned[t] == pytest.approx(advantage if trains else 0.0, abs=1e-6)
        known, wanted = np.array(told).T
        assert metrics(finished)[step]["critic/return_mean"] == pytest.approx(wanted.mean(), abs=1e-6)
        expected = 1 - (wanted - known).var() / wanted.var()
        assert metrics(finished)[step]["critic/explained_variance"] == pytest.approx(expected, abs=1e-5)


def test_the_critic_learns_completions_that_the_policy_does_not(finished: Path) -> None:
    """``mask_truncated`` keeps those that a limit ended from the policy."""
    cut = [record for step in (3, 4) for record in rollouts(finished, step) if record["finish_reason"] == "length"]
    assert cut
    for record in cut:
        assert len(record["update_value"]) == 2 and record["update_entropy"] == []


def test_records_come_back_as_they_were(finished: Path) -> None:
    for group in read_step(recorded_steps(finished)[4]).groups:
        for values, found in zip(group.credited.values, group.credited.critic_updates, strict=True):
            assert len(found) == 2 and all(len(each.vpreds) == len(values) for each in found)
            assert all(not len(each.logprobs) for each in found)


@pytest.mark.parametrize(("step", "minibatches"), [(1, 2), (3, 2), (3, 1)])
def test_a_run_that_was_killed_goes_on_to_the_same_bits(runs: Runs, step: int, minibatches: int) -> None:
    learner = {"lr": 1e-2, "minibatches": minibatches, "epochs": 1}
    configs = [runs.config(f"{name}-{step}-{minibatches}", **{**SECTIONS, "learner": learner}) for name in ("w", "k")]
    assert runs.train(configs[0]) == 0
    updates = minibatches * (step + max(step - PRETRAINED, 0))
    runs.killed(configs[1], "fake.update", updates)
    assert runs.train(configs[1]) == 0
    whole, again = (outcome(runs.folder / config.stem) for config in configs)
    assert again == whole


def test_a_bootstrapped_run_records_the_value_after_what_a_limit_ended(runs: Runs, capsys: Any) -> None:
    sections = {**SECTIONS, "algorithm": {**PPO, "bootstrap": True, "mask_truncated": False}}
    assert runs.train(runs.config("bootstrapped", **sections)) == 0
    found = [record for step in range(1, 5) for record in rollouts(runs.folder / "bootstrapped", step)]
    assert any(record["final_value"] for record in found)
    for record in found:
        assert record["finish_reason"] == "length" or record["final_value"] == 0
        assert record["return"][-1] == pytest.approx(record["reward"] + record["final_value"], abs=1e-6)
    capsys.readouterr()
    assert main(["replay", str(runs.folder / "bootstrapped"), "--step", "1-4"]) == 0


def test_a_replay_says_what_other_options_would_have_made_of_a_step(finished: Path, capsys: Any) -> None:
    assert main(["replay", str(finished), "--step", "1-4"]) == 0
    capsys.readouterr()
    changes = ["algorithm.lam=1.0", "algorithm.value_clip=0.0001"]
    assert main(["replay", str(finished), "--step", "4", "--json", *changes]) == 0
    (told,) = json.loads(capsys.readouterr().out)["steps"]
    was, now = (told["what_if"]["metrics"]["critic/loss"][side] for side in ("was", "would_be"))
    assert now > was


def test_optimizer_steps_of_the_critic_that_come_to_nothing_are_told_and_end_the_run(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def update(self: FakeCritic, rows: Sequence[TrainingRow]) -> UpdateResult:
        nothing = [np.zeros(0, np.float32) for _ in rows]
        return UpdateResult({}, nothing, nothing, fault="the loss is nan")

    monkeypatch.setattr(FakeCritic, "update", update)
    sections = {**SECTIONS, "critic": {}, "learner": {"lr": 1e-2, "minibatches": 3}}
    assert runs.train(runs.config("faulty", **sections)) == 6
    assert "3 optimizer steps of the critic in a row came to nothing: the loss" in capsys.readouterr().err
    found = events(runs.folder / "faulty", "update_skipped")
    assert [event["in_a_row"] for event in found] == [1, 2, 3] and found[0]["returns"]["max"] >= 0
    assert "advantages" not in found[0]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"critic": None}, "algorithm 'ppo' asks for a critic's values, and the config has no section critic"),
        ({"algorithm": {"name": "grpo"}}, "algorithm 'grpo' asks for no critic, so none would be trained"),
        ({"critic": {"pretrain_steps": 4}}, "critic.pretrain_steps is 4, and the run has only 4 steps"),
        ({"critic": {"revision": "main"}}, "critic.revision is set, and critic.path is null"),
        ({"critic": {"freeze": ["language"]}, "model": {"lora": {}}}, "there is no weight to freeze"),
        ({"critic": {"head": "one"}}, "critic.head"),
        ({"critic": {"lr": 0}}, "critic.lr"),
        (
            {"learner": {"warmup_steps": 8, "minibatches": 2, "epochs": 2}},
            "learner.warmup_steps is 8, but the run has only 8 optimizer steps",
        ),
        (
            {"trainer": {"steps": None, "epochs": 0.7}},
            "critic.pretrain_steps is 2, and the run has only 2 steps, so the policy would not learn",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(runs: Runs, sections: Any, message: str, capsys: Any) -> None:
    config = runs.config("refused", **{**SECTIONS, **sections})
    capsys.readouterr()
    assert runs.train(config) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_another_critic_is_refused_where_a_run_goes_on(runs: Runs, capsys: Any) -> None:
    assert runs.train(runs.config("other", **{**SECTIONS, "trainer": {"steps": 3}})) == 0
    for change in ("critic.head=normal", "critic.pretrain_steps=1", "critic.freeze=[vision]", "critic.lr=0.1"):
        capsys.readouterr()
        assert runs.train(runs.config("other", **{**SECTIONS, "trainer": {"steps": 4}}), change) == 2
        assert change.partition("=")[0] in capsys.readouterr().err
