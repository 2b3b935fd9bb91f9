"""Packs samples into one row of model inputs: tokens, positions, attention layout, image patches.

Images may lie anywhere in a row. They come in the order of their tokens: those of a prompt, then those of each of its
completions.

Letters: ``S`` tokens of the row, ``P`` prompt tokens, ``T`` completion tokens, ``W`` those that the policy wrote, ``I``
images of the row, ``U`` different ones among them, ``N`` samples.
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
from mmrl.engine.network.packed_inputs import OWN, Division, PackedInputs, Reads, Routing, UniqueImages
from mmrl.engine.network.sequence import ALONE, SequenceGroup
from mmrl.engine.network.shape import model_shape
from mmrl.engine.network.vision import BLANK, ImageInputs
from mmrl.ops.packing import Item, Unit, balance, offsets, units_of
from mmrl.types import BoolArray, ImageRef, IntArray, Sample, TrainingRow

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
        group: The ranks that hold a row together; kept as ``group``.
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
        group: SequenceGroup = ALONE,
    ) -> None:
        self._folder, self._body, self._images = folder, body, images
        self.device, self._dtype, self.share, self.group = device, dtype, share, group
        self._balances, self._replays, self._keeps_last = balances, replays, keeps_last
        self._multimodal = folder.family.vision and folder.images.multimodal_positions
        self._looks_ahead = folder.family.vision and folder.images.looks_ahead
        self._positions_of = _Positions(body, folder)

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
        ids_S, predicting_T = np.concatenate(ids), np.concatenate(predicting)
        inputs = {
            "input_ids": self._tensor(ids_S)[None],
            "position_ids": self._positions(units, samples),
            "layout": PackedLayout(spans, self.device, self._dtype, self._image_numbers(ids_S), self.group),
        }
        if self._multimodal:
            inputs["mm_token_type_ids"] = self._tensor(ids_S == self._folder.image_token_id)[None]
        by_policy_T = np.concatenate([sample.mask for sample in samples])
        return PackedInputs(
            inputs,
            self._reads(predicting_T, len(ids_S)),
            self._reads(predicting_T, len(ids_S), by_policy_T),
            self._tensor(np.concatenate([s.token_ids for s in samples])),
            self._known_images(refs, known),
            int(np.count_nonzero(by_policy_T)),
            self._routing(samples, units, len(ids_S)),
            self._reads(last_N, len(ids_S)) if self._keeps_last else None,
        )

    def _reads(self, positions: IntArray, num_tokens: int, asked: BoolArray | None = None) -> Reads:
        """The reads of a head.

        Args:
            positions: In the row, one for each value.
            num_tokens: S.
            asked: True for values that it makes; None for all.
        """
        own, count = self.group.own(num_tokens), len(positions)
        here = (positions >= own.start) & (positions < own.stop)
        if asked is not None:
            here &= asked
        if here.all() and self.group.size == 1:
            return Reads(self._tensor(positions), None, count)
        return Reads(self._tensor(positions[here] - own.start), self._tensor(np.flatnonzero(here)), count, self.group)

    def _image_numbers(self, ids_S: IntArray) -> IntArray | None:
        """The number of each token's image, -1 for text; None if no token sees what comes after it."""
        if not self._looks_ahead:
            return None
        is_image_S = ids_S == self._folder.image_token_id
        begins_S = is_image_S & ~np.concatenate([[False], is_image_S[:-1]])
        return np.where(is_image_S, np.cumsum(begins_S) - 1, -1)

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
        own = self.group.own(num_tokens)
        members = devices.moved(torch.from_numpy(members_NS[:, own]), self.device) if self._balances else None
        if known is None:
            return Routing(members)
        recorded_SLK = np.full((num_tokens, *known.shape[1:]), -1, np.int64)
        for sample, members_S in zip(samples, members_NS, strict=True):
            if sample.experts is not None:  # a shared prompt's are those of its last sample, as of all others
                places = np.flatnonzero(members_S)  # the sampler knows nothing of a last token, which predicts none
                recorded_SLK[places[: len(sample.experts)]] = sample.experts
        return Routing(members, self._tensor(recorded_SLK[own]), self._replays)

    def _tensor(self, values: Any) -> torch.Tensor:
        return devices.moved(torch.from_numpy(np.asarray(values, np.int64)), self.device)

    def _known_images(
        self, refs: Sequence[ImageRef], known: Mapping[str, Features]
    ) -> UniqueImages | Sequence[Features] | None:
        if not refs:
            return None
        return [known[ref.hash] for ref in refs] if known else self.images(refs)

    def announce(self, rows: Iterable[Iterable[ImageRef]]) -> None:
        """As ``ImageInputs.announce``, of the images of each row that comes next."""
        unique = [list({ref.hash: ref for ref in row}.values()) for row in rows]
        own = ([row[i] for i in self._own(row)] for row in unique) if self.group.size > 1 else unique
        self._images.announce(ref for row in own for ref in row)

    def images(self, refs: Sequence[ImageRef]) -> UniqueImages:
        """Inputs of the vision tower for at least one image; those of this rank, where several hold a row together."""
        names = [ref.hash if self.share else number for number, ref in enumerate(refs)]
        unique = dict(zip(names, refs, strict=True))
        place = {name: number for number, name in enumerate(unique)}
        own, division = list(unique.values()), None
        if self.group.size > 1:
            own, division = self._divided(own)
        pixels, grids = zip(*map(self._images, own), strict=True)
        grids_U3 = torch.stack(grids)
        return UniqueImages(
            devices.moved(torch.cat(pixels).to(self._dtype), self.device),
            grids_U3,
            self._folder.images.tower_inputs(self._body, grids_U3, self.device, self._dtype),
            tuple(place[name] for name in names),
            division,
        )

    def _divided(self, refs: Sequence[ImageRef]) -> tuple[list[ImageRef], Division]:
        """The images that this rank encodes, a blank one if it is none of these, and the division of all of them."""
        form, own = self._folder.images, self._own(refs)
        grids = [form.grid(ref.width, ref.height) for ref in refs]
        tokens = tuple(form.tokens(ref.width, ref.height) for ref in refs)
        starts = offsets(tokens)
        places = [np.arange(starts[i], starts[i + 1]) for i in own]
        rows = self._tensor(np.concatenate([np.zeros(0, np.int64), *places]))
        return [refs[i] for i in own] or [BLANK], Division(torch.tensor(grids), tokens, rows, self.group)

    def _own(self, refs: Sequence[ImageRef]) -> list[int]:
        """The numbers of the images that this rank encodes; costs are balanced over the group."""
        shape, form = model_shape(self._folder.config), self._folder.images
        grids = [form.grid(ref.width, ref.height) for ref in refs]
        costs = [shape.forward_flops(shape.work(tokens=0, pairs=0, predicted=0, images=[grid])) for grid in grids]
        return balance(costs, self.group.size)[self.group.rank]

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
        body: As of ``Collator``; likewise ``folder``.

    Attributes:
        known: By the tokens and the sizes.
        bytes_held: Bytes of these; at most ``POSITION_BYTES``, or those of one sequence.
    """

    def __init__(self, body: Any, folder: ModelFolder) -> None:
        self._body, self._folder = body, folder
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
        grids = torch.tensor([self._folder.images.grid(ref.width, ref.height) for ref in images])
        types = (ids == self._folder.image_token_id).int()
        positions: torch.Tensor = self._body.get_rope_index(ids[None], types[None], grids)[0]
        return positions[:, 0]


def _inserted_images(sample: Sample) -> tuple[ImageRef, ...]:
    """The images of what follows the prompt."""
    return sample.all_images[len(sample.prompt.images) :]


def shares_prefix(config: LearnerConfig, folder: ModelFolder) -> bool:
    """True if the samples of a prompt share it in their row."""
    return config.share_prefix == "auto" and folder.family.shares_prefix
