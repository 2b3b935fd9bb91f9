"""Settings under which a run fits its devices: a search over a small grid, the smallest change of the config first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.config.sections import Config
from mmrl.engine.footprint import KINDS, PHASES, Footprint, bound, ceil2, floor2
from mmrl.engine.memory_needs import changed, memory_changes
from mmrl.errors import ResourceError
from mmrl.ops.cost import ModelShape
from mmrl.runs.budget import gigabytes

SEQUENCES = 8
"""Longest sequences that a proposal leaves room for in the sampler's cache if it can."""
LORA = "train adapters (model.lora)"

_Take = Callable[[Config], Footprint]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Settings that fit.

    Attributes:
        changes: Dotted keys of the config and their new values; empty if the config fits as it is.
        footprint: The config's footprint with them.
    """

    changes: Mapping[str, Any]
    footprint: Footprint


def propose(
    config: Config,
    shape: ModelShape,
    take: _Take,
    memory: int,
    *,
    samples: bool,
    smallest: int,
    row_ranks: Sequence[int] = (1,),
) -> Proposal:
    """The settings nearest to a config's with which a run fits.

    The sampler's share of memory costs least; see ``memory_changes`` for the rest.

    Args:
        take: Gives a config's footprint.
        memory: Bytes of each rank's device.
        samples: True if vLLM shares the device.
        smallest: Tokens that a row must have room for: the longest sample.
        row_ranks: Numbers of ranks that may share a row.

    Raises:
        ResourceError: Nothing fits; says how much is missing, and of what.
    """
    least: tuple[int, Config, Footprint] | None = None
    cramped: Proposal | None = None
    for changes in memory_changes(config, shape, smallest, row_ranks):
        candidate = changed(config, changes)
        found = take(candidate)
        needed = found.least_memory(samples=samples)
        if least is None or needed < least[0]:
            least = needed, candidate, found
        if needed > memory:
            continue
        if not samples or (not changes and fits(candidate, found, memory)):
            return Proposal(changes, found)
        for sequences in (SEQUENCES, 1):
            fraction = _fraction(candidate.sampler.gpu_memory_utilization, found, memory, sequences)
            if fraction is None:
                continue
            share = (
                {}
                if fraction == candidate.sampler.gpu_memory_utilization
                else {"sampler.gpu_memory_utilization": fraction}
            )
            proposal = Proposal({**changes, **share}, found)
            if sequences == SEQUENCES:
                return proposal
            cramped = cramped or proposal
    if cramped is not None:
        return cramped
    assert least is not None
    raise _nothing_fits(memory, *least, samples=samples)


def fits(config: Config, found: Footprint, memory: int) -> bool:
    """True if the sampler's share of the device is large enough, and leaves room for what the learner keeps."""
    share = int(config.sampler.gpu_memory_utilization * memory)
    return found.least_share() <= share and sum(found.sampling(share).values()) <= memory


def _fraction(wished: float, found: Footprint, memory: int, sequences: int) -> float | None:
    """The share of the device nearest to the wished one, to hundredths; None if there is none."""
    lowest = ceil2(found.least_share(sequences) / memory)
    highest = floor2(1 - sum(found.sampling(0).values()) / memory)
    if lowest > highest:
        return None
    return wished if lowest <= wished <= highest else min(max(wished, lowest), highest)


def _nothing_fits(memory: int, needed: int, config: Config, found: Footprint, *, samples: bool) -> ResourceError:
    phases = found.learning() | ({"sample": found.sampling(found.least_share())} if samples else {})
    phase, kind = bound(phases)
    learner = config.learner
    advice = [] if config.model.lora is not None else [LORA]
    ranks = "cluster.learner_ranks" if config.cluster.is_split else "cluster.ranks"
    advice += [f"raise {ranks}", "take GPUs with more memory"]
    if kind == "activations":
        advice.insert(0, "lower data.max_prompt_tokens or sampler.max_new_tokens")
    setting = [
        f"ZeRO {learner.zero_stage}, offload {learner.offload}",
        f"{config.cluster.num_ranks} rank(s), {config.sampler.ranks_together} of them share a sampler",
        f"micro-batches of {learner.tokens_per_microbatch} tokens a rank, "
        f"{learner.sequence_parallel_size} of them share a row",
    ]
    return ResourceError(
        f"the smallest setting needs {gigabytes(needed)} of each GPU, which has {gigabytes(memory)}: "
        f"{gigabytes(needed - memory)} are missing",
        where="; ".join([f"{PHASES[phase]}, most of it {KINDS.get(kind, kind)}", *setting]),
        remedy="; ".join(advice),
    )
