"""``mmrl replay``: finished steps of a run once more, as they were, or with other rewards or another algorithm."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from mmrl.commands.replay.comparison import (
    Explanations,
    advantage_change,
    advantage_part,
    agree,
    close,
    is_function,
    logprob_part,
    metric_parts,
    reward_part,
    selection_part,
    update_part,
)
from mmrl.commands.replay.report import StepReport, WhatIf
from mmrl.commands.replay.rerun import Rerun, Rules, rerun
from mmrl.config.load import load_config
from mmrl.config.sections import Config, Kind, PluginSpec
from mmrl.errors import ConfigError, DataError
from mmrl.plugin_host import registry
from mmrl.rollout.collector import with_greedy
from mmrl.rollout.records import RecordedStep, read_step
from mmrl.rollout.rewards.failures import Failures
from mmrl.rollout.rewards.scorer import Scorer
from mmrl.runs.directory import metrics_of, read_ledger, read_records
from mmrl.runs.resumption import Change, changed_config, plain_config
from mmrl.runs.setup import RunSetup
from mmrl.system.redaction import remember_secrets
from mmrl.system.version import __version__
from mmrl.types import ScoredGroup

REPLAYED = ("rewards", "algorithm", "trainer.eval_metric")
"""Parts of the config that a what-if may change: what decides about a step after its rollouts were sampled."""


@dataclass(frozen=True)
class RecordedRun:
    """A run's folder, as far as it tells of its steps; nothing in it is changed, and the run may go on meanwhile.

    Attributes:
        config: Of config.yaml.
    """

    path: Path
    config: Config

    @classmethod
    def open(cls, path: Path) -> RecordedRun:
        """The run in that folder.

        Raises:
            ConfigError: There is none.
            DataError: It has recorded no rollouts.
        """
        path = path.expanduser()
        if path.absolute().parent.name == "checkpoints":
            what, run_dir = "this is a checkpoint, and has no rollouts", path.absolute().parent.parent
            raise ConfigError(what, where=str(path), remedy=f"give its run, {run_dir}, and --step")
        if not (path / "config.yaml").is_file():
            what = "this is no run: it has no config.yaml"
            raise ConfigError(what, where=str(path), remedy="give the folder that trainer.run_dir named")
        run = cls(path, _load(path))
        if not run.steps:
            is_supervised = not run.setup(run.config).source.samples
            raise DataError(
                "the run has recorded no rollouts" + (": it learns from demonstrations" if is_supervised else ""),
                where=str(path / "rollouts"),
                remedy="give a run that has sampled",
            )
        return run

    @property
    def steps(self) -> list[int]:
        """Steps whose rollouts are there."""
        names = [re.fullmatch(r"step-(\d+)", file.stem) for file in (self.path / "rollouts").glob("step-*.jsonl")]
        return sorted(int(name[1]) for name in names if name)

    def choose(self, wanted: Sequence[str]) -> list[int]:
        """The steps that words such as ``7`` or ``3-5`` name; without any, the newest that was finished and not undone.

        Raises:
            ConfigError: They are not there.
        """
        known = self.steps
        if not wanted:
            return [step for step in known if self.metrics(step) and not self.undone(step)][-1:] or known[-1:]
        chosen = set[int]()
        for word in wanted:
            bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
            first = int(bounds[1]) if bounds else -1
            last = int(bounds[2] or first) if bounds else -1
            found = {step for step in known if first <= step <= last}
            if not found:
                what = f"there is no record of step {word}" if bounds else f"--step cannot be {word!r}"
                raise ConfigError(what, where=str(self.path / "rollouts"), possible=f"{_ranges(known)}, or A-B")
            chosen |= found
        return sorted(chosen)

    def read(self, step: int) -> RecordedStep:
        """The record of a step.

        Raises:
            DataError: It is damaged.
        """
        return read_step(self.path / "rollouts" / f"step-{step:06d}.jsonl")

    def metrics(self, step: int) -> dict[str, Any] | None:
        """The step's line in metrics.jsonl, the last one of several."""
        return self._lines.get(step)

    def undone(self, step: int) -> str | None:
        """What has undone the step as metrics.jsonl has it: a later attempt that went on from before it."""
        attempt = (self.metrics(step) or {}).get("attempt")
        if attempt is None:
            return None
        for number, begin in self._attempts:
            if number > attempt and (begin or 0) < step:
                where = "began from nothing" if begin is None else f"went on from step {begin}"
                return f"step {step} was undone by attempt {number}, which {where}"
        return None

    @cached_property
    def _lines(self) -> dict[int, dict[str, Any]]:
        return {line["step"]: line for line in read_records(self.path / "metrics.jsonl") if "step" in line}

    @cached_property
    def _attempts(self) -> list[tuple[int, int | None]]:
        """Of each attempt, in order, the step that it began from."""
        begun = [each for each in read_records(self.path / "attempts.jsonl") if "resumed_from" in each]
        return [(each.get("attempt", 0), each["resumed_from"]) for each in begun]

    def setup(self, config: Config) -> RunSetup:
        return RunSetup(config, self.path / "media")

    def failures(self) -> dict[tuple[int, str, int, str], str]:
        """By epoch, prompt id, member and reward: how it failed, as events.jsonl tells."""
        keys = ("prompt", "member", "reward", "cause")
        events = [each for each in read_records(self.path / "events.jsonl") if each.get("kind") == "reward_failed"]
        return {
            (each.get("epoch", 0), each["prompt"], each["member"], each["reward"]): each["cause"]
            for each in events
            if all(key in each for key in keys)
        }

    def changes_since(self, attempt: int) -> list[str]:
        """What attempts after this one have changed in the config."""
        later = [each for each in read_records(self.path / "attempts.jsonl") if each.get("attempt", 0) > attempt]
        return [str(change) for each in later for change in each.get("changes", ())]

    def other_versions(self, config: Config) -> dict[str, list[str]]:
        """Of the algorithm (under its kind) and each reward (by its component): what is installed in another version.

        An empty name stands for mmrl itself, and environment.json for itself if it tells nothing.
        """
        try:
            then = json.loads((self.path / "environment.json").read_text())
            plugins = {(each["kind"], each["name"]): each["version"] for each in then["plugins"]}
        except (OSError, ValueError, KeyError, TypeError):  # it is only to explain what differs
            return {"environment.json": ["it cannot be read, so nothing is known of the versions that the run had"]}
        found: dict[str, list[str]] = {}
        if then.get("mmrl") != __version__:
            found[""] = [f"mmrl was {then.get('mmrl')}, and is {__version__}"]
        named = [("algorithm", config.algorithm.name, "algorithm")]
        named += [("reward", spec.name, spec.metric) for spec in config.rewards]
        for kind, name, key in named:
            now, before = (
                registry.locate("reward" if kind == "reward" else "algorithm", name),
                plugins.get((kind, name)),
            )
            if before is not None and before != now.version:
                where = "its file" if now.distribution == "file" else now.distribution
                found.setdefault(key, []).append(f"{where} was {before}, and is {now.version}")
        return found


