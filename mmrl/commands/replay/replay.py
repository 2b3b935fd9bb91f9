"""``mmrl replay``: takes finished steps again, as they were, or with other rewards or another algorithm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from mmrl.commands.replay.branches import branch_part
from mmrl.commands.replay.comparison import (
    Explanations,
    advantage_change,
    advantage_part,
    agree,
    both_with_greedy,
    close,
    is_function,
    logprob_part,
    metric_parts,
    reward_part,
    selection_part,
    update_part,
)
from mmrl.commands.replay.environments import ReplayedEnvironment
from mmrl.commands.replay.recorded_run import RecordedRun, load_recorded
from mmrl.commands.replay.report import StepReport, WhatIf
from mmrl.commands.replay.rerun import Rerun, Rules, rerun
from mmrl.config.plugin_specs import PluginSpec
from mmrl.config.sections import Config
from mmrl.errors import ConfigError, DataError, plural
from mmrl.plugin_host import registry
from mmrl.rollout.batch import with_greedy
from mmrl.rollout.episodes.scoring import EpisodeScoring, score_episodes
from mmrl.rollout.records import RecordedStep
from mmrl.rollout.rewards.failures import Failures
from mmrl.rollout.rewards.scorer import Scorer, Scoring
from mmrl.runs.history import metrics_of, read_ledger
from mmrl.runs.resumption import Change, changed_config, plain_config
from mmrl.runs.run_warnings import config_warnings
from mmrl.runs.spans import last_tokens_of
from mmrl.types import ScoredGroup

REPLAYED = ("rewards", "algorithm", "environment.weights", "trainer.eval_metric")
"""Parts of the config that a what-if may change: they decide about a step after its rollouts were sampled."""


def replay(
    run: RecordedRun,
    steps: Sequence[int],
    files: Sequence[Path] = (),
    overrides: Sequence[str] = (),
    *,
    with_environment: bool = True,
) -> Iterator[StepReport]:
    """A report of each step.

    Args:
        with_environment: Play recorded turns again in the run's environment, unless for a what-if.
        files: Configs over the run's, for a what-if; their rewards and algorithm count.
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
    recorded, asked = (_groups_of(each.algorithm) for each in (run.config, config))
    if asked != recorded:
        raise ConfigError(
            f"the run's groups are {recorded}, and this algorithm learns from {asked}",
            where=f"algorithm: {config.algorithm.name}",
            remedy=f"choose one that learns from {recorded}",
        )
    setup = run.setup(config)
    needed = setup.algorithm.needs().rewards  # and it is checked against the config
    notes += config_warnings(setup) if is_what_if else []
    plays = with_environment and not is_what_if and config.environment is not None
    with ExitStack() as stack:
        scorer = stack.enter_context(Scorer(config.rewards, last_tokens=last_tokens_of(setup)))
        environment = stack.enter_context(ReplayedEnvironment(config)) if plays else None
        for step in steps:
            player = _Player(run, step, config, setup.penalties, scorer, environment, needed=needed)
            if is_what_if:
                what_if = player.what_if([str(change) for change in changes])
                yield StepReport(str(run.path), step, player.num_rollouts, [], [], [*notes, *player.notes], what_if)
            else:
                yield player.verify()


