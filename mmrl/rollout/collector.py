"""Scored rollouts from prompts: sample, score groups while others are still generated, replace rejected groups."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from mmrl.config.evaluation_names import metric_of
from mmrl.config.evaluations import EvaluationSet
from mmrl.config.sections import Config
from mmrl.data.order import request_seed
from mmrl.engine_api import Sampler, SamplingRequest
from mmrl.errors import ConfigError, plugin_errors
from mmrl.interfaces import Algorithm, Needs
from mmrl.interfaces.views import members_of_views
from mmrl.ops import metrics
from mmrl.rollout.batch import (
    SampledStep,
    batch_of,
    own_rollouts_of,
    own_rows,
    rollouts_of,
    weights_of,
    with_greedy,
)
from mmrl.rollout.episodes.branching import Branching
from mmrl.rollout.episodes.failures import CallTally
from mmrl.rollout.episodes.player import EpisodePlayer
from mmrl.rollout.experience import Memory
from mmrl.rollout.rewards.failures import Failure, Failures
from mmrl.rollout.rewards.scorer import Scorer
from mmrl.rollout.scores import GroupScores, Keep
from mmrl.rollout.view_sampling import sampled_groups
from mmrl.system.clock import Clock
from mmrl.types import GIVEN, Batch, EncodedPrompt, Rollout, RolloutGroup, Sample, ScoredGroup


class VersionProbe(Protocol):
    """The part of ``SyncProbe`` that is needed here."""

    def ask_sampler(self, sampler: Sampler, version: int | None) -> dict[str, float]: ...


class SamplingEngine(Protocol):
    """The part of ``Engine`` that is needed here."""

    def sampling(self, version: int | None = None) -> AbstractContextManager[Sampler]: ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        groups: One for each prompt that can be used, in the order of the rows.
        failures: Rollouts that a reward failed on.
        metrics: See ``metrics.evaluation_metrics``; means over all groups.
    """

    groups: Sequence[ScoredGroup]
    failures: Sequence[Failure]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Sampling:
    """A sampler, and what is counted while it samples for one step or evaluation.

    Attributes:
        calls: The environment's; None without one.
        probed: Metrics of the probe of its weights.
    """

    sampler: Sampler
    clock: Clock
    failures: Failures
    calls: CallTally | None
    probed: Mapping[str, float] = field(default_factory=dict)