def replay(
    run: RecordedRun, steps: Sequence[int], files: Sequence[Path] = (), overrides: Sequence[str] = ()
) -> Iterator[StepReport]:
    """A report of each step.

    Args:
        files: Configs over the run's: their rewards and algorithm make it a what-if.
        overrides: Likewise, as on the command line.

    Raises:
        ConfigError: They change what no record can answer, or do not fit.
        DataError: A record is damaged, or lacks what another algorithm needs.
        PluginError: A plugin cannot be had, or fails.
    """
    config, changes, notes = run.config, list[Change](), list[str]()
    is_what_if = bool(files or overrides)
    if is_what_if:
        config, changes, notes = _changed(run, files, overrides)
    setup = run.setup(config)
    if not setup.source.samples:
        raise ConfigError(
            "an algorithm that learns from demonstrations makes nothing of rollouts",
            where=f"algorithm: {config.algorithm.name}",
            remedy="choose one that samples",
        )
    notes += setup.warnings if is_what_if else []
    with Scorer(config.rewards) as scorer:
        for step in steps:
            player = _Player(run, step, config, setup.penalties, scorer)
            if is_what_if:
                what_if = player.what_if([str(change) for change in changes])
                yield StepReport(str(run.path), step, player.num_rollouts, [], [], [*notes, *player.notes], what_if)
            else:
                yield player.verify()