class _Player:
    """One step.

    Args:
        needed: True if completions have to be scored.

    Attributes:
        notes: Facts that are unknown, or were left out.
    """

    def __init__(
        self,
        run: RecordedRun,
        step: int,
        config: Config,
        penalties: frozenset[str],
        scorer: Scorer,
        environment: ReplayedEnvironment | None,
        *,
        needed: bool,
    ) -> None:
        self._needed = needed
        self._run, self._step, self._config, self._penalties = run, step, config, penalties
        self._environment = environment
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
        """Compare the step with its record."""
        recorded = [group.credited.scored for group in self._record.groups]
        versions = self._run.other_versions(self._config)
        rewards = reward_part(self._record, self._now, self._explanations(versions))
        parts, what_if = [rewards], None
        if self._environment is not None:
            parts.append(self._environment.part(self._record))
        try:
            result = self._rerun(recorded, reselect=False)
        except DataError as error:
            self.notes.append(str(error))
        else:
            parts += filter(None, [branch_part(self._record, self._rules.algorithm())])
            parts += [selection_part(self._record, result), advantage_part(self._record, result)]
            ledger = [each["samples"] for each in read_ledger(self._run.path, self._step)]
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
        """The step as it would have been.

        Raises:
            DataError: The algorithm needs what was not recorded.
        """
        result = self._rerun(self._now, reselect=True)
        shared = {spec.metric for spec in self._config.rewards} == {spec.metric for spec in self._run.config.rewards}
        rewards = reward_part(self._record, self._now, totals_only=not shared)
        unknown = result.learner.unknown
        metrics = {name: value for name, value in result.metrics.items() if name not in unknown}
        self.notes += _unknowable(self._record, result)
        if not result.groups:
            self.notes.append("it would have had nothing to train on")
        if self._record.state and not self._is_same_algorithm:
            self.notes.append("the algorithm's state before the step is that of a new run, not the run's")
        names, was = {*self._metrics, *metrics}, self._metrics
        moved = frozenset(name for name in names if not agree(result, name, was.get(name), metrics.get(name)))
        return WhatIf(changes, rewards, was, metrics, moved, advantage_change(self._record, result))

    @property
    def _is_same_algorithm(self) -> bool:
        """True if it has the run's options too: a state may depend on them."""
        return self._config.algorithm == self._run.config.algorithm

    @property
    def _rules(self) -> Rules:
        return Rules(self._config, self._penalties, self._record.state if self._is_same_algorithm else {})

    def _rerun(self, scored: Sequence[ScoredGroup], *, reselect: bool) -> Rerun:
        beside = {
            name: math.nan if value is None else value
            for name, value in self._metrics.items()
            if not is_function(name) and not name.startswith(("eval/", "eval_blank/", "monitor/"))
        }
        known = beside if self._metrics else None
        return rerun(self._rules, self._step, self._record, scored, known, reselect=reselect)

    def _score(self, record: RecordedStep, places: Sequence[int] | None = None) -> list[ScoredGroup]:
        """All groups, or some of them, scored now."""
        chosen = range(len(record.groups)) if places is None else places
        scored = [record.groups[place].credited.scored for place in chosen]
        under_way = [(self._submit(each), self._submit(each.greedy) if each.greedy else None) for each in scored]
        return [
            with_greedy(scoring.result(), greedy.result()) if greedy else scoring.result()
            for scoring, greedy in under_way
        ]

    def _submit(self, scored: ScoredGroup) -> Scoring | EpisodeScoring | Future[ScoredGroup]:
        """Score a group in the background; its environment's components are those on record.

        Nothing scores what nobody sampled.
        """
        environment, group = self._config.environment, scored.group
        if scored.is_given:
            known: Future[ScoredGroup] = Future()
            known.set_result(scored)
            return known
        if environment is None:
            return self._scorer.submit(group, self._failures, needed=self._needed)
        rewards, weights = self._config.rewards, environment.weights
        return score_episodes(self._scorer, rewards, weights, group, self._failures, needed=self._needed)

    def _explanations(self, versions: Mapping[str, Sequence[str]]) -> Explanations:
        """Why rewards may differ; a reward that does is asked again."""
        pairs = list(zip(self._record.groups, self._now, strict=True))
        places = [place for place, (group, now) in enumerate(pairs) if not _same(group.credited.scored, now)]
        failed = {(each.rollout.key, each.reward): each.cause for each in self._failures.since(0)}
        unstable = {}
        for place, again in zip(places, self._score(self._record, places), strict=True):
            for first, second in both_with_greedy(self._now[place], again):
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


def _changed(
    run: RecordedRun, files: Sequence[Path], overrides: Sequence[str]
) -> tuple[Config, list[Change], list[str]]:
    """The run's config with other rewards and algorithm, the changes, and notes on those left out."""
    other, before = load_recorded(run.path, files, overrides), plain_config(run.config)
    changes = changed_config(before, plain_config(other))
    aside = [change for change in changes if not _is_replayed(change)]
    if overrides:
        only = changed_config(before, plain_config(load_recorded(run.path, (), overrides))) if files else changes
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
    environment = run.config.environment
    if environment is not None and other.environment is not None:
        environment = environment.model_copy(update={"weights": other.environment.weights})
    parts = {"rewards": other.rewards, "algorithm": other.algorithm, "trainer": metric, "environment": environment}
    config = run.config.model_copy(update=parts)
    return config, [change for change in changes if _is_replayed(change)], notes


def _groups_of(algorithm: PluginSpec) -> str:
    """The noun for the groups that an algorithm learns from."""
    return registry.create("algorithm", algorithm).source


def _unknowable(record: RecordedStep, result: Rerun) -> Iterator[str]:
    """Notes on limits of a what-if."""
    if any(group.credited.scored.is_given for group in record.groups):
        yield "log-probs are the recorded policy's; later steps would have the same rows and another policy"
    else:
        yield "completions are those of the recorded policy; in every later step another one would have sampled others"
    if result.refills:
        yield "groups that would have been sampled in place of rejected ones are not there"
    if len(result.updates) > 1:
        yield (
            "entropies, and log-probs of optimizer steps after the first, are those of when the run took the rollout in"
        )
    if result.left_out:
        groups = plural(result.left_out, "group")
        yield f"{groups} carried over, or sampled in place of rejected ones, would not have been there"
    if stood_in := result.learner.stood_in:
        rollouts = plural(len(stood_in), "rollout")
        yield f"in no loss: {rollouts}, where the sampler's log-probs stand in for the learner's"
    if unknown := result.learner.unknown:
        yield f"not on record: {', '.join(sorted(unknown))}"


def _is_replayed(change: Change) -> bool:
    return any(change.key == key or change.key.startswith(f"{key}.") for key in REPLAYED)


def _same(one: ScoredGroup, other: ScoredGroup) -> bool:
    """True if all components agree."""
    return all(
        np.array_equal(values, second.components.get(name, np.zeros(0)), equal_nan=True)
        for first, second in both_with_greedy(one, other)
        for name, values in first.components.items()
    )
