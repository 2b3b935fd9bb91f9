"""The monitors of a run: which ones, what they see of a finished step, and the same of a run that is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from mmrl.config.plugin_specs import EVERY, MonitorSpec
from mmrl.config.sections import Config
from mmrl.errors import DataError, first_line
from mmrl.interfaces import Alarm, Monitor, RunFacts, StepRecord
from mmrl.ops.alarms import Looked, Watch
from mmrl.plugin_host import registry
from mmrl.plugin_host.installed import PluginInfo
from mmrl.rollout.batch import sampled_and_given
from mmrl.rollout.records import evaluation_names, read_step, recorded_evaluations, recorded_steps
from mmrl.runs.history import read_metrics
from mmrl.types import ENVIRONMENT, CreditedGroup, GroupKey

OnFault = Callable[[str, Exception], None]
"""Called with a monitor's name, and why it is left out."""


@dataclass
class StepGroups:
    """The groups of a step that is going on.

    Attributes:
        sampled: All that the step sampled.
        given: All that it took from its rows.
        evaluated, blank: Groups of its evaluation, and of the one with blank images, by the name of their set.
    """

    sampled: Sequence[CreditedGroup] = ()
    given: Sequence[CreditedGroup] = ()
    evaluated: dict[str, Sequence[CreditedGroup]] = field(default_factory=dict)
    blank: dict[str, Sequence[CreditedGroup]] = field(default_factory=dict)


class Monitoring:
    """Shows a run's steps to its monitors, as they are finished.

    Args:
        path: RUN, which has the steps before the first one that is looked at.
        on_fault: Called with the name of a monitor that is left out, and why.
    """

    def __init__(self, config: Config, path: Path, on_fault: OnFault) -> None:
        self._config, self._path, self._on_fault = config, path, on_fault
        self._watch: Watch | None = None
        self._monitors = monitors_of(config, on_fault)
        self._trained: frozenset[GroupKey] | None = None

    def __bool__(self) -> bool:
        """True if there are monitors."""
        return bool(self._monitors)

    def look(self, step: int, metrics: Mapping[str, float], groups: StepGroups) -> Looked:
        """The monitors' numbers of a step, and its alarms."""
        sampled, given = groups.sampled, groups.given
        if self._watch is None and not sampled and not given:  # perhaps of an earlier attempt, and not yet evaluated
            sampled, given = self._recorded(step)
        record = StepRecord(
            step,
            facts_of(self._config),
            lambda: sampled,
            lambda: [*chain.from_iterable(groups.evaluated.values())],
            lambda: [*chain.from_iterable(groups.blank.values())],
            self._previous(step),
            lambda: given,
        )
        if self._watch is None:
            self._watch = self._replayed(step)
        found = self._watch.look(step, metrics, record)
        self._trained = _trained_keys(sampled)
        return found

    def _replayed(self, step: int) -> Watch:
        """The monitors after all steps before this one, whose alarms were told."""
        watch = Watch(self._monitors, facts_of(self._config), self._config.trainer.steps, self._on_fault)
        for earlier, metrics in read_metrics(self._path).items():
            if earlier < step:
                watch.look(earlier, metrics, None)
        return watch

    def _previous(self, step: int) -> Callable[[], frozenset[GroupKey]]:
        """The keys that the step before learned from; from its record, if that was in an earlier attempt."""
        if (known := self._trained) is not None:
            return lambda: known
        return lambda: _trained_keys(self._recorded(step - 1)[0])

    def _recorded(self, step: int) -> tuple[Sequence[CreditedGroup], Sequence[CreditedGroup]]:
        """The groups of a step of an earlier attempt, as ``sampled_and_given``; none if their file is damaged, which
        must not end a run."""
        with suppress(DataError):
            return sampled_and_given(_recorded_groups(recorded_steps(self._path), step))
        return (), ()


