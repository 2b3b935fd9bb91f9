"""Floating-point operations that a pass needs, however it is packed: a decoder with an optional vision tower.

A product of (n, i) and (i, o) matrices is 2 n i o operations; norms, activations and softmax are left out, as usual
(Kaplan et al., 2020, arXiv:2001.08361, section 2.1; Chowdhery et al., 2022, arXiv:2204.02311, appendix B). A query
that attends to a key costs 4 D operations per head of size D, for the score and for the weighted value; pairs that
causality or a window rules out cost nothing, though a kernel may compute them. The backward pass computes each
product's gradients for its inputs and for its weights: twice the forward, without the weights' where these are frozen,
and nothing before the first trained part. Operations that gradient checkpointing repeats are not counted;
``ModelShape.recomputed_flops`` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from mmrl.ops.layer_shapes import LinearAttentionShape, MixtureShape, UnevenLayers

PARTS = ("vision", "projector", "language")
"""Parts of a model, in the order in which a forward pass goes through them."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work that passes through a model, in numbers that add up over samples, rows, steps and ranks.

    Attributes:
        tokens: Text and image tokens of the language model; a shared prefix counts once if it is computed once.
        pairs: Attended pairs of query and key tokens; see ``causal_pairs``.
        local_pairs: Likewise in a layer with a window; see ``window_pairs``.
        predicted: Positions whose hidden state meets the head.
        patches: Vision patches, before they are merged.
        class_tokens: Tokens that pass through the tower's layers beside them, and are dropped.
        image_pairs: Pairs of patches where a layer attends to the whole image.
        window_pairs: Pairs of patches where it attends within windows; 0 for a tower without such layers.
        masked_pairs: Pairs of query and key in the masks of completions that share a prompt; see ``chunks_of``.
    """

    tokens: int = 0
    pairs: int = 0
    predicted: int = 0
    patches: int = 0
    image_pairs: int = 0
    window_pairs: int = 0
    class_tokens: int = 0
    local_pairs: int = 0
    masked_pairs: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.tokens + other.tokens,
            self.pairs + other.pairs,
            self.predicted + other.predicted,
            self.patches + other.patches,
            self.image_pairs + other.image_pairs,
            self.window_pairs + other.window_pairs,
            self.class_tokens + other.class_tokens,
            self.local_pairs + other.local_pairs,
            self.masked_pairs + other.masked_pairs,
        )

    def without_head(self) -> Work:
        """The same in a network with a score in place of its head: the score's product is nothing."""
        return replace(self, predicted=0)


NOTHING = Work()


def imbalance(costs: Sequence[Sequence[float]]) -> float:
    """The time of ranks over their time with equal shares, at least 1, if they wait for each other in every
    micro-batch, as ZeRO 3 makes them.

    ``sum_m max_r c_rm / mean_r sum_m c_rm``, for the cost c of rank r's micro-batch m; 1 if nothing costs anything.
    """
    mean = sum(map(sum, costs)) / len(costs)
    return sum(map(max, zip(*costs, strict=True))) / mean if mean else 1.0


def causal_pairs(queries: int, prefix: int = 0) -> int:
    """Pairs of tokens that attend to each other and to themselves causally, and to all of a prefix before them."""
    return queries * (queries + 1) // 2 + queries * prefix


def window_pairs(tokens: int, window: int) -> int:
    """Pairs of tokens of a sequence in which each attends to the ``window`` last ones, itself included."""
    return causal_pairs(min(tokens, window)) + max(tokens - window, 0) * window


@dataclass(frozen=True, slots=True)
class TowerShape:
    """A vision tower, and the mergers that make image tokens of its patches.

    Attributes:
        width: Hidden size.
        mlp_width: Hidden size of a layer's MLP.
        mlp_matrices: 3 if it is gated, else 2.
        patch_values: Numbers of one patch.
        merge: Both sides of a square of patches that becomes one token.
        out: Width of an image token.
        mergers: Projections of patches to tokens, those to deeper layers of the language model included.
        merger_width: Width between the two matrices of a merger; by default that of the merged patches.
        windowed_layers: Layers that attend within windows; the others attend to the whole image.
        window: Both sides of a window, in tokens.
        heads: Heads of a layer's attention that vLLM divides among ranks; 0 if each rank has all.
        class_tokens: Tokens of each frame beside its patches.
        scaled: True if trained factors scale what a layer's last matrix gives.
        pooled: True if a token is the mean of its patches, and a merger has one matrix.
    """

    layers: int
    width: int
    mlp_width: int
    mlp_matrices: int
    patch_values: int
    merge: int
    out: int
    mergers: int = 1
    merger_width: int | None = None
    windowed_layers: int = 0
    window: int = 0
    heads: int = 1
    class_tokens: int = 0
    scaled: bool = False
    pooled: bool = False

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrices: queries, keys, values, output, MLP."""
        return 4 * self.width**2 + self.mlp_matrices * self.width * self.mlp_width

    @property
    def merger_weights(self) -> int:
        """Weights of one merger's matrices."""
        if self.pooled:
            return self.width * self.out
        merged = self.width * self.merge**2
        between = self.merger_width or merged
        return between * (merged + self.out)

    def work(self, grid: Sequence[int]) -> Work:
        """The work of one image's pass through the tower; ``grid`` is its temporal, vertical and horizontal patches."""
        frames, height, width = grid
        patches = height * width
        windows = 0
        if self.windowed_layers:
            side = self.window * self.merge
            windows = _squares(height, side) * _squares(width, side)
        return Work(
            patches=frames * patches,
            image_pairs=frames * (patches + self.class_tokens) ** 2,
            window_pairs=frames * windows,
            class_tokens=frames * self.class_tokens,
        )


