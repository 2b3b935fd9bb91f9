"""Packs samples into one row of model inputs: tokens, positions, attention layout, image patches.

Images may lie anywhere in a row. They come in the order of their tokens: those of a prompt, then those of each of its
completions.

Letters: ``S`` tokens of the row, ``P`` prompt tokens, ``T`` completion tokens, ``W`` those that the policy wrote, ``I``
images of the row, ``U`` different ones among them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from mmrl.config.sections import LearnerConfig
from mmrl.engine import device as devices
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.image_form import Features
from mmrl.engine.network.layout import PackedLayout
from mmrl.engine.network.packed_inputs import OWN, PackedInputs, Routing, UniqueImages
from mmrl.engine.network.vision import ImageInputs
from mmrl.ops.packing import Item, Unit, offsets, units_of
from mmrl.types import ImageRef, IntArray, Sample, TrainingRow

POSITION_BYTES = 64 * 2**20
"""Bytes of positions that are kept; those of 1,000 tokens take 28 kB."""


class Collator:
    """Packs samples for a model.

    Args:
        body: The model without its head; it computes positions where these are multimodal.
        device: The place of what is packed; kept as ``device``.
        share: True if samples of one prompt share it in the row, and samples with the same image share that.
        balances: True if rows ask for ``experts.imbalances``.
        replays: True if the experts that samples know are used.
        keeps_last: True if rows have the last token of each sample, too.
    """

    def __init__(
        self,
        folder: ModelFolder,
        body: Any,
        images: ImageInputs,
        device: str,
        dtype: torch.dtype,
        *,
        share: bool = True,
        balances: bool = False,
        replays: bool = False,
        keeps_last: bool = False,
    ) -> None:
        self._folder, self._body, self._images = folder, body, images
        self.device, self._dtype, self.share = device, dtype, share
        self._balances, self._replays, self._keeps_last = balances, replays, keeps_last
        self._multimodal = folder.family.vision and folder.images.multimodal_positions
        self._looks_ahead = folder.family.vision and folder.images.looks_ahead
        self._positions_of = _Positions(body, images, folder.image_token_id)

    def keeping_last(self) -> Collator:
        """The same for rows that have the last token of each sample, too."""
        found = copy.copy(self)
        found._keeps_last = True
        return found

    def units(
        self, samples: Sequence[Sample], budget: int | None = None, rows: Sequence[TrainingRow] = ()
    ) -> list[Unit]:
        """The samples by prompt, as they lie together in a row of at most ``budget`` tokens.

        Args:
            rows: The samples', if they are trained on.
        """
        of_samples: Sequence[TrainingRow | None] = rows or [None] * len(samples)
        pairs = zip(samples, of_samples, strict=True)
        items = [Item.of(sample, row, keeps_last=self._keeps_last) for sample, row in pairs]
        return units_of(items, budget, share=self.share)

    def __call__(self, samples: Sequence[Sample], known: Mapping[str, Features] = MappingProxyType({})) -> PackedInputs:
        """A row whose log-probs are in the order of the samples.

        Args:
            known: Features by the image's hash, for all of the row's images or for none.
        """
        units = self.units(samples)
        prompts = [samples[unit.indices[0]].prompt for unit in units]
        ids, spans, refs = list[Any](), [], list[ImageRef]()
        predicting: list[Any] = [None] * len(samples)
        last_N = np.zeros(len(samples), np.int64)
        for start, unit, prompt in zip(offsets(unit.tokens for unit in units), units, prompts, strict=False):
            ids.append(prompt.token_ids)
            refs += prompt.images
            spans += unit.spans(start)
            first = start + unit.prompt_tokens
            for index, begin, length in zip(unit.indices, offsets(unit.completions), unit.completions, strict=False):
                ids.append(samples[index].token_ids[:length])
                refs += _inserted_images(samples[index])
                # The prompt's last token predicts the first of each completion.
                places = np.concatenate([[first - 1], first + begin + np.arange(length)])
                predicting[index], last_N[index] = places[: len(samples[index].token_ids)], places[-1]
        ids_S = np.concatenate(ids)
        inputs = {
            "input_ids": self._tensor(ids_S)[None],
            "position_ids": self._positions(units, samples),
            "layout": PackedLayout(spans, self.device, self._dtype, self._image_numbers(ids_S)),
        }
        if self._multimodal:
            inputs["mm_token_type_ids"] = self._tensor(ids_S == self._folder.image_token_id)[None]
        return PackedInputs(
            inputs,
            self._tensor(np.concatenate(predicting)),
            self._tensor(np.concatenate([s.token_ids for s in samples])),
            self._known_images(refs, known),
            self._routing(samples, units, len(ids_S)),
            self._written(samples),
            self._tensor(last_N) if self._keeps_last else None,
        )

    def _image_numbers(self, ids_S: IntArray) -> IntArray | None:
        """The number of each token's image, -1 for text; None if no token sees what comes after it."""
        if not self._looks_ahead:
            return None
        is_image_S = ids_S == self._folder.image_token_id
        begins_S = is_image_S & ~np.concatenate([[False], is_image_S[:-1]])
        return np.where(is_image_S, np.cumsum(begins_S) - 1, -1)

    def _written(self, samples: Sequence[Sample]) -> torch.Tensor | None:
        """``PackedInputs.written_W``."""
        if all(segment.by_policy for sample in samples for segment in sample.segments):
            return None
        return self._tensor(np.flatnonzero(np.concatenate([sample.mask for sample in samples])))

    def _routing(self, samples: Sequence[Sample], units: Sequence[Unit], num_tokens: int) -> Routing:
        """The wishes to the routers: the samples' places in the row, and the experts that they know."""
        known = next((sample.experts for sample in samples if sample.experts is not None), None)
        if known is None and not self._balances:
            return OWN
        members_NS = np.zeros((len(samples), num_tokens), np.float32)
        for start, unit in zip(offsets(unit.tokens for unit in units), units, strict=False):
            first = start + unit.prompt_tokens
            for index, begin, length in zip(unit.indices, offsets(unit.completions), unit.completions, strict=False):
                members_NS[index, start:first] = members_NS[index, first + begin : first + begin + length] = 1
        members = devices.moved(torch.from_numpy(members_NS), self.device) if self._balances else None
        if known is None:
            return Routing(members)
        recorded_SLK = np.full((num_tokens, *known.shape[1:]), -1, np.int64)
        for sample, members_S in zip(samples, members_NS, strict=True):
            if sample.experts is not None:  # a shared prompt's are those of its last sample, as of all others
                places = np.flatnonzero(members_S)  # the sampler knows nothing of a last token, which predicts none
                recorded_SLK[places[: len(sample.experts)]] = sample.experts
        return Routing(members, self._tensor(recorded_SLK), self._replays)

    def _tensor(self, values: Any) -> torch.Tensor:
        return devices.moved(torch.from_numpy(np.asarray(values, np.int64)), self.device)

    def _known_images(
        self, refs: Sequence[ImageRef], known: Mapping[str, Features]
    ) -> UniqueImages | Sequence[Features] | None:
        if not refs:
            return None
        return [known[ref.hash] for ref in refs] if known else self.images(refs)

    def announce(self, refs: Iterable[ImageRef]) -> None:
        """As ``ImageInputs.announce``."""
        self._images.announce(refs)

    def images(self, refs: Sequence[ImageRef]) -> UniqueImages:
        """Inputs of the vision tower for at least one image."""
        names = [ref.hash if self.share else number for number, ref in enumerate(refs)]
        unique = dict(zip(names, refs, strict=True))
        pixels, grids = zip(*map(self._images, unique.values()), strict=True)
        place = {name: number for number, name in enumerate(unique)}
        grids_U3 = torch.stack(grids)
        return UniqueImages(
            devices.moved(torch.cat(pixels).to(self._dtype), self.device),
            grids_U3,
            self._folder.images.tower_inputs(self._body, grids_U3, self.device, self._dtype),
            tuple(place[name] for name in names),
        )

    def _positions(self, units: Sequence[Unit], samples: Sequence[Sample]) -> torch.Tensor:
        """(1, S) positions, or (4, 1, S) multimodal ones: text, then temporal, height, width.

        Each prompt starts at 0, and each of its completions goes on after it. The text row tells transformers that
        sequences are packed.
        """
        text, columns = list[torch.Tensor](), list[torch.Tensor]()
        for unit in units:
            after_T = torch.cat([torch.arange(length) for length in unit.completions])
            text += [torch.arange(unit.prompt_tokens), unit.prompt_tokens + after_T]
            if self._multimodal:
                columns += self._multimodal_positions(unit, samples, after_T)
        text_S = torch.cat(text)
        if not columns:
            return devices.moved(text_S[None], self.device)
        return devices.moved(torch.cat([text_S[None], torch.cat(columns, 1)])[:, None], self.device)

    def _multimodal_positions(
        self, unit: Unit, samples: Sequence[Sample], after_T: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """(3, P) positions of a unit's prompt, and (3, T) of its completions.

        Args:
            after_T: Each completion token's place in its completion.
        """
        prompt = samples[unit.indices[0]].prompt
        prompt_3P = self._positions_of(prompt.token_ids, prompt.images)
        yield prompt_3P
        after_3T = (prompt_3P.max() + 1 + after_T).expand(3, -1)
        own = [samples[index] for index in unit.indices]
        if not any(map(_inserted_images, own)):
            yield after_3T
            return
        for sample, plain_3T in zip(own, after_3T.split(unit.completions, 1), strict=True):
            if not _inserted_images(sample):
                yield plain_3T
                continue
            ids = np.concatenate([prompt.token_ids, sample.token_ids])
            whole_3T = self._positions_of(ids, sample.all_images)[:, unit.prompt_tokens :]
            yield whole_3T[:, : plain_3T.shape[1]]


class _Positions:
    """(3, n) temporal, height and width positions of sequences that begin with a prompt.

    They are cached by all that they depend on: the tokens and the images' sizes.

    Args:
        body: As of ``Collator``; likewise ``images``.

    Attributes:
        known: By the tokens and the sizes.
        bytes_held: Bytes of these; at most ``POSITION_BYTES``, or those of one sequence.
    """

    def __init__(self, body: Any, images: ImageInputs, image_token_id: int) -> None:
        self._body, self._images, self._image_token_id = body, images, image_token_id
        self.known: dict[tuple[Any, ...], torch.Tensor] = {}
        self.bytes_held = 0

    def __call__(self, token_ids: IntArray, images: Sequence[ImageRef]) -> torch.Tensor:
        key = (token_ids.tobytes(), tuple((ref.width, ref.height) for ref in images))
        if key not in self.known:
            found = self._computed(token_ids, images)
            self.bytes_held += found.nbytes + len(key[0])
            if self.bytes_held > POSITION_BYTES:
                self.known.clear()
                self.bytes_held = found.nbytes + len(key[0])
            self.known[key] = found
        return self.known[key]

    def _computed(self, token_ids: IntArray, images: Sequence[ImageRef]) -> torch.Tensor:
        ids = torch.from_numpy(np.asarray(token_ids, np.int64))
        if not images:
            return torch.arange(len(ids)).expand(3, -1)
        grids = torch.stack([self._images(ref)[1] for ref in images])
        types = (ids == self._image_token_id).int()
        positions: torch.Tensor = self._body.get_rope_index(ids[None], types[None], grids)[0]
        return positions[:, 0]


def _inserted_images(sample: Sample) -> tuple[ImageRef, ...]:
    """The images of what follows the prompt."""
    return sample.all_images[len(sample.prompt.images) :]


def shares_prefix(config: LearnerConfig, folder: ModelFolder) -> bool:
    """True if the samples of a prompt share it in their row."""
    return config.share_prefix == "auto" and folder.family.shares_prefix