def recorded_alarms(
    path: Path, config: Config, on_fault: OnFault, monitors: Mapping[str, Monitor] | None = None
) -> Iterator[Alarm]:
    """The alarms that a run's monitors tell of its record, step by step.

    A step whose rollouts are gone is judged by the numbers that were measured when it was finished.

    Args:
        monitors: By name; by default those of the config.

    Raises:
        DataError: The record is damaged.
    """
    facts, found = facts_of(config), monitors_of(config, on_fault) if monitors is None else monitors
    watch = Watch(found, facts, config.trainer.steps, on_fault)
    steps, names = recorded_steps(path), evaluation_names(path)
    pictured, blank = ([recorded_evaluations(path, name, blank=each) for name in names] for each in (False, True))
    before = frozenset[GroupKey]()
    for step, metrics in read_metrics(path).items():
        sampled, given = sampled_and_given(_recorded_groups(steps, step))
        evaluated, blanked = (
            [*chain.from_iterable(_recorded_groups(each, step) for each in files)] for files in (pictured, blank)
        )
        of_step = _known(sampled), _known(evaluated), _known(blanked)
        record = StepRecord(step, facts, *of_step, partial(frozenset, before), _known(given))
        is_recorded = any(step in each for each in (steps, *pictured, *blank))
        yield from watch.look(step, metrics, record if is_recorded else None).alarms
        before = _trained_keys(sampled)


def monitors_of(config: Config, on_fault: OnFault) -> dict[str, Monitor]:
    """The monitors of a config, by name.

    One that is there because the config names all is left out if it cannot be made.

    Raises:
        MMRLError: One that the config names cannot be made.
    """
    found = {spec.label: registry.create("monitor", spec) for spec in _named(config) if not spec.off}
    for info in _others(config):
        try:
            found[info.name] = registry.create("monitor", MonitorSpec(name=_long_name(info)))
        except Exception as error:
            on_fault(info.name, error)
    return found


def used_monitors(config: Config) -> list[PluginInfo]:
    """The plugins that are there because the config names all."""
    return _others(config)


def facts_of(config: Config) -> RunFacts:
    """Facts of a run that its config tells, without its plugins."""
    own = dict.fromkeys(spec.metric for spec in config.rewards)
    return RunFacts(
        group_size=config.sampler.group_size,
        prompts_per_step=config.trainer.prompts_per_step,
        max_new_tokens=config.sampler.max_new_tokens,
        updates_per_batch=config.learner.minibatches * config.learner.epochs,
        rewards=(*own, *([] if config.environment is None else [ENVIRONMENT])),
        accuracy=config.accuracy,
        evaluations=judges_of(config),
        staleness=config.trainer.staleness,
        partial=config.sampler.partial is not None,
    )


def judges_of(config: Config) -> dict[str, str]:
    """The component that tells right from wrong, for each evaluation set that has a name."""
    return {name: each.judge for name, each in config.evaluations.items() if name}


def fault_of(label: str, error: Exception) -> str:
    """A sentence on a monitor that is left out."""
    return f"monitor {label} is left out: {first_line(error)}"


def _named(config: Config) -> list[MonitorSpec]:
    return [spec for spec in config.monitors if spec.name != EVERY]


def _others(config: Config) -> list[PluginInfo]:
    """The installed monitors that the config means by ``all`` and does not name, the first one of a name."""
    if not any(spec.name == EVERY for spec in config.monitors):
        return []
    named = {name for spec in _named(config) for name in (spec.name, spec.label)}
    found = [info for info in registry.list_plugins() if info.kind == "monitor"]
    others = [info for info in found if not {info.name, _long_name(info)} & named]
    return list({info.name: info for info in reversed(others)}.values())[::-1]


def _long_name(info: PluginInfo) -> str:
    return f"{info.distribution}:{info.name}"


def _recorded_groups(files: Mapping[int, Path], step: int) -> Sequence[CreditedGroup]:
    """The groups of a step, as its file tells."""
    return [group.credited for group in read_step(files[step]).groups] if step in files else []


def _known(groups: Sequence[CreditedGroup]) -> Callable[[], Sequence[CreditedGroup]]:
    return lambda: groups


def _trained_keys(groups: Sequence[CreditedGroup]) -> frozenset[GroupKey]:
    return frozenset(group.key for group in groups if group.trained)
