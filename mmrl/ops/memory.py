"""Bytes that a rank holds of a model: DeepSpeed's states of its parameters, and a sampler's cache.

The states follow Rajbhandari et al., 2020 (arXiv:1910.02054, section 5) and the code of DeepSpeed 0.19.8 (``runtime/``:
``zero/stage_1_and_2.py``, ``zero/stage3.py``, ``zero/partition_parameters.py``, ``fp16/unfused_optimizer.py``). It
keeps float32 copies of float32 weights too at stages 1 to 3. A test (``commands/plan/test_allocated.py``) counts
the bytes that are really allocated. Activations are in ``ops.activations``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmrl.ops.cost import ModelShape
from mmrl.ops.pinned import locked_bytes, rounded

_BUCKET, _REUSE, _SUB_GROUP = 5 * 10**8, 10**9, 10**9
"""DeepSpeed's defaults of ``reduce_bucket_size``, ``stage3_max_reuse_distance`` and ``sub_group_size``."""
_ALLREDUCED = 5 * 10**8
"""Gradients that DeepSpeed copies at a time to add them up over ranks without ZeRO, up to the end of a weight."""
NF4_BLOCK = 64
NF4_BLOCKS = 256
"""Weights in 4 bits that share a scale, and scales in 8 bits that share one."""
NF4_BYTES = 1 / 2 + 1 / NF4_BLOCK + 4 / (NF4_BLOCK * NF4_BLOCKS)
"""Bytes of a weight in 4 bits."""


