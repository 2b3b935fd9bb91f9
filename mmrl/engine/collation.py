"""Samples as one packed row of model inputs: tokens, positions, attention layout, image patches.

Letters: ``S`` tokens of the row, ``P`` prompt tokens, ``T`` completion tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mmrl.engine.attention import PackedLayout
from mmrl.engine.folder import ModelFolder
from mmrl.engine.vision import ImageInputs
from mmrl.ops.packing import offsets
from mmrl.types import EncodedPrompt, Sample

KNOWN_POSITIONS = 4096
"""Prompts whose positions are kept."""


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """One micro-batch.

    Attributes:
        model_inputs: Keyword arguments of the model's body.
        predicting_T: int64 positions in the row whose hidden states predict the completion tokens.
        targets_T: int64 completion tokens.
        completion_lengths: Completion tokens of each sample, in order.
    """

    model_inputs: dict[str, Any]
    predicting_T: torch.Tensor
    targets_T: torch.Tensor
    completion_lengths: list[int]


class Collator:
    """Packs samples for a model.

    Args:
        body: The model without its head; a vision-language body computes its prompts' multimodal positions.
    """

    def __init__(self, folder: ModelFolder, body: Any, images: ImageInputs, device: str, dtype: torch.dtype) -> None:
        self._folder, self._body, self._images = folder, body, images
        self._device, self._dtype = device, dtype
        self._known_positions: dict[tuple[Any, ...], torch.Tensor] = {}

    def __call__(self, samples: Sequence[Sample]) -> PackedInputs:
        ids_S = np.concatenate([np.concatenate([s.prompt.token_ids, s.token_ids]) for s in samples])
        starts = offsets([s.num_tokens for s in samples])
        lengths = [len(s.token_ids) for s in samples]
        predicting = [
            start + len(s.prompt.token_ids) - 1 + np.arange(len(s.token_ids))
            for start, s in zip(starts, samples, strict=False)
        ]
        inputs = {
            "input_ids": self._tensor(ids_S)[None],
            "position_ids": self._positions(samples),
            "layout": PackedLayout.of([s.num_tokens for s in samples], self._device),
        }
        if self._folder.family.vision:
            inputs |= self._vision_inputs(samples, ids_S)
        return PackedInputs(
            inputs,
            self._tensor(np.concatenate(predicting)),
            self._tensor(np.concatenate([s.token_ids for s in samples])),
            lengths,
        )

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, np.int64)).to(self._device)

    def _vision_inputs(self, samples: Sequence[Sample], ids_S: Any) -> dict[str, torch.Tensor]:
        inputs = {"mm_token_type_ids": self._tensor(ids_S == self._folder.image_token_id)[None]}
        entries = [self._images(ref) for s in samples for ref in s.prompt.images]
        if entries:
            pixels, grids = zip(*entries, strict=True)
            inputs["pixel_values"] = torch.cat(pixels).to(self._device, self._dtype)
            inputs["image_grid_thw"] = torch.stack(grids).to(self._device)
        return inputs

    def _positions(self, samples: Sequence[Sample]) -> torch.Tensor:
        """(1, S) positions, or (4, 1, S) for a vision-language model: text, then temporal, height, width.

        Each sequence starts at 0. The text row tells transformers that the sequences are packed.
        """
        text_S = torch.cat([torch.arange(s.num_tokens) for s in samples])
        if not self._folder.family.vision:
            return text_S[None].to(self._device)
        columns = []
        for sample in samples:
            prompt_3P = self._cached_positions(sample.prompt)
            continued_T = prompt_3P.max() + 1 + torch.arange(len(sample.token_ids))
            columns.append(torch.cat([prompt_3P, continued_T.expand(3, -1)], 1))
        return torch.cat([text_S[None], torch.cat(columns, 1)])[:, None].to(self._device)

    def _cached_positions(self, prompt: EncodedPrompt) -> torch.Tensor:
        """``_prompt_positions``, which depend on the tokens and the images' sizes alone."""
        key = (prompt.token_ids.tobytes(), tuple((ref.width, ref.height) for ref in prompt.images))
        if key not in self._known_positions:
            if len(self._known_positions) >= KNOWN_POSITIONS:
                self._known_positions.clear()
            self._known_positions[key] = self._prompt_positions(prompt)
        return self._known_positions[key]

    def _prompt_positions(self, prompt: EncodedPrompt) -> torch.Tensor:
        """(3, P) temporal, height and width positions."""
        ids_P = torch.from_numpy(np.asarray(prompt.token_ids, np.int64))
        if not prompt.images:
            return torch.arange(len(ids_P)).expand(3, -1)
        grids = torch.stack([self._images(ref)[1] for ref in prompt.images])
        types_P = (ids_P == self._folder.image_token_id).int()
        positions: torch.Tensor = self._body.get_rope_index(ids_P[None], types_P[None], grids)[0]
        return positions[:, 0]
