"""A micro-batch: a packed row of tokens, its images, and its wishes to routers.

Letters: ``S`` tokens of the row, ``T`` completion tokens, ``W`` those that the policy wrote, ``I`` images of the row,
``U`` different ones among them, ``N`` samples of the row, ``L`` layers with experts, ``K`` experts of a token.

Where several ranks hold a row together, each has all of its ids, and computes ``O`` tokens of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmrl.engine.network.image_form import Features
from mmrl.engine.network.sequence import ALONE, SequenceGroup


@dataclass(frozen=True, slots=True)
class Routing:
    """A row's wishes to the routers.

    Attributes:
        members_NO: 1 where one of this rank's tokens belongs to a sample, its prompt included; None if nothing asks for
            ``imbalances``.
        recorded_OLK: The sampler's experts, -1 where they are not known; None if none are known.
        replays: True to use them.
    """

    members_NO: torch.Tensor | None = None
    recorded_OLK: torch.Tensor | None = None
    replays: bool = False


OWN = Routing()
"""No wishes."""


@dataclass(frozen=True, slots=True)
class Reads:
    """The hidden states that a head reads on this rank, and the places of what it makes of them.

    Attributes:
        positions: int64 positions among this rank's hidden states.
        places: int64 places of the values among the row's; None for all of them in order.
        count: Values of the row.
        group: The ranks that make them together.
    """

    positions: torch.Tensor
    places: torch.Tensor | None
    count: int
    group: SequenceGroup = ALONE

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Those of a row's values that this rank makes, such as targets."""
        return values if self.places is None else values[self.places]

    def whole(self, made: torch.Tensor) -> torch.Tensor:
        """The row's values, made by all ranks of the group; 0 where nothing is read."""
        if self.places is not None:
            made = made.new_zeros(self.count).index_copy(0, self.places, made)
        return self.group.summed(made)


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """One micro-batch.

    Attributes:
        model_inputs: Keyword arguments of the model's body.
        predicting: The hidden states that predict completion tokens, T in the row.
        written: Those among them that predict one which the policy wrote.
        targets_T: int64 completion tokens.
        images: The row's different images, or the vision tower's features of each of the I; None without any.
        num_written: W, the positions of the row that meet the head.
        routing: Wishes to the routers of a mixture of experts.
        last: The hidden states of each sample's last token, N in the row; None where rows do not keep them.
    """

    model_inputs: dict[str, Any]
    predicting: Reads
    written: Reads
    targets_T: torch.Tensor
    images: UniqueImages | Sequence[Features] | None
    num_written: int
    routing: Routing = OWN
    last: Reads | None = None


@dataclass(frozen=True, slots=True)
class UniqueImages:
    """Images that each go through the vision tower once, even if samples share them.

    Attributes:
        pixels: Their pixels as the tower takes them, joined along the first axis.
        grids_U3: Frames, and rows and columns of patches in each, in the host's memory.
        derived: The tower's inputs that follow from the grids; see ``ImageForm.tower_inputs``.
        places: I places among them, in the order of the row's image tokens.
        division: The row's images among the ranks of a group, of which this rank's are above; None for a rank alone.
    """

    pixels: torch.Tensor
    grids_U3: torch.Tensor
    derived: Mapping[str, torch.Tensor | int]
    places: tuple[int, ...]
    division: Division | None = None

    @property
    def all_grids_U3(self) -> torch.Tensor:
        """The grids of all images of the row, whichever rank encodes them."""
        return self.grids_U3 if self.division is None else self.division.grids_U3


@dataclass(frozen=True, slots=True)
class Division:
    """The different images of a row, each of which one rank of a group encodes for all of them.

    A rank that has none of them encodes a blank one, whose features nobody gets: all ranks call the tower.

    Attributes:
        grids_U3: As of ``UniqueImages``, of all of them.
        tokens: Image tokens of each of the U.
        own: int64 places of the features that this rank makes among those of all images, which lie one after the other.
        group: The ranks.
    """

    grids_U3: torch.Tensor
    tokens: tuple[int, ...]
    own: torch.Tensor
    group: SequenceGroup

    def whole(self, features: Sequence[Features]) -> list[Features]:
        """The features of all images, from those of this rank's; the gradient goes to the rank that made them."""
        made = torch.cat([torch.cat(levels, -1) for levels in features])[: len(self.own)]
        placed = made.new_zeros(sum(self.tokens), made.shape[1]).index_copy(0, self.own, made)
        found = self.group.shared(placed).split(self.tokens)
        return [each.chunk(len(features[0]), -1) for each in found]
