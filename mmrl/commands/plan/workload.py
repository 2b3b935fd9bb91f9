"""The rows of one step as the learner would pack them, from a sample of the prompts and assumed completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np

from mmrl.config.sections import Config
from mmrl.interfaces import Needs
from mmrl.ops.cost import NOTHING, ModelShape, Work
from mmrl.ops.packing import Item, Unit, plan_microbatches, shares_of, units_of
from mmrl.ops.sequence import RowPart
from mmrl.step.learn import minibatches
from mmrl.types import ScoredGroup

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Example:
    """Sizes of one prompt of the data.

    Attributes:
        prompt_tokens: With those of its images.
        completion_tokens: Length of a completion, or of all that follows the prompt in an episode; of the longest where
            they differ.
        grids: Temporal, vertical and horizontal patches of each image.
        inserted_tokens: Tokens after the prompt that are not the policy's; they predict nothing.
        observed: Likewise of the images in an episode's observations, which no other episode shows.
        given: Lengths of the completions that the row has itself; none where all have ``completion_tokens``.
    """

    prompt_tokens: int
    completion_tokens: int
    grids: tuple[Grid, ...] = ()
    inserted_tokens: int = 0
    observed: tuple[Grid, ...] = ()
    given: tuple[int, ...] = ()

    def completions(self, count: int) -> tuple[int, ...]:
        """Lengths of the prompt's ``count`` completions."""
        return self.given or (self.completion_tokens,) * count


def given_example(group: ScoredGroup, grids: tuple[Grid, ...], most: int) -> Example:
    """The example of a row's own group.

    Args:
        grids: Those of the row's images.
        most: Completions that count, if there are more: the longest ones.
    """
    sample, *others = sorted(group.rollouts, key=lambda rollout: -rollout.num_tokens)[:most]
    given, inserted = tuple(len(each.token_ids) for each in (sample, *others)), int((~sample.mask).sum())
    tokens, begin = len(sample.prompt.token_ids), len(sample.prompt.images)
    return Example(tokens, given[0], grids[:begin], inserted, grids[begin:], given)


@dataclass(frozen=True, slots=True)
class Workload:
    """A step's optimizer steps.

    Attributes:
        rows: Micro-batches in the first optimizer step of each rank, or of each group of ranks that share its rows.
        updates: Optimizer steps in a step.
    """

    rows: Sequence[Sequence[RowPart]]
    updates: int

    @property
    def microbatches(self) -> int:
        """Most micro-batches of a rank in one optimizer step: the others wait for it."""
        return max(map(len, self.rows))

    @property
    def total(self) -> Work:
        """Work of one optimizer step on all ranks."""
        return reduce(add, (part.row for part in self.parts), NOTHING)

    @property
    def parts(self) -> list[RowPart]:
        """All micro-batches of one optimizer step, as the rank that has most of each sees it."""
        return [part for rows in self.rows for part in rows]


def group_size_of(config: Config, needs: Needs, *, samples: bool) -> int:
    """Members of a group; a demonstration beside completions is counted as one of them.

    Args:
        samples: True if the run samples its groups.
    """
    return config.sampler.group_size + needs.demonstration if samples else needs.min_group_size


def workload(
    config: Config, shape: ModelShape, examples: Sequence[Example], needs: Needs, *, group_size: int, share: bool
) -> Workload:
    """The micro-batches of a step of these examples, one after the other and then again.

    Args:
        needs: The algorithm's; a prompt with images is in the row in each view that it scores too.
        group_size: Completions of a prompt.
        share: True if completions share their prompt in a row.
    """
    learner, size = config.learner, config.learner.sequence_parallel_size
    budget = learner.tokens_per_microbatch * size
    group_ids = np.repeat(np.arange(config.trainer.prompts_per_step), group_size)
    seed, whole = (config.trainer.seed, 1), needs.whole_groups
    parts = list(minibatches(group_ids, learner.minibatches, learner.epochs, seed, whole=whole))
    samples = [_sample(examples, group_size, index) for index in parts[0]]

    def cost_in(samples: Sequence[_Sample]) -> Callable[[Unit], float]:
        return lambda unit: shape.forward_flops(_work(shape, [unit], samples, share))

    rows = []
    for units in shares_of(
        units_of(_items(samples, needs), share=share), config.cluster.num_learner_ranks // size, cost_in(samples)
    ):
        own = [samples[index] for unit in units for index in unit.indices]
        packed = plan_microbatches(units_of(_items(own, needs), budget, share=share), budget, cost_in(own))
        rows.append([_part(shape, row, own, share, size) for row in packed])
    return Workload(rows, len(parts))


_Sample = tuple[int, Example]
"""A prompt's number, and its example with the length of one completion."""


def _sample(examples: Sequence[Example], group_size: int, index: int) -> _Sample:
    """A completion of a step whose prompts are the examples, one after the other and then again."""
    prompt, member = divmod(index, group_size)
    example = examples[prompt % len(examples)]
    return prompt, replace(example, completion_tokens=example.completions(group_size)[member])


def _items(samples: Sequence[_Sample], needs: Needs) -> list[Item]:
    forms, whole = 1 + len(needs.scored_views), needs.whole_groups
    return [
        Item(n, each.prompt_tokens, each.completion_tokens, forms if each.grids else 1, n if whole else None)
        for n, each in samples
    ]


def _part(shape: ModelShape, row: Sequence[Unit], samples: Sequence[_Sample], share: bool, size: int) -> RowPart:
    """The part of a row of these samples that one of ``size`` ranks has, the one with most."""
    tower, grids = shape.tower, _grids(row, samples, share)
    images = [] if tower is None else [tower.work(grid) for grid in grids]
    return RowPart.of(_work(shape, row, samples, share), size, images)


def _grids(row: Sequence[Unit], samples: Sequence[_Sample], share: bool) -> list[Grid]:
    """Patches of the images of a row that go through the tower; those of a shared prompt do so once."""
    shown = [(samples[unit.indices[0]], unit.forms) for unit in row]
    seen = {number: (example, forms) for (number, example), forms in shown}.values()
    whole = seen if share else [(example, forms) for (_, example), forms in shown]
    grids = [grid for example, forms in whole for grid in list(example.grids) * forms]
    own = [samples[index][1] for unit in row for index in unit.indices]
    return grids + [grid for example in own for grid in example.observed]


def _work(shape: ModelShape, row: Sequence[Unit], samples: Sequence[_Sample], share: bool) -> Work:
    """Work of one row of these samples."""
    own = [(samples[index][1], unit.forms) for unit in row for index in unit.indices]
    return shape.work(
        tokens=sum(unit.tokens for unit in row),
        pairs=sum(unit.pairs for unit in row),
        local_pairs=lambda window: sum(unit.pairs_within(window) for unit in row),
        masked_pairs=sum(unit.masked_pairs for unit in row),
        predicted=sum(unit.predicted for unit in row) - sum(forms * example.inserted_tokens for example, forms in own),
        images=_grids(row, samples, share) if shape.tower is not None else (),
    )
