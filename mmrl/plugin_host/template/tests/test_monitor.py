import numpy as np

from mmrl.interfaces import StepRecord
from mmrl.testing import alarms_of, check_monitor, make_rollouts
from mmrl.testing.monitors import FACTS
from mmrl.types import CreditedGroup, RolloutGroup, ScoredGroup
from new_plugin.monitor import EmptyAnswers


def test_it_keeps_the_rules_of_monitors() -> None:
    check_monitor(EmptyAnswers)


def test_empty_completions_are_counted() -> None:
    rollouts = tuple(make_rollouts(["7", " ", "", "8"]))
    scored = ScoredGroup(RolloutGroup(rollouts[0].prompt, rollouts), np.zeros(4), np.ones(4, bool), {})
    group = CreditedGroup(scored, [np.zeros(1)] * 4, [np.zeros(0)] * 4)
    monitor = EmptyAnswers(EmptyAnswers.Config())
    assert monitor.measure(StepRecord(1, FACTS, lambda: [group])) == {"empty": 0.5}
    assert monitor.measure(StepRecord(1, FACTS)) == {}


def test_there_is_an_alarm_after_three_steps_with_many_and_none_with_fewer() -> None:
    def alarms(share: float) -> list[int]:
        steps = {step: {"monitor/mine/empty": share if step > 25 else 0.05} for step in range(1, 31)}
        return [alarm.step for alarm in alarms_of(EmptyAnswers(EmptyAnswers.Config()), steps)]

    assert alarms(0.2) == [28] and alarms(0.19) == []
