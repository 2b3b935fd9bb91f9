"""On-policy distillation: numbers by hand, what it asks of a run, and runs without any reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.config.load import from_mapping
from mmrl.errors import ConfigError, PluginError
from mmrl.interfaces import Aggregation, Algorithm, Needs
from mmrl.runs.reader import load_run
from mmrl.runs.setup import RunSetup
from mmrl.testing import check_algorithm, replay
from mmrl.types import Batch, Credit, PackedTokens, TokenLoss
from mmrl_algorithms.opd import OPD
from tests.faults.runs import REWARDS, Runs, events, records

OLD = np.log([[0.5, 0.25, 0.1, 0.4], [0.2, 0.5, 0.5, 0.5]])
TEACHER = np.log([[0.25, 0.5, 0.1, 0.2], [0.4, 0.125, 0.5, 0.5]])
MASK = np.array([[True, True, True, False], [True, True, False, False]])


def batch(**further: Any) -> dict[str, Any]:
    """Two completions of a prompt, of three and two tokens; the second of its tokens is one that rose by a half."""
    policy = OLD + np.log([[1.0, 1.5, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    return {
        "group_ids": np.zeros(2, int),
        "rewards": np.array([0.0, 1.0]),
        "response_mask": MASK,
        "old_log_probs": OLD,
        "log_probs": policy,
        "rollout_log_probs": OLD,
        "ref_log_probs": TEACHER,
        "entropy": np.ones((2, 4)),
        "max_len": 4,
        **further,
    }


def test_an_advantage_is_the_teachers_log_prob_less_the_policys_own() -> None:
    found = replay("opd", batch())
    two = np.log(2)
    expected = np.array([[-two, two, 0, 0], [two, -2 * two, 0, 0]])
    np.testing.assert_allclose(found.advantages, expected, atol=1e-12)
    # Five tokens; that of ratio 1.5 is clipped at 1.2, so it has no gradient.
    losses = [two, -two * 1.2, 0.0, -two, 2 * two]
    assert found.loss == pytest.approx(sum(losses) / 5)
    gradient = np.array([[two, 0, 0, 0], [-two, 2 * two, 0, 0]]) / 5
    np.testing.assert_allclose(found.grad_log_probs, gradient, atol=1e-12)
    assert found.metrics["distill/kl"] == pytest.approx((two - two + 0 - two + 2 * two) / 5)
    assert found.metrics["distill/abs_gap"] == pytest.approx(5 * two / 5)


def test_rewards_are_added_as_those_of_grpo_where_they_are_asked_for() -> None:
    found = replay("opd", batch(), options={"reward_coef": 0.5})
    plain, grpo = replay("opd", batch()), replay("grpo", batch())
    added = np.asarray(grpo.advantages)[:, None] * MASK
    np.testing.assert_allclose(found.advantages, plain.advantages + 0.5 * added, atol=1e-12)
    assert np.abs(added).max() > 0.5


@pytest.mark.parametrize("options", [{}, {"reward_coef": 0.3}, {"mask_truncated": True, "entropy_coef": 0.1}])
def test_it_keeps_the_rules_of_algorithms(options: dict[str, Any]) -> None:
    check_algorithm("opd", options=options)


def test_it_needs_a_reference_and_rewards_only_with_their_weight() -> None:
    assert OPD(OPD.Config()).needs() == Needs(reference_logprobs=True, old_logprobs=True, rewards=False)
    assert OPD(OPD.Config(reward_coef=1.0)).needs() == Needs(
        reference_logprobs=True, old_logprobs=True, min_group_size=2
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl": {"coef": 0.1}}, "here the reference is the teacher"),
        ({"dynamic_sampling": {}}, "dynamic_sampling is about rewards, and reward_coef is 0"),
        ({"reward_norm": "group"}, "reward_norm is about rewards"),
        ({"reward_clip": (0.0, 1.0)}, "reward_clip is about rewards"),
    ],
)
def test_options_that_cannot_act_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OPD.Config.model_validate(options)


class Peeks(Algorithm):
    """Says that it needs no rewards, and learns from them."""

    aggregation = Aggregation("token-mean")

    def needs(self) -> Needs:
        return Needs(rewards=False)

    def credit(self, batch: Batch) -> Credit:
        return Credit(np.where(batch.valid, batch.rewards, 0.0))

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        return TokenLoss(-tokens.advantages_T * tokens.logprobs_T)


def test_the_kit_finds_an_algorithm_that_learns_from_rewards_it_does_not_need() -> None:
    with pytest.raises(PluginError, match="other rewards changes nothing") as caught:
        check_algorithm(Peeks)
    assert "Needs(rewards=True)" in caught.value.remedy


ALGORITHM = {"name": "opd"}


def test_a_run_without_rewards_scores_nothing_and_learns(fake_runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    config = fake_runs.config(algorithm=ALGORITHM, rewards=[], learner={"minibatches": 2}, trainer={"steps": 3})
    assert fake_runs.train(config) == 0
    shown = capsys.readouterr().out
    assert "reward" not in shown.partition("step 1/3")[2].splitlines()[0]
    run = fake_runs.folder / "run"
    lines = [line for line in records(run / "metrics.jsonl") if line["step"]]
    assert len(lines) == 3 and all("distill/kl" in line for line in lines)
    assert not any(name.startswith(("reward/", "group/")) for line in lines for name in line)
    # The reference is the policy at its start: the first step's gap is none, and the next one's is not.
    assert lines[0]["distill/abs_gap"] == pytest.approx(0, abs=1e-6)
    learned = list(load_run(run).rollouts(2))
    assert len(learned) == 12 and all(each.valid and not each.rewards for each in learned)
    assert not events(run, "unscored") and not events(run, "alarm")
    assert fake_runs.replay(run) == 0


def test_rewards_that_there_are_are_numbers_and_change_nothing(fake_runs: Runs, tmp_path: Path) -> None:
    """One that fails leaves its completions valid; one of held-out rows alone leaves training rows without a score."""
    (tmp_path / "mine.py").write_text(
        "def odd(rollouts):\n    return [None if r.index % 2 else 1.0 for r in rollouts]\n"
    )
    weights = {}
    rewards = {"none": [], "odd": [{"name": f"{tmp_path / 'mine.py'}:odd"}], "held": []}
    rewards["held"] = [{"name": f"{REWARDS}:letters", "sources": ["held"]}]
    for name, each in rewards.items():
        evaluated = {"name": "table", "path": str(fake_runs.rows), "label": "held"} if name == "held" else None
        data = {"train": {"name": "table", "path": str(fake_runs.rows)}, "eval": evaluated}
        config = fake_runs.config(name, algorithm=ALGORITHM, rewards=each, data=data, trainer={"steps": 2})
        assert fake_runs.train(config) == 0
        found = fake_runs.folder / name
        weights[name] = (found / "checkpoints" / "step-000002" / "model" / "model.safetensors").read_bytes()
        last = [line for line in records(found / "metrics.jsonl") if line["step"] == 2][-1]
        assert ("reward/mean" in last) == (name == "odd") and ("eval/accuracy" in last) == (name == "held")
        assert fake_runs.replay(found) == 0
    assert len({*weights.values()}) == 1
    found = list(load_run(fake_runs.folder / "odd").rollouts(2))
    assert all(each.valid for each in found) and {each.rewards["odd"] for each in found} == {None, 1.0}


def test_rewards_are_demanded_where_they_are_learned_from_or_judge(fake_runs: Runs) -> None:
    def setup(**sections: Any) -> RunSetup:
        config = json.loads(fake_runs.config(**sections).read_text())
        return RunSetup(from_mapping(config), fake_runs.folder / "media")

    with pytest.raises(ConfigError, match="'opd' needs a reward"):
        _ = setup(algorithm={"name": "opd", "reward_coef": 1.0}, rewards=[]).algorithm
    data = {"train": {"name": "table", "path": str(fake_runs.rows)}}
    with pytest.raises(ConfigError, match="evaluation needs at least one reward"):
        _ = setup(algorithm=ALGORITHM, rewards=[], data={**data, "eval": data["train"]}).algorithm
