"""The rows of one step as the learner would pack them, from a sample of the prompts and assumed completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np

from mmrl.config import Config
from mmrl.ops.cost import NOTHING, ModelShape, Work
from mmrl.ops.packing import Item, Unit, balance, plan_microbatches, units_of
from mmrl.updating import minibatches


@dataclass(frozen=True, slots=True)
class Example:
    """What a prompt of the data takes.

    Attributes:
        prompt_tokens: Those of its images included.
        completion_tokens: Of one completion.
        grids: Temporal, vertical and horizontal patches of each image.
    """

    prompt_tokens: int
    completion_tokens: int
    grids: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """A step's optimizer steps.

    Attributes:
        rows: Of the first optimizer step, the micro-batches of each rank.
        updates: Optimizer steps in a step.
    """

    rows: Sequence[Sequence[Work]]
    updates: int

    @property
    def microbatches(self) -> int:
        """In one optimizer step: ranks wait for the one that has most."""
        return max(map(len, self.rows))

    @property
    def total(self) -> Work:
        """Of one optimizer step, all ranks together."""
        return reduce(add, (row for rank in self.rows for row in rank), NOTHING)


def workload(
    config: Config, shape: ModelShape, examples: Sequence[Example], *, group_size: int, share: bool
) -> Workload:
    """The micro-batches of a step of these examples, one after the other and then again.

    Args:
        group_size: Completions of a prompt.
        share: Whether completions share their prompt in a row.
    """
    learner, prompts = config.learner, config.trainer.prompts_per_step
    group_ids = np.repeat(np.arange(prompts), group_size)
    parts = list(minibatches(group_ids, learner.minibatches, learner.epochs, (config.trainer.seed, 1)))
    # Of all members of a step, those of the first optimizer step by their prompts.
    members: dict[int, int] = {}
    for index in parts[0]:
        members[index // group_size] = members.get(index // group_size, 0) + 1
    numbers = list(members)
    chosen = [examples[number % len(examples)] for number in numbers]
    costs = [
        example.prompt_tokens * (1 if share else members[number]) + members[number] * example.completion_tokens
        for number, example in zip(numbers, chosen, strict=True)
    ]
    rows = []
    for places in balance(costs, config.cluster.ranks):
        keys = [place for place in places for _ in range(members[numbers[place]])]
        items = [Item(place, chosen[place].prompt_tokens, chosen[place].completion_tokens) for place in keys]
        units = units_of(items, learner.tokens_per_microbatch, share=share)
        packed = plan_microbatches(units, learner.tokens_per_microbatch, lambda unit: unit.tokens)
        rows.append([_work(shape, row, keys, chosen, share) for row in packed])
    return Workload(rows, len(parts))


def _work(shape: ModelShape, row: Sequence[Unit], keys: Sequence[int], chosen: Sequence[Example], share: bool) -> Work:
    """Of one row; what is shared goes through the tower once."""
    places = [keys[unit.indices[0]] for unit in row]
    places = list(dict.fromkeys(places)) if share else places
    return shape.work(
        tokens=sum(unit.tokens for unit in row),
        pairs=sum(unit.pairs for unit in row),
        predicted=sum(length + 1 for unit in row for length in unit.completions),
        images=[grid for place in places for grid in chosen[place].grids] if shape.tower is not None else (),
    )