class Collector:
    """Brings engine, environment and scorer together.

    Args:
        progress: Called with a phase, the count so far and the total.
        penalties: Names of the components that are penalties.
        event: Called with a kind and fields for each rollout that a reward failed on, and for each episode that the
            environment failed in.
        player: Plays the episodes; None samples completions.

    Attributes:
        generated: Groups sampled since ``training_groups`` was last called, scored or not; without greedy rollouts.
            The order of one round is that of its prompts once it is over.
        probe: Asked by the sampler of each step's groups, before they are sampled; None asks nothing.
        shown: The demonstration of a prompt, which is one more member of each group; None adds none.
    """

    def __init__(
        self,
        config: Config,
        engine: SamplingEngine,
        scorer: Scorer,
        progress: Callable[[str, int, int], None],
        penalties: frozenset[str] = frozenset(),
        *,
        event: Callable[..., None],
        player: EpisodePlayer | None = None,
    ) -> None:
        self._config, self._engine, self._player = config, engine, player
        self._scorer, self._progress, self.penalties, self._event = scorer, progress, penalties, event
        self.generated: list[RolloutGroup] = []
        self.probe: VersionProbe | None = None
        self.shown: Callable[[EncodedPrompt], Sample] | None = None

    def training_groups(
        self,
        step: int,
        algorithm: Algorithm,
        draw: Callable[[int], Sequence[tuple[int, EncodedPrompt]]],
        wanted: int,
        clock: Clock,
        version: int | None = None,
        *,
        again: Callable[[ScoredGroup], EncodedPrompt | None] = lambda group: None,
        memory: Memory | None = None,
    ) -> SampledStep:
        """Groups for the algorithm; if it selects, another group replaces each one that it rejects.

        Args:
            draw: The next so many prompts, each with the epoch that it is drawn in.
            wanted: Groups to keep; there are fewer if the rounds do not suffice.
            version: The version of the weights to sample with; None is the newest.
            again: The prompt to sample in place of a rejected group; None for the next one that is drawn.
            memory: Gives groups rollouts of earlier ones, and keeps some of theirs; None does neither.

        Raises:
            PluginError: A hook of the algorithm or a reward fails, or a reward or the environment fails too often.
        """
        self.generated = []
        needs = algorithm.needs()
        max_rounds = 1 + (needs.refill.max_rounds if needs.refill else 0)
        groups, left, retried = list[ScoredGroup](), wanted, list[EncodedPrompt]()
        with self._sampling(clock, version, self.probe) as sampling:
            for number in range(max_rounds):
                if left <= 0:
                    break
                with clock.phase("prompts"):
                    drawn = draw(left - len(retried)) if left > len(retried) else ()
                    prompts = [*retried, *(replace(prompt, epoch=epoch) for epoch, prompt in drawn)]
                found = self._round(sampling, prompts, needs, Branching.of(algorithm, len(prompts)))
                with clock.phase("credit"):
                    found = found if memory is None else memory.exchanged(found)
                    kept = select(algorithm, found) if needs.refill else [True] * len(found)
                    rejected = itertools.compress(found, map(operator.not_, kept)) if number + 1 < max_rounds else ()
                    retried = [prompt for group in rejected if (prompt := again(group)) is not None]
                pairs = enumerate(zip(found, kept, strict=True))
                groups += [replace(scored, kept=keep, place=(number, place)) for place, (scored, keep) in pairs]
                left -= sum(kept)
        gathered = self._gathered(step, groups, sampling)
        return replace(gathered, learned=gathered.kept)

    def evaluate(
        self,
        prompts: Sequence[EncodedPrompt],
        how: EvaluationSet,
        *,
        known: Mapping[str, ScoredGroup] | None = None,
        keep: Keep | None = None,
    ) -> Evaluation:
        """Sample completions of at least one prompt, and score them.

        Args:
            how: The set that they are of, and its way to sample and to judge.
            known: Groups that were sampled and scored before, by prompt id.
            keep: Called with each other group as soon as it is scored, and with the failures of rewards on it.

        Raises:
            ConfigError: The reward that tells right from wrong scores none of them.
            PluginError: A reward fails, or a reward or the environment fails too often.
        """
        known = {} if known is None else known
        left = [prompt for prompt in prompts if prompt.id not in known]
        namespace = metric_of(how.name, "")
        requests = [
            self._request(prompt, namespace, how.num_samples, how.temperature, how.max_new_tokens) for prompt in left
        ]
        found: Sequence[ScoredGroup] = ()
        failures, calls = Failures(), None
        if requests:
            with self._sampling(Clock()) as sampling:
                failures, calls = sampling.failures, sampling.calls
                failures.expect(how.num_samples * (len(prompts) - len(left)))
                found = self._generate_and_score(sampling, requests, namespace, keep)
        groups = {**known, **{group.group.prompt.id: group for group in found}}
        ordered = [groups[prompt.id] for prompt in prompts]
        batch = self.batch(ordered)
        _check_accuracy(batch, how)
        values = evaluation_metrics(batch, how) | metrics.failure_metrics("eval", failures.fractions(self._rewards))
        episodes = metrics.episode_metrics(rollouts_of(ordered), None if calls is None else calls.failed_fraction)
        values |= {f"eval/{name}": value for name, value in episodes.items()}
        return Evaluation(ordered, failures.since(0), values)

    def close(self) -> None:
        """Give back what is kept between steps."""
        return

    def batch(self, groups: Sequence[ScoredGroup]) -> Batch:
        """The groups' rollouts as one batch, without learner log-probs yet."""
        return batch_of(groups, weights_of(self._config), self.penalties)

    def _gathered(self, step: int, groups: Sequence[ScoredGroup], sampling: Sampling) -> SampledStep:
        """A step's groups with the metrics of their gathering."""
        failed_calls = None if sampling.calls is None else sampling.calls.failed_fraction
        stats = metrics.failure_metrics("reward", sampling.failures.fractions(self._rewards))
        stats |= metrics.episode_metrics(own_rollouts_of(groups), failed_calls) | dict(sampling.probed)
        own = own_rollouts_of(groups) or rollouts_of(groups)
        return SampledStep(step, own[0].weight_version, groups, stats)

    @property
    def _rewards(self) -> list[str]:
        return list(dict.fromkeys(spec.metric for spec in self._config.rewards))

    def _round(
        self,
        sampling: Sampling,
        prompts: Sequence[EncodedPrompt],
        needs: Needs,
        branching: Branching | None,
    ) -> list[ScoredGroup]:
        """One scored group for each prompt, in that order, each with its greedy rollout if that is wanted."""
        size, temperature = self._config.sampler.group_size, self._config.sampler.temperature
        requests = [self._request(prompt, "", size, temperature) for prompt in prompts]
        members = members_of_views(needs.views, size)
        if not needs.greedy_rollout:
            needed = needs.rewards
            return self._generate_and_score(sampling, requests, members=members, branching=branching, needed=needed)
        # In the same call, so that both share the batch and the prompt's cached prefix.
        requests += [self._request(prompt, "greedy/", 1, 0.0) for prompt in prompts]
        count, needed = len(prompts), needs.rewards
        scored = self._generate_and_score(
            sampling, requests, num_groups=count, members=members, branching=branching, needed=needed
        )
        return [with_greedy(*pair) for pair in zip(scored[: len(prompts)], scored[len(prompts) :], strict=True)]

    def _request(
        self, prompt: EncodedPrompt, namespace: str, num_samples: int, temperature: float, most: int | None = None
    ) -> SamplingRequest:
        """A prompt's request; ``namespace`` keeps seeds of evaluation and greedy rollouts apart from training's.

        Args:
            most: Longest completion; None is that of training.
        """
        again = f"retry {prompt.prompt.retries}/" if prompt.prompt.retries else ""
        seed = request_seed(self._config.trainer.seed, prompt.epoch, again + namespace + prompt.id, 0)
        return SamplingRequest(prompt, num_samples, temperature, most or self._config.sampler.max_new_tokens, seed)

    def _environment_seed(self, prompt: EncodedPrompt, namespace: str = "") -> int:
        return request_seed(self._config.trainer.seed, prompt.epoch, f"{namespace}environment/{prompt.id}", 0)

    @contextmanager
    def _sampling(
        self, clock: Clock, version: int | None = None, probe: VersionProbe | None = None
    ) -> Iterator[Sampling]:
        """A sampler with weights of a version, which are probed before they sample."""
        with ExitStack() as stack:
            with clock.phase("sync"):
                sampler = stack.enter_context(self._engine.sampling(version))
                probed = {} if probe is None else probe.ask_sampler(sampler, version)
            calls = None if self._player is None else self._player.tally()
            sampling = Sampling(sampler, clock, Failures(), calls, probed)
            yield sampling
            if sampling.calls is not None:
                sampling.calls.finish()

    @contextmanager
    def _groups(
        self,
        sampling: Sampling,
        requests: Sequence[SamplingRequest],
        namespace: str,
        members: Mapping[str, int],
        num_groups: int,
        branching: Branching | None,
    ) -> Iterator[Iterator[tuple[int, RolloutGroup]]]:
        """Groups as they finish: completions, or episodes.

        Episodes of a prompt have environments of one seed, the greedy one's too; ``namespace`` keeps evaluation apart.
        """
        if self._player is None:
            sampler = sampling.sampler
            yield sampled_groups(sampler, requests, members, num_groups) if members else sampler.generate(requests)
            return
        assert sampling.calls is not None
        prompts = [request.prompt for request in requests]
        seeds = [self._environment_seed(prompt, namespace) for prompt in prompts]
        played = self._player.play(
            sampling.sampler, requests, seeds, sampling.calls, sampling.clock, self._event, branching
        )
        with closing(played):
            yield played

    def _generate_and_score(
        self,
        sampling: Sampling,
        requests: Sequence[SamplingRequest],
        namespace: str = "",
        keep: Keep | None = None,
        *,
        num_groups: int | None = None,
        members: Mapping[str, int] = MappingProxyType({}),
        branching: Branching | None = None,
        needed: bool = True,
    ) -> list[ScoredGroup]:
        """Scored groups in the order of their requests; those from ``num_groups`` on are greedy rollouts of others.

        Args:
            members: Rollouts of each group by the view that they are sampled from.
            branching: How episodes go on from others.
            needed: As of ``Scorer.submit``.
        """
        num_groups = len(requests) if num_groups is None else num_groups
        clock, generated, before = sampling.clock, dict[int, RolloutGroup](), list(self.generated)
        sampling.failures.expect(sum(request.num_samples for request in requests))
        scores = self._scores(sampling, keep, needed=needed)
        with scores.telling():
            try:
                groups = self._groups(sampling, requests, namespace, members, num_groups, branching)
                with clock.phase("generate"), groups as found:
                    for index, group in found:
                        clock.count("generate", sum(len(r.token_ids) - r.num_shared for r in group.rollouts))
                        if index < num_groups:
                            group = group if namespace else self._with_shown(group, sampling.failures)
                            generated[index] = group
                            self.generated.append(group)
                        else:  # cannot be recorded without its group
                            group = replace(group, rollouts=tuple(replace(e, greedy=True) for e in group.rollouts))
                        scores.add(index, group)
                        self._progress("generate", len(scores), len(requests))
                        scores.keep_done()
                with clock.phase("score"):
                    return [scores.result(index) for index in range(len(requests))]
            finally:
                self.generated = [*before, *(generated[index] for index in sorted(generated))]

    def _with_shown(self, group: RolloutGroup, failures: Failures) -> RolloutGroup:
        """A sampled group of training with its prompt's demonstration, if groups have one."""
        if self.shown is None:
            return group
        failures.expect(1)
        sample, text = self.shown(group.prompt), group.prompt.prompt.demonstration or ""
        given = Rollout(group.prompt, sample.segments, len(group.rollouts), text, "stop", GIVEN)
        return replace(group, rollouts=(*group.rollouts, given))

    def _scores(self, sampling: Sampling, keep: Keep | None = None, *, needed: bool) -> GroupScores[Any]:
        return GroupScores(self._config, self._scorer, sampling.failures, self._event, keep=keep, needed=needed)


