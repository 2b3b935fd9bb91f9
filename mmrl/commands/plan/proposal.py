"""Settings under which a run fits its devices: a search over a small grid, the smallest change of the config first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from mmrl.commands.plan.footprint import KINDS, PHASES, Footprint, PlannedModel, bound, ceil2, floor2
from mmrl.config.sections import Config
from mmrl.errors import ResourceError
from mmrl.ops.cost import ModelShape, Work, causal_pairs
from mmrl.runs.budget import gigabytes
from mmrl.runs.setup import RunSetup

SEQUENCES = 8
"""Longest sequences that a proposal leaves room for in the sampler's cache if it can."""
NODE = 8
"""Most ranks that a proposal lets share one copy of the sampler's weights: they must be on one node."""
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


def propose(config: Config, shape: ModelShape, take: _Take, memory: int, *, samples: bool, smallest: int) -> Proposal:
    """The settings nearest to a config's with which a run fits.

    Changes have costs: the sampler's share of memory and the size of micro-batches cost little, recomputing
    activations more, another ZeRO stage or tensor parallelism still more, and offloading most.

    Args:
        take: Gives a config's footprint.
        memory: Bytes of each rank's device.
        samples: True if vLLM shares the device.
        smallest: Tokens that a micro-batch must have room for: the longest sample.

    Raises:
        ResourceError: Nothing fits; says how much is missing, and of what.
    """
    least: tuple[int, Config, Footprint] | None = None
    cramped: Proposal | None = None
    for changes in _changes(config, shape, smallest):
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


def least_memory(config: Config, setup: RunSetup) -> int:
    """Bytes that each rank's GPU needs for one of the longest sequences, with the settings that take least."""
    model = PlannedModel(config, setup.folder, setup.part_sizes, setup.algorithm, "cuda")
    longest = config.data.max_prompt_tokens + config.max_completion_tokens
    row = Work(tokens=longest, pairs=causal_pairs(longest), predicted=config.sampler.max_new_tokens)
    samples = setup.with_sampler and config.sampler.name == "vllm"
    candidates = [changed(config, changes) for changes in _changes(config, model.shape, longest)]
    return min(model.footprint(each, [row], longest).least_memory(samples=samples) for each in candidates)


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


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with other values, given by dotted keys; not validated."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return config.model_copy(update={name: getattr(config, name).model_copy(update=v) for name, v in sections.items()})


def _changes(config: Config, shape: ModelShape, smallest: int) -> Iterator[dict[str, Any]]:
    """Changes of a config, the cheapest first; those without effect are left out."""
    learner, ranks, size = config.learner, config.cluster.ranks, config.sampler.tensor_parallel_size
    tokens = [learner.tokens_per_microbatch]
    while tokens[-1] // 2 >= smallest:
        tokens.append(tokens[-1] // 2)
    stages = [learner.zero_stage, *(stage for stage in (3, 2) if stage != learner.zero_stage)]
    data_parallel = config.sampler.engine.get("mm_encoder_tp_mode") == "data"
    parts = config.sampler.pipeline_parallel_size
    sizes = [n for n in range(1, min(ranks, NODE) + 1) if ranks % (n * parts) == 0]
    sizes = [n for n in sizes if not shape.indivisible(n, whole_tower=data_parallel)]
    sizes = [n for n in sizes if n >= size] or sizes
    offloads = [(learner.offload, 0), ("optimizer", 16), ("parameters", 32)]
    recomputing = [(config.model.gradient_checkpointing, 0), (True, 3)]
    found: dict[tuple[Any, ...], int] = {}
    for (offload, a), (number, stage), (place, parallel), (again, b), (halvings, count) in product(
        offloads, enumerate(stages), enumerate(sizes), recomputing, enumerate(tokens)
    ):
        if (offload != "none" and not stage) or (offload == "parameters" and stage != 3):
            continue
        key = (stage, offload, parallel, again, count)
        found.setdefault(key, a + b + 5 * min(number, 1) + number + 4 * place + halvings)
    names = ("learner.zero_stage", "learner.offload", "sampler.tensor_parallel_size", "model.gradient_checkpointing")
    old = (learner.zero_stage, learner.offload, size, config.model.gradient_checkpointing, tokens[0])
    for key in sorted(found, key=lambda key: found[key]):
        pairs = zip((*names, "learner.tokens_per_microbatch"), key, old, strict=True)
        yield {name: value for name, value, before in pairs if value != before}


def _nothing_fits(memory: int, needed: int, config: Config, found: Footprint, *, samples: bool) -> ResourceError:
    phases = found.learning() | ({"sample": found.sampling(found.least_share())} if samples else {})
    phase, kind = bound(phases)
    learner = config.learner
    advice = [] if config.model.lora is not None else [LORA]
    advice += ["raise cluster.ranks", "take GPUs with more memory"]
    if kind == "activations":
        advice.insert(0, "lower data.max_prompt_tokens or sampler.max_new_tokens")
    setting = [
        f"ZeRO {learner.zero_stage}, offload {learner.offload}",
        f"{config.cluster.ranks} rank(s), {config.sampler.ranks_together} of them share a sampler",
        f"micro-batches of {learner.tokens_per_microbatch} tokens",
    ]
    return ResourceError(
        f"the smallest setting needs {gigabytes(needed)} of each GPU, which has {gigabytes(memory)}: "
        f"{gigabytes(needed - memory)} are missing",
        where="; ".join([f"{PHASES[phase]}, most of it {KINDS.get(kind, kind)}", *setting]),
        remedy="; ".join(advice),
    )
