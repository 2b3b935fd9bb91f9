"""Bytes of a micro-batch's activations on a rank: the tensors that autograd keeps, layer by layer, and what a backward
pass holds beside them."""

from __future__ import annotations

from mmrl.ops.cost import ModelShape
from mmrl.ops.layer_shapes import LinearAttentionShape
from mmrl.ops.sequence import RowPart, repeats_of

_Kinds = list[tuple[int, int]]
"""Numbers of layers, and bytes of a token in one of them."""


def layer_activations(shape: ModelShape, width: int) -> int:
    """Bytes of one token that a layer of the language model keeps for its backward pass; the mean of all layers.

    Norms (their input in float32, what is normalised, what is given on), queries, keys and values, the attention's
    output as it is computed and in the row's order, and the MLP's two inner products, the activation and its product.
    """
    kinds = (_attentions(shape, width), _mlps(shape, width))
    return _norms(shape, width) + sum(sum(n * each for n, each in own) // shape.layers for own in kinds)


def largest_layer(shape: ModelShape, width: int) -> int:
    """As ``layer_activations``, of the layer that keeps most."""
    kinds = (_attentions(shape, width), _mlps(shape, width))
    return _norms(shape, width) + sum(max(each for n, each in own if n) for own in kinds)


def _norms(shape: ModelShape, width: int) -> int:
    return 2 * shape.width * (4 + 2 * width)


def _attentions(shape: ModelShape, width: int) -> _Kinds:
    attention = width * shape.head_size * ((3 + 2 * shape.gated_heads) * shape.heads + 2 * shape.kv_heads)
    attention += shape.head_size * (shape.heads + shape.kv_heads) * (4 + width) * shape.normed_heads
    linear = [] if shape.linear is None else [(shape.linear.layers, _linear_attention(shape.linear, width))]
    return [(shape.attending_layers, attention), *linear]


def _mlps(shape: ModelShape, width: int) -> _Kinds:
    dense, mixture = width * 4 * shape.mlp_width, shape.mixture
    if mixture is None:
        return [(shape.layers, dense)]
    # Of each chosen expert its input, what an MLP keeps, and its output, also in the tokens' order and weighed in
    # float32; the router's input, logits and probabilities in float32.
    chosen = mixture.chosen * (width * (4 * mixture.width + 2 * shape.width))
    mixed = chosen + 4 * (shape.width * (width < 4) + 2 * mixture.experts) + width * 4 * mixture.shared
    return [(shape.layers - mixture.layers, dense), (mixture.layers, mixed)]


def _linear_attention(shape: LinearAttentionShape, width: int) -> int:
    """Bytes of one token that a layer of linear attention keeps in plain torch: the convolution's inputs and sum, the
    gate and what it is multiplied with, and of each head 16 vectors and five rows of a chunk, all in float32. Kernels
    keep less."""
    of_heads = 4 * shape.value_heads * (16 * max(shape.key_size, shape.value_size) + 5 * 64)
    return 4 * shape.channels * (shape.taps + 1) + shape.values * (8 + 3 * width) + of_heads


def patch_activations(shape: ModelShape, width: int) -> int:
    """Bytes of one patch that a layer of the vision tower keeps for its backward pass."""
    if (tower := shape.tower) is None:
        return 0
    norms = 2 * tower.width * (4 + 2 * width)
    inner = {2: 2, 3: 4}[tower.mlp_matrices] * tower.mlp_width
    # The values are a view of the projected queries, keys and values, so all three stay.
    return norms + width * (7 * tower.width + inner)


def layer_gradients(shape: ModelShape, width: int) -> int:
    """Bytes of one token that a layer's backward pass holds at most beside what the layer keeps.

    That is when the product of an MLP's two factors goes backward: its gradient and both factors' are there, and the
    product itself is gone. The gradient of the layer's output is there all the time.
    """
    mlp, mixture = shape.mlp_width, shape.mixture
    if mixture is not None:
        mixed = mixture.chosen * mixture.width + mixture.shared
        mlp = max(mixed, mlp * (shape.layers > mixture.layers))
    return width * (shape.width + 2 * mlp)


def tower_activations(shape: ModelShape, width: int, *, checkpointing: bool) -> int:
    """Bytes of one patch that a trained vision tower keeps for its backward pass: the patch, what each layer keeps, and
    of each merger its norm and what is between its matrices."""
    if (tower := shape.tower) is None:
        return 0
    layer = tower.width * width if checkpointing else patch_activations(shape, width)
    between = tower.merger_width or tower.width * tower.merge**2
    merger = 0 if tower.pooled else tower.width * (4 + 2 * width) + 2 * width * between // tower.merge**2
    return tower.patch_values * width + tower.layers * layer + tower.mergers * merger


def activations(
    shape: ModelShape, part: RowPart, *, width: int, checkpointing: bool, tower_trained: bool, logits_bytes: int
) -> int:
    """Bytes that a rank holds at most in the forward and backward pass of its part of a micro-batch.

    With checkpointing each layer keeps its input alone. One layer at a time is computed again and goes backward. The
    logits are gone by then, and of a row that ranks share so are the whole row's embeddings. The tower's layers are
    computed before the language model's, and go backward after them; so do the whole row's embeddings, of which there
    are two copies while features of images take their places.

    Args:
        checkpointing: True if layers keep their inputs alone, and one at a time is computed again.
        tower_trained: True if a gradient goes through the vision tower.
        logits_bytes: Bytes of the logits that exist at a time.
    """
    own = part.own
    whole = whole_row(shape, part, width=width)
    backward = layer_gradients(shape, width) * own.tokens
    # The last norm, the hidden states that the head reads, and their gradient.
    head = logits_bytes + shape.width * (4 + 4 * width) * own.tokens
    heads = exchanged_heads(shape, part, width=width, checkpointing=checkpointing)
    if checkpointing:
        inputs = shape.layers * shape.width * width * own.tokens
        layer = largest_layer(shape, width) * own.tokens
        held = inputs + max(layer + heads + backward, layer + whole, head)
    else:
        layers = shape.layers * layer_activations(shape, width) * own.tokens
        held = layers + heads + max(backward, whole, head)
    kept_patches = tower_activations(shape, width, checkpointing=checkpointing) * own.patches * tower_trained
    return kept_patches + max(held, 2 * whole, patch_activations(shape, width) * own.patches)


def whole_row(shape: ModelShape, part: RowPart, *, width: int) -> int:
    """Bytes of the whole row's embeddings, and of the features of all its images, while a rank computes its slice of a
    row that it shares; 0 of a row that it has alone."""
    if part.size == 1:
        return 0
    numbers = part.row.tokens * shape.width
    if (tower := shape.tower) is not None:
        numbers += part.row.patches // tower.merge**2 * tower.mergers * tower.out
    return width * numbers


def exchanged_heads(shape: ModelShape, part: RowPart, *, width: int, checkpointing: bool) -> int:
    """Bytes of queries, keys, values and outputs that are there twice where ranks share a row, by tokens and by heads;
    0 of a row that a rank has alone.

    One layer has them at a time. Heads of keys and values are kept as often as they are repeated.
    """
    if part.size == 1:
        return 0
    kv_heads = shape.kv_heads * repeats_of(shape.kv_heads, part.size)
    layers = 1 if checkpointing else shape.attending_layers
    by_heads = shape.head_size * (2 * (shape.heads + kv_heads) + 2 * layers * (kv_heads - shape.kv_heads))
    return width * part.own.tokens * by_heads


def forward_activations(shape: ModelShape, part: RowPart, *, width: int, logits_bytes: int) -> int:
    """Bytes that a pass without gradients holds at most: of one layer at a time."""
    layer = layer_activations(shape, width) * part.own.tokens
    patch = patch_activations(shape, width) * part.own.patches
    beside = whole_row(shape, part, width=width) + exchanged_heads(shape, part, width=width, checkpointing=True)
    return max(layer, patch) + beside + logits_bytes