class _Player:
    """One step.

    Attributes:
        notes: What cannot be known, or was not looked at.
    """

    def __init__(self, run: RecordedRun, step: int, config: Config, penalties: frozenset[str], scorer: Scorer) -> None:
        self._run, self._step, self._config, self._penalties = run, step, config, penalties
        self._record, line = run.read(step), run.metrics(step)
        self._attempt = line.get("attempt", 0) if line else 0
        self._is_over = line is not None and run.undone(step) is None
        self._metrics: Mapping[str, float | None] = metrics_of(line)
        self._scorer, self._failures = scorer, Failures(bounded=False)
        self.notes = [] if line else ["metrics.jsonl has no such step: it was not finished"]
        self.notes += filter(None, [run.undone(step)])
        self._now = self._score(self._record)

    @property
    def num_rollouts(self) -> int:
        return sum(len(group.rollouts) for group in self._record.groups)

    def verify(self) -> StepReport:
        """The step as it was."""
        recorded = [group.credited.scored for group in self._record.groups]
        versions = self._run.other_versions(self._config)
        rewards = reward_part(self._record, self._now, self._explanations(versions))
        parts, what_if = [rewards], None
        try:
            result = self._rerun(recorded, reselect=False)
        except DataError as error:
            self.notes.append(str(error))
        else:
            parts += [selection_part(self._record, result), advantage_part(self._record, result)]
            ledger = [each["samples"] for each in read_ledger(self._run.path) if each["step"] == self._step]
            parts.append(update_part(result, ledger))
            if self._metrics:
                parts += [*metric_parts(result, self._metrics), logprob_part(self._record, self._metrics)]
            groups = [group.credited for group in self._record.groups]
            is_rejected = result.refills and not any(group.scored.kept for group in groups)
            if not (self._is_over or is_rejected or any(group.trained for group in groups)):
                self.notes.append("the step ended before anything was trained")
            if result.learner.unknown:
                self.notes.append(f"not on record, so not compared: {', '.join(sorted(result.learner.unknown))}")
        if rewards.differences:
            what_if = self.what_if(["the rewards as they are now"])
        reasons = [] if all(not part.differences for part in parts) else self._reasons(versions)
        return StepReport(str(self._run.path), self._step, self.num_rollouts, parts, reasons, self.notes, what_if)

    def what_if(self, changes: Sequence[str]) -> WhatIf:
        """What would have become of the step.

        Raises:
            DataError: The algorithm needs what was not recorded.
        """
        result = self._rerun(self._now, reselect=True)
        shared = {spec.metric for spec in self._config.rewards} == {spec.metric for spec in self._run.config.rewards}
        rewards = reward_part(self._record, self._now, totals_only=not shared)
        unknown = result.learner.unknown
        metrics = {name: value for name, value in result.metrics.items() if name not in unknown}
        self.notes += _unknowable(result)
        if not result.groups:
            self.notes.append("it would have had nothing to train on")
        if self._record.state and not self._is_same_algorithm:
            self.notes.append("the algorithm's state before the step is that of a new run, not the run's")
        names, was = {*self._metrics, *metrics}, self._metrics
        moved = frozenset(name for name in names if not agree(result, name, was.get(name), metrics.get(name)))
        return WhatIf(changes, rewards, was, metrics, moved, advantage_change(self._record, result))

    @property
    def _is_same_algorithm(self) -> bool:
        """Whether it has the run's options too: a state may hold what follows from them."""
        return self._config.algorithm == self._run.config.algorithm

    def _rerun(self, scored: Sequence[ScoredGroup], *, reselect: bool) -> Rerun:
        rules = Rules(self._config, self._penalties, self._record.state if self._is_same_algorithm else {})
        beside = {
            name: math.nan if value is None else value
            for name, value in self._metrics.items()
            if not is_function(name) and not name.startswith("eval/")
        }
        return rerun(rules, self._step, self._record, scored, beside if self._metrics else None, reselect=reselect)

    def _score(self, record: RecordedStep, places: Sequence[int] | None = None) -> list[ScoredGroup]:
        """All groups, or some of them, scored now."""
        chosen = range(len(record.groups)) if places is None else places
        scored = [record.groups[place].credited.scored for place in chosen]
        under_way = [
            (
                self._scorer.submit(each.group, self._failures),
                each.greedy and self._scorer.submit(each.greedy.group, self._failures),
            )
            for each in scored
        ]
        return [
            with_greedy(scoring.result(), greedy.result()) if greedy else scoring.result()
            for scoring, greedy in under_way
        ]

    def _explanations(self, versions: Mapping[str, Sequence[str]]) -> Explanations:
        """Why rewards may differ: those that do are asked again."""
        pairs = list(zip(self._record.groups, self._now, strict=True))
        places = [place for place, (group, now) in enumerate(pairs) if not _same(group.credited.scored, now)]
        failed = {(each.rollout.key, each.reward): each.cause for each in self._failures.since(0)}
        unstable = {}
        for place, again in zip(places, self._score(self._record, places), strict=True):
            for first, second in _both(self._now[place], again):
                for name, values in first.components.items():
                    for member, rollout in enumerate(first.group.rollouts):
                        pair = float(values[member]), float(second.component(name)[member])
                        if not close(*pair):
                            unstable[rollout.key, name] = pair
        return Explanations(self._run.failures(), failed, unstable, versions)

    def _reasons(self, versions: Mapping[str, Sequence[str]]) -> list[str]:
        found = [f"{name or 'versions'}: {text}" for name, texts in versions.items() for text in texts]
        return [
            *found,
            *(f"config.yaml is of a later attempt: {each}" for each in self._run.changes_since(self._attempt)),
        ]


