import math
import threading
import time

import numpy as np
import pytest

from mmrl.interfaces import Tracker
from mmrl.runs import tracking
from mmrl.runs.tracking import Trackers, shown
from tests.rollout.test_episode_records import credited, episodes


class Recording(Tracker):
    def __init__(self):
        self.calls = []

    def start(self, run_dir, config):
        self.calls.append(("start", run_dir, config))

    def log(self, step, metrics):
        self.calls.append((step, metrics))

    def finish(self):
        self.calls.append("finish")


class Heeding(Recording):
    def alarm(self, step, monitor, message):
        self.calls.append((step, monitor, message))


class Broken(Recording):
    def log(self, step, metrics):
        raise SystemExit("no login")


class BrokenStart(Recording):
    def start(self, run_dir, config):
        raise OSError("no disk")


class Hanging(Recording):
    def __init__(self):
        super().__init__()
        self.release = threading.Event()

    def log(self, step, metrics):
        self.release.wait(30)


def test_every_tracker_gets_every_step_in_order_and_is_closed(tmp_path):
    faults, first, second = [], Recording(), Recording()
    trackers = Trackers([first, second], faults.append)
    trackers.start(tmp_path, {"lr": 0.1})
    values = {"reward/mean": 0.5}
    for step in range(3):
        trackers.log(step, values)
    values["reward/mean"] = math.nan
    trackers.finish(10)
    steps = [(step, {"reward/mean": 0.5}) for step in range(3)]
    assert first.calls == second.calls == [("start", tmp_path, {"lr": 0.1}), *steps, "finish"]
    assert faults == []


def test_an_evaluation_is_shown_by_each_prompts_first_rollout_without_secrets(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")
    made = [credited(episodes(seed, 3)) for seed in range(6)]
    secret = made[0].scored.rollouts[0].episode[0].turn
    object.__setattr__(secret, "text", f"{secret.text} correct-horse-battery")
    rollouts, histograms = shown({"": made}, made[:2], 4)
    assert len(rollouts) == 4 and "correct-horse" not in str(rollouts)
    for each, group in zip(rollouts, made, strict=False):
        rollout = group.scored.rollouts[0]
        texts = [message.content for message in each.messages if message.role == "assistant"]
        assert len(texts) == len(rollout.episode)
        assert each.images == rollout.all_images and each.reward == group.scored.rewards[0]
        # What the policy has not read is not shown: hostile texts hold placeholders of their own.
        inserted = [segment.role for segment in rollout.segments if not segment.by_policy]
        assert [message.role for message in each.messages[1:] if message.role != "assistant"] == inserted
    rewards = np.concatenate([group.scored.rewards[:2] for group in made])  # the last of each group is not scored
    assert list(histograms) == ["eval/reward", "eval/length", "rollouts/reward", "rollouts/length"]
    assert histograms["eval/reward"].tolist() == rewards.tolist() and len(histograms["eval/length"]) == 18
    assert histograms["rollouts/reward"].tolist() == rewards[:4].tolist()
    written = [rollout.mask.sum() for group in made for rollout in group.scored.rollouts]
    assert histograms["eval/length"].tolist() == written != [len(rollout.mask) for rollout in made[0].scored.rollouts]
    assert shown({"": []}, [], 4) == ([], {})
    of_sets, histograms = shown({"easy": made[:3], "hard": made[3:]}, [], 2)
    assert len(of_sets) == 4 and [*histograms][::2] == ["eval/easy/reward", "eval/hard/reward"]


def test_alarms_reach_the_trackers_that_show_them_in_order(tmp_path):
    faults, heeding, plain = [], Heeding(), Recording()
    trackers = Trackers([heeding, plain], faults.append)
    trackers.start(tmp_path, {})
    trackers.log(1, {})
    trackers.alarm(2, "dead_groups", "nothing is learned")
    trackers.log(2, {})
    trackers.finish(10)
    assert heeding.calls[1:] == [(1, {}), (2, "dead_groups", "nothing is learned"), (2, {}), "finish"]
    assert plain.calls[1:] == [(1, {}), (2, {}), "finish"] and faults == []


def test_trackers_get_the_config_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("REWARD_KEY", "correct-horse-battery")
    trackers = Trackers([tracker := Recording()], pytest.fail)
    trackers.start(tmp_path, {"rewards": [{"header": "Bearer correct-horse-battery"}]})
    trackers.finish(10)
    assert tracker.calls[0][2] == {"rewards": [{"header": "Bearer [redacted]"}]}


def test_a_tracker_that_fails_is_reported_once_and_counted_and_others_go_on(tmp_path):
    faults, good = [], Recording()
    trackers = Trackers([Broken(), good], faults.append)
    trackers.start(tmp_path, {})
    for step in range(5):
        trackers.log(step, {})
    trackers.finish(10)
    assert faults == ["tracker Broken failed: SystemExit: no login", "tracker Broken: 5 faults, 0 steps dropped"]
    assert len(good.calls) == 7


class Stateful(Recording):
    """Numbers its starts."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def start(self, run_dir, config):
        self.number += 1
        self.calls.append(self.number)

    def state(self):
        return {"number": self.number}

    def restore(self, state):
        self.number = state["number"]


def test_a_tracker_goes_on_with_the_state_it_had_and_keeps_it_if_it_does_not_start(tmp_path):
    first = Trackers([Stateful(), Recording()], pytest.fail)
    first.start(tmp_path, {})
    first.finish(10)
    assert first.states() == [{"number": 1}, {}]
    second = Trackers([tracker := Stateful(), BrokenStart()], lambda message: None)
    second.start(tmp_path, {}, [first.states()[0], {"id": "kept"}])
    second.finish(10)
    assert tracker.calls == [2, "finish"] and second.states() == [{"number": 2}, {"id": "kept"}]


def test_a_state_that_json_cannot_hold_is_a_fault_of_the_tracker(tmp_path):
    faults, tracker = [], Stateful()
    tracker.state = lambda: {"number": object()}
    trackers = Trackers([tracker], faults.append)
    trackers.start(tmp_path, {})
    trackers.finish(10)
    assert "TypeError" in faults[0] and trackers.states() == [{}]


def test_a_tracker_that_does_not_start_is_called_no_more(tmp_path):
    faults, tracker = [], BrokenStart()
    trackers = Trackers([tracker], faults.append)
    trackers.start(tmp_path, {})
    trackers.log(1, {})
    trackers.finish(10)
    assert tracker.calls == []
    assert faults == ["tracker BrokenStart failed: OSError: no disk"]


def test_a_tracker_that_hangs_slows_nothing_and_finish_keeps_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "QUEUE_STEPS", 3)
    faults, tracker, good = [], Hanging(), Recording()
    trackers = Trackers([tracker, good], faults.append)
    trackers.start(tmp_path, {})
    start = time.monotonic()
    for step in range(20):
        trackers.log(step, {})
        time.sleep(0.005)
    assert time.monotonic() - start < 20
    trackers.finish(0.3)
    assert time.monotonic() - start < 20
    assert "too slow" in faults[0]
    assert "did not finish in time" in faults[1]
    assert "steps dropped" in faults[2]
    assert good.calls[-1] == "finish"
    tracker.release.set()
