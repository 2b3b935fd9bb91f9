"""Rows that several ranks share, in a plan: what each of them holds, and images that are too large for one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmrl.commands.plan.workload import Grid
from mmrl.config.sections import Config, LearnerConfig
from mmrl.engine.footprint import PlannedModel
from mmrl.engine.memory_needs import changed, memory_changes
from mmrl.errors import ConfigError, ResourceError
from mmrl.ops.cost import Work
from mmrl.ops.sequence import RowPart, exchanged_numbers, repeated_heads
from mmrl.runs.budget import gigabytes


def check_gpus(learner: LearnerConfig, gpus: int, ranks: int) -> None:
    """See that the ranks that share a row divide those that learn.

    Args:
        gpus: The number that the plan is for.
        ranks: Those of them that learn.
    """
    size = learner.sequence_parallel_size
    if ranks % size:
        sizes = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        raise ConfigError(
            f"learner.sequence_parallel_size is {size}, which does not divide {ranks} ranks that learn",
            where=f"--gpus {gpus}",
            possible=f"learner.sequence_parallel_size: {sizes}",
            remedy=f"name a multiple of {size}, or set learner.sequence_parallel_size to one of these",
        )


def shared_rows(config: Config, model: PlannedModel, parts: Sequence[RowPart]) -> tuple[dict[str, Any], list[str]]:
    """The longest row, what one of its ranks has of it, and what they exchange, as data and as lines.

    Args:
        parts: Those of an optimizer step's rows.
    """
    size, shape = config.learner.sequence_parallel_size, model.shape
    longest = max(parts, key=lambda part: part.row.tokens)
    layer = model.width * longest.own.tokens * exchanged_numbers(shape, size)
    data = {
        "ranks": size,
        "longest_row": longest.row.tokens,
        "tokens_of_a_rank": longest.own.tokens,
        "patches_of_a_rank": max(part.own.patches for part in parts),
        "exchanged_per_layer": layer,
    }
    lines = [
        f"{size} ranks share each row: of the longest, {longest.row.tokens} tokens, each holds "
        f"{longest.own.tokens}; in a layer's forward pass each sends {gigabytes(layer)} to the others",
        *(f"repeated: {clause}" for clause in repeated_heads(shape, size)),
    ]
    if data["patches_of_a_rank"]:
        lines.append(f"images are divided among them, each whole: at most {data['patches_of_a_rank']} patches a rank")
    return data, lines


def oversized_image(
    config: Config, model: PlannedModel, grids: Sequence[Grid], memory: int, *, samples: bool
) -> ResourceError | None:
    """An error if the largest image is what is too much for a rank, with all settings that take less.

    Ranks that share a row divide its tokens, but each image goes through the tower on one of them.

    Args:
        grids: Patches of the images that were looked at.
        memory: Bytes of each rank's device.
        samples: True if vLLM shares the device.
    """
    if (tower := model.shape.tower) is None or not grids:
        return None
    image = tower.work(max(grids, key=lambda grid: tower.work(grid).patches))
    tokens = image.patches // tower.merge**2
    candidates = [
        changed(config, each) for each in memory_changes(config, model.shape, 1, model.sequence_sizes(config))
    ]

    def least(row: Work) -> int:
        parts = [RowPart.of(row, 1)]
        found = (model.footprint(each, parts, 1, samples=samples) for each in candidates)
        return min(each.least_memory(samples=samples) for each in found)

    if not least(Work()) <= memory < (needed := least(image)):  # without one token of the language model
        return None
    return ResourceError(
        f"an image of {image.patches} patches, {tokens} tokens, needs {gigabytes(needed)} of a GPU that has "
        f"{gigabytes(memory)}: it goes through the vision tower on one rank, however many share its row",
        where=f"data.max_pixels: {config.data.max_pixels}",
        possible="an image that one rank can hold beside the weights",
        remedy="lower data.max_pixels, freeze the vision tower (model.freeze), or take GPUs with more memory",
    )
