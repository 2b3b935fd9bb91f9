"""A micro-batch: a packed row of tokens, its images, and its wishes to routers.

Letters: ``S`` tokens of the row, ``T`` completion tokens, ``W`` those that the policy wrote, ``I`` images of the row,
``U`` different ones among them, ``N`` samples of the row, ``L`` layers with experts, ``K`` experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmrl.engine.network.image_form import Features


@dataclass(frozen=True, slots=True)
class Routing:
    """A row's wishes to the routers.

    Attributes:
        members_NS: 1 where a token belongs to a sample, its prompt included; None if nothing asks for ``imbalances``.
        recorded_SLK: The sampler's experts, -1 where they are not known; None if none are known.
        replays: True to use them.
    """

    members_NS: torch.Tensor | None = None
    recorded_SLK: torch.Tensor | None = None
    replays: bool = False


OWN = Routing()
"""No wishes."""


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """One micro-batch.

    Attributes:
        model_inputs: Keyword arguments of the model's body.
        predicting_T: int64 positions in the row whose hidden states predict the completion tokens.
        targets_T: int64 completion tokens.
        images: The row's different images, or the vision tower's features of each of the I; None without any.
        routing: Wishes to the routers of a mixture of experts.
        written_W: int64 places of the policy's tokens among the T; None if it wrote all of them.
        last_N: int64 positions in the row of each sample's last token; None where rows do not keep it.
    """

    model_inputs: dict[str, Any]
    predicting_T: torch.Tensor
    targets_T: torch.Tensor
    images: UniqueImages | Sequence[Features] | None
    routing: Routing = OWN
    written_W: torch.Tensor | None = None
    last_N: torch.Tensor | None = None

    @property
    def num_written(self) -> int:
        """W, the positions that meet the head."""
        return len(self.targets_T if self.written_W is None else self.written_W)


@dataclass(frozen=True, slots=True)
class UniqueImages:
    """Images that each go through the vision tower once, even if samples share them.

    Attributes:
        pixels: Their pixels as the tower takes them, joined along the first axis.
        grids_U3: Frames, and rows and columns of patches in each, in the host's memory.
        derived: The tower's inputs that follow from the grids; see ``ImageForm.tower_inputs``.
        places: I places among them, in the order of the row's image tokens.
    """

    pixels: torch.Tensor
    grids_U3: torch.Tensor
    derived: Mapping[str, torch.Tensor | int]
    places: tuple[int, ...]
