"""Memory of vLLM 0.32 on a GPU beside its KV cache: weights, state and a step's temporaries, from shapes and limits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mmrl.config.sections import Config
from mmrl.engine import device
from mmrl.engine.network.family import UNUSED
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.shape import model_shape
from mmrl.engine.network.sizes import meta_model
from mmrl.ops.cost import ModelShape
from mmrl.ops.pinned import SMALL, locked_bytes, pinned_bytes

FUSED = {
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),
    **dict.fromkeys(("in_proj_b", "in_proj_a"), "in_proj_ba"),
}
FUSED_IN_LANGUAGE = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
"""Layers of transformers that are one in vLLM (``packed_modules_mapping`` of its models)."""
VOCABULARY, ROWS = ("embed_tokens.weight", "lm_head.weight"), 64
"""Weights with a row for each token, and the number of which vLLM makes their rows a multiple."""
VIDEO_POSITIONS = 4
"""Times the model's longest sequence for which vLLM keeps rotary positions of several axes (``MRotaryEmbedding``)."""


@dataclass(frozen=True, slots=True)
class SamplerMemory:
    """Bytes of one rank's vLLM.

    Attributes:
        weights: Bytes of each weight, in vLLM's order.
        state: Bytes of each tensor that vLLM makes beside them while it loads a model. No weight sync sends these.
        tables: Bytes of each of the tables that it has in page-locked memory.
        working: Most bytes of a step's temporaries.
    """

    weights: tuple[int, ...]
    state: tuple[int, ...]
    tables: tuple[int, ...]
    working: int

    def locked(self, *, discards: bool) -> int:
        """Page-locked bytes of the host.

        Args:
            discards: True if a sleep backs up the state alone, and the small weights that may share its segments.
        """
        copied = [size for size in self.weights if not discards or size <= SMALL]
        copied += self.state
        return pinned_bytes(copied) + locked_bytes(self.tables)


def sampler_memory(config: Config, folder: ModelFolder, width: int) -> SamplerMemory:
    """The memory of vLLM on a rank of a pipeline's first stage.

    Args:
        width: Bytes of a weight.
    """
    shape, text = model_shape(folder.config), folder.config.get_text_config()
    limits = device.sampler_arguments(
        "cuda",
        config.sampler.gpu_memory_utilization,
        length := config.data.max_prompt_tokens + config.max_sampled_tokens,
        num_sequences(config),
    )
    limits |= config.sampler.engine
    sequences, tokens, parallel = (
        int(limits["max_num_seqs"]),
        int(limits["max_num_batched_tokens"]),
        config.sampler.tensor_parallel_size,
    )
    axes = 3 if _has_axes(text) else 1
    rotary = text.max_position_embeddings * (VIDEO_POSITIONS if axes > 1 else 1) * shape.head_size * width
    bins = 4 * sequences * shape.vocabulary, 4 * sequences * math.ceil(shape.vocabulary / 32)
    # Input embeddings of a step, and as many for each layer that is given features of its own.
    layers = shape.tower.mergers if shape.tower is not None else 0
    embeddings = (tokens * shape.width * width,) * layers
    table = 4 * sequences * length  # ids of all requests' tokens; and their positions, if these have axes
    return SamplerMemory(
        weights_in_vllm(config, folder, width),
        (rotary, *embeddings, *bins, bins[1]),
        (table, 3 * table) if axes > 1 else (table,),
        _working(shape, width, sequences, tokens, parallel),
    )


def num_sequences(config: Config) -> int:
    """Completions that a copy of the sampler's weights samples at once."""
    replicas = config.cluster.num_sampler_ranks // config.sampler.ranks_together
    partial, groups = config.sampler.partial, config.trainer.prompts_per_step
    groups = groups if partial is None else partial.num_groups(groups)
    return math.ceil(groups / replicas) * config.sampler.group_size


def weights_in_vllm(config: Config, folder: ModelFolder, width: int) -> tuple[int, ...]:
    """Bytes of each weight of vLLM on a rank of a pipeline's first stage.

    vLLM divides matrices among the ranks that share a layer, and leaves vectors whole.
    """
    sampler, sizes = config.sampler, dict[str, int]()
    last = -(-model_shape(folder.config).layers // sampler.pipeline_parallel_size)
    whole_tower = sampler.engine.get("mm_encoder_tp_mode") == "data"
    for name, parameter in meta_model(folder).named_parameters():
        part = folder.family.part_of(name)
        if part == UNUSED:  # vLLM leaves out a tower that no prompt may use
            continue
        if part == "language" and (number := _layer(name)) is not None and number >= last:
            continue
        parts = sampler.tensor_parallel_size if part == "language" or not whole_tower else 1
        one = FUSED | FUSED_IN_LANGUAGE if part == "language" else FUSED
        fused = ".".join(one.get(module, module) for module in name.split("."))
        size = parameter.numel() * width
        if name.endswith(VOCABULARY):
            size = -(-size // (ROWS * parameter.shape[-1] * width)) * ROWS * parameter.shape[-1] * width
        sizes[fused] = sizes.get(fused, 0) + (size if parameter.ndim == 1 else -(-size // parts))
    return tuple(sizes.values())


def _layer(name: str) -> int | None:
    """The number of the layer that has a parameter."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _has_axes(text: Any) -> bool:
    """True if positions have an axis for time, height and width each."""
    return bool((getattr(text, "rope_parameters", None) or {}).get("mrope_section"))


def _working(shape: ModelShape, width: int, sequences: int, tokens: int, parallel: int) -> int:
    """Most bytes of a step's temporaries: in an MLP of the language model or the tower, or in the head.

    An MLP has both of its inner products and what comes of them, beside the residual stream, what is normalised, and
    queries, keys and values. The head has logits in the model's type, and again in float32.
    """
    inner = shape.mlp_width if shape.mixture is None else shape.mixture.chosen * shape.mixture.width
    layer = tokens * width * (3 * inner // parallel + 4 * shape.width)
    head = sequences * shape.vocabulary * (width + 4) + tokens * width * shape.width
    tower = 0
    if shape.tower is not None:
        patches = tokens * shape.tower.merge**2
        tower = patches * width * (shape.tower.mlp_matrices * shape.tower.mlp_width + 6 * shape.tower.width)
    return max(layer, head, tower)