@dataclass(frozen=True, slots=True)
class Zero:
    """The settings of DeepSpeed that decide about the states.

    Attributes:
        offloads: ``none``, ``optimizer`` or ``parameters``.
        reduce_bucket: Gradients that are reduced at a time; the buffer is that large however few gradients there are.
        reuse: Parameters between two uses of one for which stage 3 keeps it gathered.
        sub_group: Parameters that stage 3 steps at a time.
        buffers: Reduce buckets at stages 1 and 2.
        float32_sums: True if gradients are added up in float32.
        fused: True if AdamW makes no intermediate values.
    """

    stage: int
    ranks: int
    offloads: str = "none"
    reduce_bucket: int = _BUCKET
    reuse: int = _REUSE
    sub_group: int = _SUB_GROUP
    buffers: int = 1
    float32_sums: bool = False
    fused: bool = True

    @classmethod
    def of(cls, settings: Mapping[str, Any], ranks: int) -> Zero:
        """The settings of a configuration; missing ones have DeepSpeed's defaults."""
        zero = settings["zero_optimization"]
        offloads = "parameters" if "offload_param" in zero else "optimizer" if "offload_optimizer" in zero else "none"
        contiguous = zero.get("contiguous_gradients", True) or offloads != "none"
        return cls(
            zero["stage"],
            ranks,
            offloads,
            reduce_bucket=int(zero.get("reduce_bucket_size", _BUCKET)) * contiguous,
            reuse=int(zero.get("stage3_max_reuse_distance", _REUSE)),
            sub_group=int(zero.get("sub_group_size", _SUB_GROUP)),
            buffers=1 + bool(zero.get("overlap_comm")),
            float32_sums=settings.get("data_types", {}).get("grad_accum_dtype") == "fp32",
            fused=bool(settings["optimizer"]["params"].get("fused")),
        )


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of one rank that stay, or come back in each optimizer step.

    Attributes:
        weights: The model's, as far as the rank holds them.
        master: float32 copies of the trained weights.
        optimizer: AdamW's two averages.
        gradients: As they are added up over micro-batches.
        buckets: Buffers in which gradients wait to be reduced.
        reduced: A copy of a bucket while ranks add it up.
        reference: Further, frozen models between their uses.
        reference_used: Bytes that one of them takes in addition while it computes.
        gathered: Weights that are whole only while they are in use, at most.
        step: Bytes that the optimizer step takes in addition: gradients in float32, and AdamW's intermediate values.
        host: Bytes in the host's memory instead.
        locked: The same where DeepSpeed keeps most of them page-locked, as for a GPU, and without the reference.
        keeps_gradients: True if gradients and buckets stay between optimizer steps.
    """

    weights: int
    master: int
    optimizer: int
    gradients: int
    buckets: int
    reduced: int
    reference: int
    reference_used: int
    gathered: int
    step: int
    host: int
    locked: int
    keeps_gradients: bool

    @property
    def kept(self) -> dict[str, int]:
        """Bytes that stay on the device from step to step, by kind."""
        found = {name: getattr(self, name) for name in ("weights", "master", "optimizer", "reference")}
        if self.keeps_gradients:
            found |= {"gradients": self.gradients, "buckets": self.buckets}
        return {name: count for name, count in found.items() if count}

    def beside(self, other: States) -> States:
        """The states of two networks that are trained in turns, as a critic's beside its policy's.

        Weights, float32 copies, averages and frozen models stay. What comes back in an optimizer step is there for one
        of them at a time; gradients and buckets that stay between steps are there for both.
        """
        both = {name: getattr(self, name) + getattr(other, name) for name in _STAYING}
        kept = ("gradients", "buckets") if self.keeps_gradients else ()
        both |= {name: getattr(self, name) + getattr(other, name) for name in kept}
        turns = {"gradients", "buckets", "reduced", "reference_used", "gathered", "step"} - set(kept)
        return replace(self, **both, **{name: max(getattr(self, name), getattr(other, name)) for name in turns})


_STAYING = ("weights", "master", "optimizer", "reference", "host", "locked")
"""Kinds of bytes that stay whichever network computes."""


@dataclass(frozen=True, slots=True)
class FrozenSize:
    """Parameters of a frozen model, and of its largest weight."""

    parameters: int
    largest: int


def states(
    trained: int,
    frozen: int,
    *,
    width: int,
    zero: Zero,
    largest: int = 0,
    reference: str | None = None,
    references: Sequence[FrozenSize] | None = None,
    quantized: int = 0,
    weight_bytes: Sequence[int] = (),
) -> States:
    """Bytes that training takes of each rank.

    Args:
        trained: Parameters with a gradient.
        frozen: Parameters without.
        width: Bytes of a weight: 4 or 2.
        largest: Parameters of the largest weight.
        reference: Place of a frozen model beside the policy between its uses: ``sharded`` over the ranks, in the
            ``host``'s memory or on the ``device``; None if there is none.
        references: The frozen models there, of which one computes at a time; by default one of the policy's size.
        quantized: Frozen parameters in 4 bits.
        weight_bytes: Bytes of each weight, as it is held; by default they are one.
    """
    whole, stage = trained + frozen, zero.stage
    share = -(-trained // zero.ranks) if stage else trained
    others = [FrozenSize(whole, largest)] if references is None else references
    held = (whole - quantized) * width + round(quantized * NF4_BYTES)
    weights = -(-held // zero.ranks) if stage == 3 else held
    master, optimizer = 4 * share * (width < 4 or stage > 0), 8 * share
    # Stage 2 in float32 holds what is added up, and what the last micro-batch adds; in bfloat16 it adds in place.
    adds_in_place = stage == 2 and width < 4 and zero.float32_sums
    gradients = {0: trained * width, 1: trained * width, 2: 4 * share * (1 if adds_in_place else 2), 3: 4 * share}[
        stage
    ]
    buckets = zero.reduce_bucket * width * {0: 0, 1: zero.buffers, 2: zero.buffers, 3: 1}[stage]
    reduced = min(zero.reduce_bucket, trained) * width * (stage > 0 and zero.ranks > 1)
    gathers = stage == 3 and (zero.ranks > 1 or zero.offloads == "parameters")
    gathered = min((zero.reuse + largest) * width, held) * gathers
    more = max(min(zero.reuse + each.largest, each.parameters) * width * gathers - gathered for each in others)
    host = locked = 0
    if zero.offloads == "none":
        step = _step(share, width, zero, largest, copies=not adds_in_place)
    else:
        # The step is the host's, with gradients of its own in float32; at stages 1 and 2 it holds new weights, too.
        away = _offloaded(zero, share, largest, width, adds_in_place=adds_in_place)
        step = master = optimizer = 0
        buckets += largest * width * (stage < 3)  # for the one that is under way
        if stage != 1 and not adds_in_place:
            gradients = 0
        if zero.offloads == "parameters":
            away, weights = replace(away, each=away.each + weights), 0
        host, locked = away.bytes, away.locked([size // zero.ranks for size in weight_bytes or (held,)])
        if zero.offloads == "parameters":  # they move into a tensor of their own, and torch keeps the memory
            locked += rounded(share * width)
    whole_others = sum(each.parameters for each in others) * width
    own = sum(-(-each.parameters // zero.ranks) for each in others) * width
    other = {"sharded": own, "device": whole_others, "host": whole_others, None: 0}[reference]
    at_once = {"sharded": max(more, 0), "host": max(each.parameters for each in others) * width}
    is_away = reference == "host" or (reference == "sharded" and zero.offloads == "parameters")
    return States(
        weights,
        master,
        optimizer,
        gradients,
        buckets,
        reduced,
        reference=other * (not is_away),
        reference_used=at_once.get(reference or "", 0),
        gathered=gathered,
        step=step,
        host=host + other * is_away,
        locked=locked,
        keeps_gradients=stage == 3,
    )


@dataclass(frozen=True, slots=True)
class _Offloaded:
    """Bytes in the host's memory, as DeepSpeed 0.19.8 allocates them there.

    Attributes:
        single: Bytes of each page-locked tensor.
        each: Bytes of all page-locked tensors of which each weight has its own.
        plain: Bytes of all tensors that are not page-locked.
    """

    single: tuple[int, ...]
    each: int
    plain: int

    @property
    def bytes(self) -> int:
        return sum(self.single) + self.each + self.plain

    def locked(self, sizes: Sequence[int]) -> int:
        """Bytes with page-locked tensors as torch makes them; ``sizes`` are those of the weights."""
        grown = locked_bytes(sizes) / max(sum(sizes), 1)
        return locked_bytes(self.single) + round(self.each * grown) + self.plain


def _offloaded(zero: Zero, share: int, largest: int, width: int, *, adds_in_place: bool) -> _Offloaded:
    """A rank's offloaded optimizer.

    At stages 1 and 2 the float32 weights, their gradients, the new weights and a buffer for the largest one are
    page-locked, and each weight's gradients as micro-batches add to them (``stage_1_and_2.py``). At stage 3 it is the
    gradients of each group and of all of them (``stage3.py``). AdamW's averages never are.
    """
    if zero.stage < 3:
        each = share * width if zero.stage == 1 else 4 * share * (not adds_in_place)
        return _Offloaded((4 * share, 4 * share, width * share, width * largest), each, 8 * share)
    groups = [min(zero.sub_group, share - start) for start in range(0, share, zero.sub_group)]
    return _Offloaded((4 * share, *(4 * group for group in groups)), 0, 12 * share)


def _step(share: int, width: int, zero: Zero, largest: int, *, copies: bool) -> int:
    """Bytes that an optimizer step takes beside the gradients.

    Args:
        copies: True if gradients are copied before they are used, at stages 1 and 2.
    """
    at_once = share
    if zero.stage == 3:
        at_once = min(share, zero.sub_group + largest // zero.ranks)
    elif zero.stage == 0:
        copies = width < 4
    step = 4 * at_once * copies + 8 * at_once * (not zero.fused)
    # DeepSpeed copies gradients to add them up over ranks, also of a single one.
    return max(step, min(_ALLREDUCED + largest, share) * width) if zero.stage == 0 else step


def layer_weights(*, quantized: int, adapted: int, width: int, merged_at_once: int) -> int:
    """Bytes of weights that a layer makes for each of its passes: out of 4 bits, and with its adapter.

    In a type narrower than float32 an adapted layer computes with the merged weight, which is summed up in float32,
    some elements at a time.

    Args:
        quantized: Parameters of the largest layer in 4 bits.
        adapted: Parameters of the largest layer with an adapter; 0 without adapters.
        width: Bytes of a weight.
        merged_at_once: Most elements that are summed up at a time.
    """
    merges = adapted * (width < 4)
    return width * (quantized + merges) + 8 * min(merges, merged_at_once)


def cache_bytes_per_token(
    shape: ModelShape, *, width: int, tensor_parallel: int = 1, pipeline_parallel: int = 1
) -> int:
    """Bytes of a token's keys and values on one of the ranks that sample together; no head and no layer is split."""
    layers, heads = -(-shape.attending_layers // pipeline_parallel), max(shape.kv_heads // tensor_parallel, 1)
    return 2 * layers * heads * shape.head_size * width


def cache_bytes_per_sequence(
    shape: ModelShape, *, width: int, tensor_parallel: int = 1, pipeline_parallel: int = 1
) -> int:
    """Bytes that a sequence takes there whatever its length: linear attention's states in float32, and its
    convolution's inputs."""
    if (linear := shape.linear) is None:
        return 0
    numbers = 4 * linear.state + (linear.taps - 1) * linear.channels * width
    return -(-linear.layers // pipeline_parallel) * numbers // tensor_parallel
