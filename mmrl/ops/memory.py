"""Bytes that a rank holds: what DeepSpeed keeps of the parameters, what a micro-batch leaves for its backward pass.

The states follow Rajbhandari et al., 2020 (arXiv:1910.02054, section 5) and the code of DeepSpeed 0.19, which keeps
float32 copies of float32 weights too at stages 1 and 2. Activations are the tensors that autograd keeps, layer by
layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmrl.ops.cost import ModelShape, Work

LIVE = 10**9
"""Parameters that ZeRO 3 keeps gathered at most; DeepSpeed's ``stage3_max_live_parameters``."""


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of one rank that stay, or come back in each optimizer step.

    Attributes:
        weights: Of the model, as far as the rank holds them.
        master: float32 copies of the trained weights.
        optimizer: AdamW's two averages.
        gradients: As they are added up over micro-batches.
        reference: A second, frozen model.
        gathered: Weights that are whole only while they are in use.
        step: What the optimizer step takes besides: gradients in float32, and AdamW's intermediate values.
        host: What is in the host's memory instead.
    """

    weights: int
    master: int
    optimizer: int
    gradients: int
    reference: int
    gathered: int
    step: int
    host: int

    @property
    def resident(self) -> int:
        """What stays on the device from step to step."""
        return self.weights + self.master + self.optimizer + self.reference

    def peak(self, activations: int) -> int:
        """The most of an update: in a backward pass, or in the optimizer step after it."""
        return self.resident + self.gradients + max(self.gathered + activations, self.step)


def states(
    trained: int,
    frozen: int,
    *,
    width: int,
    zero_stage: int,
    ranks: int,
    offload: str = "none",
    reference: bool = False,
    fused: bool = False,
) -> States:
    """What training takes of each rank.

    Args:
        trained: Parameters with a gradient.
        frozen: Parameters without.
        width: Bytes of a weight: 4 or 2.
        offload: ``none``, ``optimizer`` or ``parameters``.
        reference: Whether a frozen model is held beside the policy, whole on each rank.
        fused: Whether AdamW makes no intermediate values.
    """
    whole, share = trained + frozen, -(-trained // ranks) if zero_stage else trained
    weights = -(-whole // ranks) * width if zero_stage == 3 else whole * width
    # Stage 0 trains float32 weights in place, and so does stage 3 unless the copy is elsewhere.
    has_master = width < 4 or zero_stage in (1, 2) or offload != "none"
    master, optimizer = 4 * share * has_master, 8 * share
    gradients = trained * width if zero_stage <= 1 else 4 * share
    step = 4 * share * (zero_stage in (1, 2) or width < 4) + 8 * share * (not fused)
    gathered = min(LIVE, whole) * width if zero_stage == 3 else 0
    host = 0
    if offload != "none":
        host, master, optimizer, step = master + optimizer + step, 0, 0, 0
        gradients, host = (gradients, host + 4 * share) if zero_stage == 1 else (0, host + gradients)
    if offload == "parameters":
        host, weights = host + weights, 0
    return States(weights, master, optimizer, gradients, whole * width * reference, gathered, step, host)


def layer_activations(shape: ModelShape, width: int) -> int:
    """Bytes of one token that a layer of the language model keeps for its backward pass.

    Norms (their input in float32, what is normalised, what is given on), queries, keys and values, the attention's
    output as it is computed and in the row's order, and the MLP's two inner products, the activation and its product.
    """
    norms = 2 * shape.width * (4 + 2 * width)
    attention = shape.head_size * (3 * shape.heads + 2 * shape.kv_heads)
    heads = shape.head_size * (shape.heads + shape.kv_heads) * (4 + width) * shape.normed_heads
    return norms + heads + width * (attention + 4 * shape.mlp_width)


def patch_activations(shape: ModelShape, width: int) -> int:
    """Bytes of one patch that a layer of the vision tower keeps for its backward pass."""
    if (tower := shape.tower) is None:
        return 0
    norms = 2 * tower.width * (4 + 2 * width)
    inner = {2: 2, 3: 4}[tower.mlp_matrices] * tower.mlp_width
    # The values are a view of queries, keys and values as they were projected, which so stay as well.
    return norms + width * (7 * tower.width + inner)


def activations(
    shape: ModelShape, work: Work, *, width: int, checkpointing: bool, tower_trained: bool, logits_bytes: int
) -> int:
    """Bytes that a micro-batch holds at most between its forward and its backward pass.

    Args:
        checkpointing: Whether layers keep their inputs alone, and one is computed again at a time.
        tower_trained: Whether a gradient goes through the vision tower.
        logits_bytes: Of the logits that exist at a time.
    """
    layer, patch = layer_activations(shape, width) * work.tokens, patch_activations(shape, width) * work.patches
    depth = shape.tower.layers if shape.tower is not None else 0
    kept_patches = 0
    if checkpointing:
        kept = shape.layers * shape.width * width * work.tokens + layer
        if tower_trained and shape.tower is not None:
            kept_patches = depth * shape.tower.width * width * work.patches
    else:
        kept = shape.layers * layer
        kept_patches = depth * patch * tower_trained
    return kept + max(kept_patches, patch) + logits_bytes


def cache_bytes_per_token(shape: ModelShape, *, width: int, tensor_parallel: int = 1) -> int:
    """Bytes of a token's keys and values on one of the ranks that sample together; a head is never split."""
    return 2 * shape.layers * max(shape.kv_heads // tensor_parallel, 1) * shape.head_size * width
