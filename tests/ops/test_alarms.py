"""From findings to alarms: rows of hits, hysteresis and quiet steps, each on a sequence written by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from mmrl.errors import PluginError
from mmrl.interfaces import BASELINE_STEPS, Finding, Monitor, StepRecord, StepView
from mmrl.ops.alarms import History, Watch, message_of
from mmrl.testing.monitors import FACTS, alarms_of


class Level(Monitor):
    """Its severity is the metric ``level``, and that of a second cause ``other``."""

    hits = 3

    def look(self, step: StepView) -> Sequence[Finding]:
        pairs = {"": step.get("level"), "other": step.get("other")}
        found = {cause: value for cause, value in pairs.items() if value is not None}
        return [
            Finding(value, "it is high", "lower it", {"a_level": value}, cause, self.hits)
            for cause, value in found.items()
        ]


def levels(*values: float | None) -> dict[int, dict[str, float]]:
    return {step: {} if value is None else {"level": value} for step, value in enumerate(values, start=1)}


def steps_of(*values: float | None) -> list[tuple[int, int]]:
    """(step, since) of each alarm at such severities from step 1 on."""
    return [(alarm.step, alarm.since) for alarm in alarms_of(Level(Level.Config()), levels(*values))]


@pytest.mark.parametrize(
    ("values", "alarms"),
    [
        ((1, 1), []),
        ((1, 1, 1), [(3, 1)]),
        ((0.999, 1, 1, 1), [(4, 2)]),
        ((1, 1, 0.99, 1, 1), []),
        ((1, 1, 0.99, 1, 1, 1), [(6, 4)]),
        ((1, None, 1, None, None, 1), [(6, 1)]),  # steps that do not tell of it neither count nor break the row
        ((5, 5, 5, 5, 5, 5), [(3, 1)]),
    ],
)
def test_three_hits_in_a_row_are_an_alarm(values: Sequence[float | None], alarms: list[tuple[int, int]]) -> None:
    assert steps_of(*values) == alarms


def test_an_alarm_that_goes_on_is_told_once_and_again_only_after_it_was_well() -> None:
    assert steps_of(*[2] * 100) == [(3, 1)]
    nearly_well, well = [2, 2, 2] + [0.81] * 30 + [2] * 30, [2, 2, 2] + [0.79] * 30 + [2] * 30
    assert steps_of(*nearly_well) == [(3, 1)]
    assert steps_of(*well) == [(3, 1), (36, 34)]


def test_there_is_one_alarm_of_a_cause_in_twenty_steps() -> None:
    flickering = [2, 2, 2, 0] * 12
    assert steps_of(*flickering) == [(3, 1), (23, 21), (43, 41)]


def test_causes_have_alarms_of_their_own() -> None:
    steps = {step: {"level": 1.0, **({"other": 1.0} if step > 2 else {})} for step in range(1, 7)}
    found = alarms_of(Level(Level.Config()), steps)
    assert [(alarm.step, alarm.cause) for alarm in found] == [(3, ""), (5, "other")]
    assert found[0].monitor == "mine" and found[0].values == {"a_level": 1.0}
    assert found[0].message == "it is high, since step 1 (a level 1): lower it"


def test_a_message_without_numbers() -> None:
    assert message_of(Finding(1, "it is high", "lower it"), 7) == "it is high, since step 7: lower it"


def test_a_curve_has_the_finite_values_of_the_steps_that_have_any() -> None:
    history = History()
    for step in range(100):
        history.add(step, {"a": float(step), **({"b": math.nan if step == 4 else 1.0} if step % 2 == 0 else {})})
    early = history.curve("a")
    history.add(100, {"a": math.inf, "c": -1.0})
    assert early.values.tolist() == early.steps.tolist() == [float(step) for step in range(100)]
    assert history.curve("b").steps.tolist()[:4] == [0, 2, 6, 8] and len(history.curve("a")) == 100
    assert len(history.curve("none")) == 0 and history.curve("c").tail(3).tolist() == [-1]
    assert early.tail(2).tolist() == [98, 99] and early.tail(0).tolist() == []
    with pytest.raises(ValueError, match="read-only"):
        early.values[0] = 1


def test_a_baseline_is_that_of_the_first_twenty_steps_once_there_are_more() -> None:
    history, found = History(), {}
    for step in range(BASELINE_STEPS + 5):
        history.add(step, {"a": 1000.0 if step in (0, 22) else float(step)})
        found[step] = history.curve("a").baseline()
    assert found[BASELINE_STEPS] is None  # its value belongs to it
    expected = (10.5, float(np.arange(1, 21).std()))
    assert found[21] == found[24] == pytest.approx(expected)
    assert history.curve("a").baseline(3) == pytest.approx((2, math.sqrt(2 / 3)))


class Measuring(Level):
    def measure(self, record: StepRecord) -> Mapping[str, float]:
        return {"step": record.step, "nothing": math.nan}


def test_measured_numbers_have_the_monitors_name_and_are_finite() -> None:
    watch = Watch({"mine": Measuring(Level.Config()), "plain": Level(Level.Config())}, FACTS, 9, _fail)
    assert watch.look(1, {}, StepRecord(1, FACTS)).metrics == {"monitor/mine/step": 1.0}
    assert watch.look(2, {}, None).metrics == {}


def _fail(label: str, error: Exception) -> None:
    raise AssertionError(label) from error


def raising() -> Iterator[type[Monitor]]:
    class Raises(Level):
        def look(self, step: StepView) -> Sequence[Finding]:
            raise ZeroDivisionError("at step 2") if step.step == 2 else KeyError

    class RaisesInMeasure(Level):
        def measure(self, record: StepRecord) -> Mapping[str, float]:
            raise ValueError("no group")

    class AnswersText(Level):
        def measure(self, record: StepRecord) -> Mapping[str, float]:
            return {"length": "7"}  # type: ignore[dict-item]

    class AnswersNothing(Level):
        def look(self, step: StepView) -> Sequence[Finding]:
            return None  # type: ignore[return-value]

    class AnswersNaN(Level):
        def look(self, step: StepView) -> Sequence[Finding]:
            return [Finding(math.nan, "a", "b")]

    class AnswersTwice(Level):
        def look(self, step: StepView) -> Sequence[Finding]:
            return [Finding(0, "a", "b"), Finding(1, "c", "d")]

    yield from (Raises, RaisesInMeasure, AnswersText, AnswersNothing, AnswersNaN, AnswersTwice)


@pytest.mark.parametrize("broken", list(raising()), ids=lambda each: each.__name__)
def test_a_monitor_that_raises_or_answers_nonsense_is_left_out_and_told_once(broken: type[Monitor]) -> None:
    faults = list[tuple[str, Exception]]()
    monitors = {"broken": broken(broken.Config()), "level": Level(Level.Config())}
    watch = Watch(monitors, FACTS, 9, lambda label, error: faults.append((label, error)))
    alarms = [watch.look(step, {"level": 1.0}, StepRecord(step, FACTS)).alarms for step in range(1, 6)]
    assert [len(each) for each in alarms] == [0, 0, 1, 0, 0]
    ((label, error),) = faults
    assert label == "broken" and isinstance(error, PluginError)