@dataclass(frozen=True, slots=True)
class Training:
    """The parts that a backward pass trains.

    Attributes:
        frozen: Parts whose weights have no gradient.
        adapters: Weights of the low-rank adapters in each part; if there are any, nothing else is trained.
    """

    frozen: Collection[str] = ()
    adapters: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def trains(self, part: str) -> bool:
        """True if the part's own weights are trained."""
        return not self.adapters and part not in self.frozen

    def reaches(self, part: str) -> bool:
        """True if a gradient goes through the part: it is trained, or one before it is."""
        return any(self.trains(each) or self.adapters.get(each) for each in PARTS[: PARTS.index(part) + 1])


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention and gated MLPs, or mixtures of experts.

    Attributes:
        width: Hidden size.
        heads: Query heads.
        kv_heads: Key-value heads.
        vocabulary: Rows of the head.
        normed_heads: True if queries and keys are normalised.
        gated_heads: True if each head's output has a gate.
        tower: None for a text model.
        mixture: None for a dense model.
        linear: None if all layers attend.
        window: Tokens that a token sees in layers with a window, itself included; 0 if there are no such layers.
        local_layers: The number of these layers.
        uneven: None if all attending layers, and all MLPs, are of one size.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_width: int
    vocabulary: int
    tower: TowerShape | None = None
    normed_heads: bool = False
    gated_heads: bool = False
    mixture: MixtureShape | None = None
    linear: LinearAttentionShape | None = None
    window: int = 0
    local_layers: int = 0
    uneven: UnevenLayers | None = None

    @property
    def attending_layers(self) -> int:
        """Layers that attend to tokens."""
        return self.layers - (self.linear.layers if self.linear is not None else 0)

    @property
    def mixed_layers(self) -> int:
        """Layers with a mixture of experts."""
        return self.mixture.layers if self.mixture is not None else 0

    @property
    def active_weights(self) -> int:
        """Weights of all layers' matrices that a token meets: queries, keys, values, output, MLP or chosen experts."""
        if self.uneven is not None:
            return self.uneven.weights + self.uneven.outside
        attention = self.width * self.head_size * ((2 + self.gated_heads) * self.heads + 2 * self.kv_heads)
        weights = (
            self.attending_layers * attention + (self.layers - self.mixed_layers) * 3 * self.width * self.mlp_width
        )
        if (mixture := self.mixture) is not None:
            weights += mixture.layers * mixture.weights(self.width)
        if self.linear is not None:
            weights += self.linear.layers * self.linear.weights(self.width)
        return weights

    @property
    def largest_weight(self) -> int:
        """Numbers of the largest weight: the head, the embedding, or two matrices of all experts of a layer."""
        head, mixture = self.vocabulary * self.width, self.mixture
        head = max(head, self.uneven.largest) if self.uneven is not None else head
        return max(head, 2 * mixture.experts * mixture.width * self.width) if mixture is not None else head

    def indivisible(self, parts: int, *, whole_tower: bool = False) -> str:
        """The reason why layers cannot be divided among ``parts`` as vLLM divides them; empty if they can.

        A rank has a whole number of query heads, and of key-value heads or one of them. It has whole heads of the
        tower, and as many columns of the MLP, or of each expert, as the others.

        Args:
            whole_tower: True if each part has all of the tower.
        """
        if self.heads % parts:
            return f"the model has {self.heads} attention heads"
        if max(self.kv_heads, parts) % min(self.kv_heads, parts):
            return f"the model has {self.kv_heads} key-value heads"
        if (linear := self.linear) is not None and linear.key_heads % parts:
            return f"the model's linear attention has {linear.key_heads} heads of keys"
        if self.layers > self.mixed_layers and self.mlp_width % parts:
            return f"the model's MLP has {self.mlp_width} columns"
        if (mixture := self.mixture) is not None:
            if mixture.width % parts:
                return f"each of the model's experts has {mixture.width} columns"
            if mixture.shared % parts:
                return f"the model's shared expert has {mixture.shared} columns"
            if mixture.experts < parts:
                return f"the model has {mixture.experts} experts"
        if (tower := self.tower) is not None and not whole_tower:
            if tower.heads % parts:
                return f"the vision tower has {tower.heads} attention heads"
            if tower.mlp_width % parts:
                return f"the vision tower's MLP has {tower.mlp_width} columns"
        return ""

    def work(
        self,
        *,
        tokens: int,
        pairs: int,
        predicted: int,
        images: Sequence[Sequence[int]] = (),
        local_pairs: Callable[[int], int] | None = None,
        masked_pairs: int = 0,
    ) -> Work:
        """The work of a row.

        Args:
            images: The grids of those that pass through the tower.
            local_pairs: Gives the pairs within a window; None if the row has no more tokens than that.
        """
        assert self.tower is not None or not images, "a text model takes no images"
        local = pairs if local_pairs is None or not self.window else local_pairs(self.window)
        text = Work(tokens, pairs, predicted, local_pairs=local, masked_pairs=masked_pairs)
        return sum((self.tower.work(grid) for grid in images if self.tower), text)

    def forward_flops(self, work: Work) -> int:
        """Operations of a forward pass."""
        linear, attention = self._linear(work), self._attention(work)
        return sum(linear.values()) + sum(attention.values())

    def backward_flops(self, work: Work, training: Training = Training()) -> int:
        """Operations of the backward pass after it.

        With adapters this counts part of the first adapted layer too much: the products before its first adapter need
        no gradient.
        """
        linear, attention = self._linear(work), self._attention(work)
        passes = {part: training.trains(part) + training.reaches(part) for part in PARTS}
        flops = sum(passes[part] * linear[part] + 2 * training.reaches(part) * attention[part] for part in PARTS)
        if self.tower is not None and passes["vision"]:  # pixels need no gradient
            flops -= self._patch_flops(work)
        # What is pooled needs no gradient if no weight before it has one: the norm between has none.
        if self.tower is not None and self.tower.pooled and training.trains("projector"):
            flops -= (not training.reaches("vision")) * linear["projector"]
        return flops

    def adapter_flops(self, work: Work, training: Training) -> int:
        """Operations of the adapters' own matrices, forward and backward, as two products beside each layer.

        A layer that merges them (``engine.merged_linear``) does four of six, and the merging besides.
        """
        rows = self._rows(work)
        return sum(6 * rows[part] * weights for part, weights in training.adapters.items())

    def update_flops(self, work: Work, training: Training = Training()) -> int:
        """Operations that a forward and a backward pass need; ``perf/mfu`` counts these."""
        return self.forward_flops(work) + self.backward_flops(work, training) + self.adapter_flops(work, training)

    def recomputed_flops(self, work: Work, training: Training = Training()) -> int:
        """Operations that gradient checkpointing of every layer repeats: the layers' forward, without head and merger.

        The last matrix of a layer is not computed again, unless a trained factor scales its product: nothing else in
        the backward pass needs that. With ZeRO 3 it is, by DeepSpeed's own linear function.
        """
        flops = 0
        if training.reaches("language"):
            # What experts give is computed again: the gradient of their weights needs it.
            again = self.active_weights - (self.layers - self.mixed_layers) * self.width * self.mlp_width
            if self.uneven is not None:  # norms come after every matrix
                again = self.uneven.weights
            flops += 2 * work.tokens * again + self._attention(work)["language"]
        if (tower := self.tower) is not None and training.reaches("vision"):
            again = tower.layer_weights - tower.width * tower.mlp_width * (not tower.scaled)
            flops += 2 * self._rows(work)["vision"] * tower.layers * again + self._attention(work)["vision"]
        return flops

    def _rows(self, work: Work) -> dict[str, int]:
        """Rows that pass through the layers of each part."""
        merged = work.patches // self.tower.merge**2 if self.tower is not None else 0
        return {"vision": work.patches + work.class_tokens, "projector": merged, "language": work.tokens}

    def _linear(self, work: Work) -> dict[str, int]:
        """Operations of the matrices, forward."""
        rows = self._rows(work)
        language = rows["language"] * self.active_weights + work.predicted * self.width * self.vocabulary
        flops = {"vision": 0, "projector": 0, "language": 2 * language}
        if (tower := self.tower) is not None:
            layers = 2 * rows["vision"] * tower.layers * tower.layer_weights
            flops["vision"] = layers + self._patch_flops(work)
            flops["projector"] = 2 * rows["projector"] * tower.mergers * tower.merger_weights
        return flops

    def _patch_flops(self, work: Work) -> int:
        return 2 * work.patches * self.tower.patch_values * self.tower.width if self.tower is not None else 0

    def _attention(self, work: Work) -> dict[str, int]:
        """Operations of scores and weighted values, and of linear attention's states, forward."""
        head = self.heads * self.head_size
        whole, local = (self.attending_layers - self.local_layers) * head, self.local_layers * head
        if self.uneven is not None:
            whole, local = self.uneven.heads, self.uneven.local_heads
        scores = 4 * (work.pairs * whole + work.local_pairs * local)
        states = self.linear.layers * self.linear.token_flops * work.tokens if self.linear is not None else 0
        flops = {"vision": 0, "projector": 0, "language": scores + states}
        if (tower := self.tower) is not None:
            whole = (tower.layers - tower.windowed_layers) * work.image_pairs
            flops["vision"] = 4 * tower.width * (whole + tower.windowed_layers * work.window_pairs)
        return flops


def _squares(length: int, side: int) -> int:
    """Sum of the squares of the pieces of ``length``: as many of ``side`` as fit, and a rest."""
    whole, rest = divmod(length, side)
    return whole * side**2 + rest**2
