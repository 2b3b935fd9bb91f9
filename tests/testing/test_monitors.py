"""``check_monitor`` finds each rule that a monitor breaks, and nothing at one that keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from mmrl.errors import ConfigError, PluginError
from mmrl.interfaces import Finding, Monitor, PluginConfig, StepRecord, StepView
from mmrl.testing import check_monitor


class Good(Monitor):
    class Config(PluginConfig):
        limit: float = 0.9
        """Entropy above which it is a hit."""

    def measure(self, record: StepRecord) -> Mapping[str, float]:
        return {"groups": len(record.groups), "trained": len(record.trained)}

    def look(self, step: StepView) -> Sequence[Finding]:
        entropy = step.get("policy/entropy")
        return [] if entropy is None else [Finding(entropy / self.config.limit, "much", "less", {"entropy": entropy})]


class Remembers(Good):
    def look(self, step: StepView) -> Sequence[Finding]:
        self.count = getattr(self, "count", 0) + 1
        return [Finding(self.count, "much", "less")]


class Draws(Good):
    def measure(self, record: StepRecord) -> Mapping[str, float]:
        self.step = getattr(self, "step", 0) + 1
        return {"steps": self.step}


class NeedsMetrics(Good):
    def look(self, step: StepView) -> Sequence[Finding]:
        return [Finding(step.metrics["reward/mean"], "much", "less")]


class NeedsGroups(Good):
    def measure(self, record: StepRecord) -> Mapping[str, float]:
        return {"first": record.groups[0].scored.rewards[0]}


class Changes(Good):
    def measure(self, record: StepRecord) -> Mapping[str, float]:
        for group in record.groups:
            group.scored.rewards[:] = 7
        return {}


class Speechless(Good):
    def look(self, step: StepView) -> Sequence[Finding]:
        return [Finding(0.0, "", "less")]


class Infinite(Good):
    def look(self, step: StepView) -> Sequence[Finding]:
        return [Finding(0.0, "much", "less", {"growth": float("inf")})]


class Eager(Good):
    def look(self, step: StepView) -> Sequence[Finding]:
        return [Finding(0.0, "much", "less", hits=0)]


def test_a_good_one_passes_by_class_object_and_options() -> None:
    check_monitor(Good)
    check_monitor(Good, options={"limit": 2})
    check_monitor(Good(Good.Config()))
    with pytest.raises(ConfigError, match="limits"):
        check_monitor(Good, options={"limits": 2})


@pytest.mark.parametrize(
    ("monitor", "rule"),
    [
        (Remembers, "a monitor that has not seen the steps before finds the same"),
        (Draws, "the same groups give the same numbers"),
        (NeedsMetrics, "every step can be looked at"),
        (NeedsGroups, "every step can be measured"),
        (Changes, "groups stay as they are"),
        (Speechless, "a finding has a sentence without its full stop, and a remedy"),
        (Infinite, "a finding has finite numbers by name"),
        (Eager, "a finding has at least one hit"),
    ],
)
def test_each_broken_rule_is_named(monitor: type[Monitor], rule: str) -> None:
    with pytest.raises(PluginError) as caught:
        check_monitor(monitor)
    assert f"{monitor.__name__} breaks a rule: {rule}" in str(caught.value) and caught.value.remedy


def test_one_that_is_no_monitor_is_refused() -> None:
    class Odd:
        pass

    with pytest.raises(PluginError, match=r"no subclass of mmrl.interfaces.Monitor"):
        check_monitor(Odd)  # type: ignore[arg-type]
