"""The memory that an engine's ranks need, known before anything is fetched or loaded, and settings that need less."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from mmrl.config.sections import Config, LearnerConfig
from mmrl.engine.device import DeviceKind
from mmrl.engine.footprint import PlannedModel
from mmrl.engine.machine.host_memory import HostMemory
from mmrl.engine.network.sizes import part_sizes
from mmrl.engine.spec import EngineSpec
from mmrl.ops.cost import ModelShape, Work, causal_pairs
from mmrl.ops.sequence import RowPart
from mmrl.token_columns import REWARD

NODE = 8
"""Most ranks that a proposal lets share one copy of the sampler's weights: they must be on one node."""


def least_memory(spec: EngineSpec) -> int:
    """Bytes that each rank's GPU needs for one of the longest sequences, with the settings that take least."""
    config, model = spec.config, _planned_model(spec, "cuda")
    longest = config.data.max_prompt_tokens + config.max_completion_tokens
    row = Work(tokens=longest, pairs=causal_pairs(longest), predicted=config.sampler.max_new_tokens)
    changes = memory_changes(config, model.shape, longest, model.sequence_sizes(config))
    candidates, samples = [changed(config, each) for each in changes], _shares_with_vllm(spec)
    rows = [[RowPart.of(row, each.learner.sequence_parallel_size)] for each in candidates]
    found = (model.footprint(each, own, longest, samples=samples) for each, own in zip(candidates, rows, strict=True))
    return min(each.least_memory(samples=samples) for each in found)


def host_memory(spec: EngineSpec, kind: DeviceKind) -> HostMemory:
    """A rank's share of its machine's memory."""
    if kind == "cpu" and spec.config.learner.offload == "none":
        return HostMemory()  # host and device are one
    return _planned_model(spec, kind).host(spec.config, samples=_shares_with_vllm(spec))


def _planned_model(spec: EngineSpec, kind: DeviceKind) -> PlannedModel:
    config, folder = spec.config, spec.folder
    assert spec.algorithm is not None  # a learner is what takes memory
    scores = spec.algorithm.network == REWARD
    sizes = part_sizes(folder, config.model.freeze, config.model.lora, scores=scores)
    return PlannedModel(config, folder, sizes, spec.algorithm, kind, spec.teachers, spec.critic)


def _shares_with_vllm(spec: EngineSpec) -> bool:
    return spec.with_sampler and spec.config.sampler.name == "vllm" and not spec.config.cluster.is_split


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with other values, given by dotted keys; not validated."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return config.model_copy(update={name: getattr(config, name).model_copy(update=v) for name, v in sections.items()})


def memory_changes(
    config: Config, shape: ModelShape, smallest: int, row_ranks: Sequence[int] = (1,)
) -> Iterator[dict[str, Any]]:
    """Changes of a config that take less memory, by dotted keys and the cheapest first; none is without effect.

    The size of micro-batches costs little, recomputing activations more, another ZeRO stage, tensor parallelism or
    ranks that share a row still more, and offloading most. More ranks share a row only where the longest sample is
    longer than what those of the config hold together: shorter rows are cut into more rows at less cost.

    Args:
        smallest: Tokens that a row must have room for: the longest sample.
        row_ranks: Numbers of ranks that may share a row.
    """
    learner, ranks, size = config.learner, config.cluster.num_sampler_ranks, config.sampler.tensor_parallel_size
    stages = [learner.zero_stage, *(stage for stage in (3, 2) if stage != learner.zero_stage)]
    data_parallel = config.sampler.engine.get("mm_encoder_tp_mode") == "data"
    parts = config.sampler.pipeline_parallel_size
    sizes = [n for n in range(1, min(ranks, NODE) + 1) if ranks % (n * parts) == 0]
    sizes = [n for n in sizes if not shape.indivisible(n, whole_tower=data_parallel)]
    sizes = [n for n in sizes if n >= size] or sizes
    offloads = [(learner.offload, 0), ("optimizer", 16), ("parameters", 32)]
    recomputing = [(config.model.gradient_checkpointing, 0), (True, 3)]
    found: dict[tuple[Any, ...], int] = {}
    for (offload, a), (number, stage), (place, parallel), (again, b), (c, sequence, count) in product(
        offloads, enumerate(stages), enumerate(sizes), recomputing, _row_sizes(learner, smallest, row_ranks)
    ):
        if (offload != "none" and not stage) or (offload == "parameters" and stage != 3):
            continue
        key = (stage, offload, parallel, again, sequence, count)
        found.setdefault(key, a + b + c + 5 * min(number, 1) + number + 4 * place)
    old = {
        "learner.zero_stage": learner.zero_stage,
        "learner.offload": learner.offload,
        "sampler.tensor_parallel_size": size,
        "model.gradient_checkpointing": config.model.gradient_checkpointing,
        "learner.sequence_parallel_size": learner.sequence_parallel_size,
        "learner.tokens_per_microbatch": learner.tokens_per_microbatch,
    }
    for key in sorted(found, key=lambda key: found[key]):
        yield {name: value for name, value in zip(old, key, strict=True) if value != old[name]}


def _row_sizes(learner: LearnerConfig, smallest: int, row_ranks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The cost, the ranks that share a row, and the tokens that each of them holds of it, for ``memory_changes``."""
    own = learner.sequence_parallel_size
    for place, sequence in enumerate([own, *(n for n in row_ranks if own < n <= NODE)]):
        tokens = [learner.tokens_per_microbatch]
        while sequence * (tokens[-1] // 2) >= smallest:
            tokens.append(tokens[-1] // 2)
        for halvings, count in enumerate(tokens):
            if not place or own * count < smallest:
                yield (6 + 4 * place if place else 0) + halvings, sequence, count
