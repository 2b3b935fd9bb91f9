"""The shapes of a decoder's layers that are not plain attention and an MLP of one size, for ``cost``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """The layers of a decoder that have a mixture of experts in place of an MLP.

    Attributes:
        layers: The number of these layers; the others have MLPs.
        experts: Experts of a layer.
        chosen: Experts that a token goes to.
        width: Hidden size of an expert, which is a gated MLP.
        shared: Hidden size of a further expert that all tokens go to, with a gate; 0 without one.
    """

    layers: int
    experts: int
    chosen: int
    width: int
    shared: int = 0

    def weights(self, width: int) -> int:
        """Weights of one layer's matrices that a token meets, for a decoder of that hidden size."""
        return width * (self.experts + 3 * self.chosen * self.width + 3 * self.shared + bool(self.shared))


@dataclass(frozen=True, slots=True)
class LinearAttentionShape:
    """The layers of a decoder that have a gated delta rule in place of attention; see ``engine.linear_attention``.

    Attributes:
        layers: The number of these layers; the others attend.
        key_heads: Heads of queries and keys.
        value_heads: Heads of values; each has a state of ``key_size`` x ``value_size``.
        taps: Inputs of the convolution that queries, keys and values come from.
    """

    layers: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int

    @property
    def values(self) -> int:
        """Numbers of a token's values."""
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_heads * self.key_size + self.values

    @property
    def state(self) -> int:
        """Numbers of a layer's state."""
        return self.key_size * self.values

    def weights(self, width: int) -> int:
        """Weights of one layer's matrices without its MLP."""
        return width * (self.channels + 2 * self.values + 2 * self.value_heads)

    @property
    def token_flops(self) -> int:
        """Operations of one token in one layer beside its matrices: the convolution, and the state that is read for the
        token's key, changed, and read for its query. A kernel that computes tokens in chunks takes others."""
        return 2 * self.taps * self.channels + 6 * self.state


@dataclass(frozen=True, slots=True)
class UnevenLayers:
    """Sums over a decoder's layers where their matrices differ in size.

    Attributes:
        weights: Weights of their matrices that a token meets.
        heads: Query heads times head size, of all layers that attend to all tokens.
        local_heads: Likewise of those with a window.
        outside: Weights of matrices that a token meets before the first layer.
        largest: Numbers of the largest embedding beside that of the tokens.
        kv_heads: Heads of keys and values that a layer may have.
    """

    weights: int
    heads: int
    local_heads: int
    outside: int = 0
    largest: int = 0
    kv_heads: tuple[int, ...] = ()