class _AsWritten(BaseModel):
    """Options of a plugin that no replay needs, which may not be installed here."""

    model_config = ConfigDict(extra="allow")


def _options(kind: Kind, plugin: PluginSpec) -> type[BaseModel]:
    return registry.options_class(kind, plugin) if kind in ("algorithm", "reward") else _AsWritten


def _load(path: Path, files: Sequence[Path] = (), overrides: Sequence[str] = ()) -> Config:
    config = load_config([path / "config.yaml", *files], overrides, options_class=_options).config
    remember_secrets(config.model_dump(mode="json"))
    return config


def _changed(
    run: RecordedRun, files: Sequence[Path], overrides: Sequence[str]
) -> tuple[Config, list[Change], list[str]]:
    """The run's config with other rewards and algorithm, what has changed, and what was left as it was.

    Raises:
        ConfigError: An override changes anything else.
    """
    other, before = _load(run.path, files, overrides), plain_config(run.config)
    changes = changed_config(before, plain_config(other))
    aside = [change for change in changes if not _is_replayed(change)]
    if overrides:
        only = changed_config(before, plain_config(_load(run.path, (), overrides))) if files else changes
        for change in only:
            if not _is_replayed(change):
                raise ConfigError(
                    f"no record can tell what {change.key} would have changed",
                    where=str(change),
                    possible=", ".join(REPLAYED),
                    remedy="what is sampled and how weights move needs the model: train",
                )
    notes = [f"not replayed: {change}" for change in aside]
    metric = run.config.trainer.model_copy(update={"eval_metric": other.trainer.eval_metric})
    config = run.config.model_copy(update={"rewards": other.rewards, "algorithm": other.algorithm, "trainer": metric})
    return config, [change for change in changes if _is_replayed(change)], notes


def _unknowable(result: Rerun) -> Iterator[str]:
    """What no record can tell of a what-if."""
    yield "completions are those of the recorded policy; in every later step another one would have sampled others"
    if result.refills:
        yield "groups that would have been sampled in place of rejected ones are not there"
    if len(result.updates) > 1:
        yield (
            "entropies, and log-probs of optimizer steps after the first, are those of when the run took the rollout in"
        )
    if result.left_out:
        yield f"{result.left_out} groups carried over, or sampled in place of rejected ones, would not have been there"
    if stood_in := result.learner.stood_in:
        yield f"{len(stood_in)} rollouts were in no loss: the sampler's log-probs stand in for the learner's"
    if unknown := result.learner.unknown:
        yield f"not on record: {', '.join(sorted(unknown))}"


def _is_replayed(change: Change) -> bool:
    return any(change.key == key or change.key.startswith(f"{key}.") for key in REPLAYED)


def _same(one: ScoredGroup, other: ScoredGroup) -> bool:
    """Whether all components agree."""
    return all(
        np.array_equal(values, second.components.get(name, np.zeros(0)), equal_nan=True)
        for first, second in _both(one, other)
        for name, values in first.components.items()
    )


def _both(one: ScoredGroup, other: ScoredGroup) -> Iterator[tuple[ScoredGroup, ScoredGroup]]:
    yield one, other
    if one.greedy is not None and other.greedy is not None:
        yield one.greedy, other.greedy


def _ranges(steps: Sequence[int]) -> str:
    """Such as ``1-4, 7``."""
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][-1] + 1:
            found[-1].append(step)
        else:
            found.append([step])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in found)
