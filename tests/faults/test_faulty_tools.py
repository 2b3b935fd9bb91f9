"""Tools that hang or crash now and then: the run goes on, and exactly those episodes are invalid."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mmrl.rollout.records import read_step, recorded_steps
from mmrl.runs.history import read_ledger
from tests.faults.comparison import metrics
from tests.faults.faulty_tools import fate
from tests.faults.runs import Runs, events

PROMPTS, MEMBERS, TURNS = 8, 15, 4
LONG = [pytest.mark.slow, pytest.mark.timeout(3600)]  # some 230 calls hang or crash; each costs a worker


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.full), pytest.param(30, marks=LONG)])
def test_a_tool_that_hangs_and_crashes_costs_exactly_its_episodes(fake_runs: Runs, steps: int) -> None:
    """Each hangs or crashes in 1 % of the calls; which ones is computed here again from the recorded turns."""
    environment = {
        "name": f"{Path(__file__).with_name('faulty_tools.py')}:FaultyTools",
        "timeout_s": 1,
        "max_turns": TURNS,
        "max_turn_tokens": 5,
        "max_observation_tokens": 60,
    }
    config = fake_runs.config(
        environment=environment,
        sampler={"group_size": MEMBERS, "max_new_tokens": 64},
        learner={"minibatches": 2},
        trainer={"steps": steps, "prompts_per_step": PROMPTS, "save_every": steps},
    )
    assert fake_runs.train(config) == 0
    assert_counted(fake_runs.folder / "run", steps)


ONE_RESET_FAILS = """
import os
from mmrl import Environment, Observation

class OneResetFails(Environment):
    def reset(self, prompt, seed):
        try:
            os.open(os.environ["MARK"], os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return
        raise KeyError("no board")

    def step(self, turn):
        return Observation("seen", reward=len(turn.text))
"""


def test_an_episode_that_failed_in_reset_is_asked_for_no_log_probs(fake_runs: Runs, monkeypatch) -> None:
    """It has no tokens, which a learner cannot pack."""
    code = fake_runs.folder / "resets.py"
    code.write_text(ONE_RESET_FAILS)
    monkeypatch.setenv("MARK", str(fake_runs.folder / "mark"))
    config = fake_runs.config(
        algorithm={"name": "grpo", "kl": {"coef": 0.1}},
        environment={"name": f"{code}:OneResetFails", "workers": 1, "max_turns": 2},
        learner={"epochs": 2},
        trainer={"steps": 1},
    )
    assert fake_runs.train(config) == 0
    run = fake_runs.folder / "run"
    (event,) = events(run, "environment_failed")
    (path,) = recorded_steps(run).values()
    groups = [group.credited for group in read_step(path).groups]
    ((group, place),) = [
        (group, place) for group in groups for place, each in enumerate(group.scored.rollouts) if each.failure
    ]
    failed = group.scored.rollouts[place]
    assert (failed.prompt.id, failed.index, event["turn"]) == (event["prompt"], event["member"], -1)
    assert failed.segments == () and not group.scored.valid[place] and not group.updates[place]
    assert [len(values) for values in (group.logprobs[place], group.reference_logprobs[place])] == [0, 0]
    others = [
        (len(each.token_ids), len(of_group.logprobs[i]), len(of_group.reference_logprobs[i]), len(of_group.updates[i]))
        for of_group in groups
        for i, each in enumerate(of_group.scored.rollouts)
        if each is not failed
    ]
    assert len(others) == 11 and all(tokens == old == reference > 0 for tokens, old, reference, _ in others)
    assert {updates for *_, updates in others} == {2}
    assert metrics(run)[1]["episode/failed_calls_fraction"] > 0
    assert fake_runs.replay(run) == 0


def assert_counted(run: Path, steps: int) -> None:
    """Exactly the episodes with a call that hung or crashed are invalid, in no loss, in the metrics and events."""
    learned = Counter((update["step"], *sample) for update in read_ledger(run) for sample in update["samples"])
    failed = list[tuple[int, str, int, int, str]]()
    for step, path in recorded_steps(run).items():
        calls, bad, episodes = 0, 0, 0
        for group in read_step(path).groups:
            credited = group.credited
            for place, rollout in enumerate(credited.scored.rollouts):
                fates = [fate(rollout.prompt.id, played.turn.index, played.turn.text) for played in rollout.episode]
                is_bad = any(fates)
                assert not any(fates[:-1]) and is_bad == (rollout.finish_reason == "failed") == bool(rollout.failure)
                assert is_bad == (not credited.scored.valid[place]) == (rollout.episode[-1].content is None)
                assert learned[step, *rollout.key] == len(credited.updates[place]) == (not is_bad)
                calls, bad, episodes = calls + 1 + len(fates), bad + is_bad, episodes + 1  # one reset each
                if is_bad:
                    failed.append((*rollout.key, len(fates) - 1, fates[-1]))
                    assert not credited.advantages[place].any() and credited.scored.rewards[place] == 0
                else:
                    assert len(fates) == TURNS and rollout.finish_reason == "turns"
        assert episodes == PROMPTS * MEMBERS
        line = metrics(run)[step]
        assert line["episode/failed_calls_fraction"] == pytest.approx(bad / calls)
        assert line["episode/finish_failed_fraction"] == pytest.approx(bad / episodes)
        assert line["reward/unscored_fraction"] == pytest.approx(bad / episodes)
    assert sum(learned.values()) == steps * PROMPTS * MEMBERS - len(failed)
    told = events(run, "environment_failed")
    how = {"hangs": "did not answer", "crashes": "ended its worker"}
    assert sorted(failed) == sorted(
        (each["epoch"], each["prompt"], each["member"], each["turn"], name)
        for each in told
        for name, cause in how.items()
        if cause in each["cause"]
    )
    assert len(failed) == len(told) and {name for *_, name in failed} == {"hangs", "crashes"}