def evaluation_metrics(batch: Batch, how: EvaluationSet) -> dict[str, float]:
    """``eval/*`` metrics of some rollouts, without the shares that rewards failed on."""
    values = metrics.evaluation_metrics(batch.rewards, batch.valid, batch.components, how.judge)
    lengths = metrics.length_metrics(batch.masks, batch.truncated)
    return values | {f"eval/{key}": value for key, value in lengths.items()}


def _check_accuracy(batch: Batch, how: EvaluationSet) -> None:
    """Raise ConfigError if what tells right from wrong scores none of the rollouts."""
    if not batch.valid.any() or not np.isnan(batch.component(how.judge)).all():
        return
    where = "trainer.eval_metric" if not how.name else f"{how.key}.metric or trainer.eval_metric"
    if how.judge not in batch.components:
        raise ConfigError(
            f"no reward answers a component {how.judge!r}, by which {how.accuracy_metric} is to judge",
            where=where,
            possible=", ".join(batch.components),
        )
    raise ConfigError(
        f"reward {how.judge!r}, by which {how.accuracy_metric} judges, scores no row of {how.key}",
        where=f"{where}, rewards[].sources",
        remedy="name a reward that does, or add the source of these rows to its sources",
    )


def step_metrics(found: SampledStep, batch: Batch, accuracy_of: str | None, *, refills: bool) -> dict[str, float]:
    """Metrics of all groups of a step; rewards and rounds are those of what was sampled.

    Args:
        batch: The same groups.
        accuracy_of: The reward component that tells right from wrong; see ``judge_of``.
        refills: True if the algorithm may reject groups.
    """
    batch = own_rows(batch)
    values = metrics.length_metrics(batch.masks, batch.truncated) | metrics.view_metrics(batch, found.with_views)
    if found.is_given:
        return {**values, **found.stats}
    scored = {} if accuracy_of is None else metrics.reward_metrics(batch, accuracy_of)
    values = {**values, **scored, **found.stats}
    return values | (metrics.refill_metrics([group.kept for group in found.groups], found.rounds) if refills else {})


def judge_of(config: Config, needs: Needs, batch: Batch) -> str | None:
    """The reward component that tells right from wrong in a batch; None if nothing had to score it, and nothing did."""
    scored = needs.rewards or any(not np.isnan(values).all() for values in batch.components.values())
    return config.accuracy if scored else None


def select(algorithm: Algorithm, groups: Sequence[ScoredGroup]) -> list[bool]:
    """True for each group that the algorithm keeps.

    Raises:
        PluginError: It raised, or answered anything but one bool for each group.
    """
    with plugin_errors(algorithm, "select"):
        answer = list(algorithm.select(groups))
        if len(answer) != len(groups) or not all(isinstance(kept, bool | np.bool_) for kept in answer):
            raise ValueError(f"{len(groups)} groups need one bool each, not {answer!r:.200}")
    return [bool(kept) for kept in answer]
