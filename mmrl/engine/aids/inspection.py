"""Compares what the sampler and the learner of one rank hold and read; see ``engine_api.Engine.inspect``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, permutations

import numpy as np
import torch

from mmrl.engine.learner.learner import DeepSpeedLearner
from mmrl.engine.network.eye import Eye, Sight
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.weight_hashes import WeightHashes, learner_weights
from mmrl.engine.network.weights import of_all_ranks
from mmrl.engine.sampler.hf_sampler import HFSampler
from mmrl.engine.sampler.vllm_sampler import VLLMSampler
from mmrl.engine_api import Learner, SamplingRequest
from mmrl.token_columns import POLICY
from mmrl.types import EncodedPrompt, FloatArray, ImageRef, ImageReport, Sample, Segment, WeightReport


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Hashes of what one copy of the sampler holds, and its version."""

    hashes: WeightHashes
    version: int


def held_weights(sampler: VLLMSampler | HFSampler, dtype: torch.dtype, together: int) -> HeldWeights:
    """The weights of a sampler that is awake; collective.

    Args:
        together: Ranks that hold one copy of them.
    """
    held = sampler.with_model(lambda model: WeightHashes.of(model, dtype))
    if together > 1:
        for other in of_all_ranks(held):
            held.add(other)
    return HeldWeights(held, sampler.weight_version)


def compare_weights(
    copies: Sequence[HeldWeights], learner: DeepSpeedLearner, dtype: torch.dtype, together: int
) -> list[WeightReport]:
    """Look each of the learner's weights up in each copy of the sampler's; collective.

    Args:
        copies: None on ranks that only take part in gathering the learner's.
        together: Ranks that hold one copy.
    """
    total, missing = 0, [list[str]() for _ in copies]
    for name, weight in learner_weights(learner.policy, dtype):
        total += 1
        for copy, lacking in zip(copies, missing, strict=True):
            if not copy.hashes.holds(weight, dtype, together):
                lacking.append(name)
    return [
        WeightReport(total, tuple(lacking), (learner.weight_version, copy.version))
        for copy, lacking in zip(copies, missing, strict=True)
    ]


def sights_of_sampler(
    sampler: VLLMSampler | HFSampler, folder: ModelFolder, prompts: Sequence[EncodedPrompt]
) -> list[Eye]:
    """Looks through the tower of an awake sampler at each prompt, which gets a greedy token of its own."""
    eyes = [Eye(folder.family) for _ in prompts]
    for eye, prompt in zip(eyes, prompts, strict=True):
        sampler.forget_prompts()
        sampler.with_model(eye.open)
        try:
            for _ in sampler.generate([SamplingRequest(prompt, 1, 0.0, 1, seed=0)]):
                pass
        finally:
            sampler.with_model(eye.close)
    return eyes


def sights_of_learner(
    learner: DeepSpeedLearner, network: Learner, folder: ModelFolder, prompts: Sequence[EncodedPrompt]
) -> list[Sight]:
    """Looks through the policy's tower at each prompt, in a row of its own; collective.

    Ranks that hold the row together divide its images: each tells what all of them have read.
    """
    eyes = [Eye(folder.family) for _ in prompts]
    end = np.array(folder.vocabulary.eos[:1], np.int32)
    for eye, prompt in zip(eyes, prompts, strict=True):
        learner.forget_images()
        eye.open(learner.policy.model)
        try:
            network.network(POLICY).score([Sample(prompt, (Segment(end, True, np.zeros(1, np.float32)),))])
        finally:
            eye.close()
        eye.forget_blanks(folder)
    return [_of_row(eye.sight, learner.trained.group.size) for eye in eyes]


def _of_row(own: Sight, size: int) -> Sight:
    """The sights of all ranks that hold a row together, as one; collective.

    Args:
        size: Their number.
    """
    first = torch.distributed.get_rank() // size * size
    sights = of_all_ranks(own)[first : first + size] if size > 1 else [own]
    fields = zip(*((each.pixels, each.grids, each.num_features) for each in sights), strict=True)
    return Sight(*(list(chain.from_iterable(field)) for field in fields))


def report(prompt: EncodedPrompt, sampler: Eye | Sight, learner: Eye | Sight, folder: ModelFolder) -> ImageReport:
    """Compares what both have seen of one prompt. A learner may read its images in another order."""
    theirs = _images(sampler, prompt.images, folder)
    found = []
    for order in permutations(range(len(prompt.images))):
        seen = _images(learner, [prompt.images[place] for place in order], folder)
        found.append([seen[order.index(place)] for place in range(len(order))])
    ours = min(found, key=lambda images: max(_gap(a, b) for a, b in zip(theirs, images, strict=True)))
    pairs = list(zip(theirs, ours, strict=True))
    return ImageReport(
        prompt.id,
        max(_gap(a, b) for a, b in pairs),
        all(a.pixels.tobytes() == b.pixels.tobytes() for a, b in pairs),
        sum(a.grid != b.grid for a, b in pairs),
        int((prompt.token_ids == folder.image_token_id).sum()),
        sum(sampler.num_features),
        sum(learner.num_features),
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    """One image as a tower was given it: (P, V) pixels, and its grid, empty where the model has none."""

    pixels: FloatArray
    grid: tuple[int, ...]


def _images(eye: Eye | Sight, refs: Sequence[ImageRef], folder: ModelFolder) -> list[_Seen]:
    """The images that an eye has seen, if they came in this order, without padding; pixels that are missing are left
    out."""
    pixels = [row for call in eye.pixels for row in call]
    grids = [tuple(row) for each in eye.grids for row in each.tolist()]
    found, begin = list[_Seen](), 0
    for number, ref in enumerate(refs):
        count, length = folder.images.seen(folder.images.grid(ref.width, ref.height))
        end = begin + count
        if number == len(refs) - 1:
            end = max(end, len(pixels))  # what is too much belongs to an image too
        own = [row[:length] for row in pixels[begin:end]]
        whole = np.stack(own) if own and all(len(row) == length for row in own) else np.zeros((0, 0), np.float32)
        found.append(_Seen(whole, grids[number] if number < len(grids) else ()))
        begin = end
    return found


def _gap(one: _Seen, other: _Seen) -> float:
    """The largest difference between two images' pixels; infinite if their numbers differ, or there are none."""
    if one.pixels.shape != other.pixels.shape or not one.pixels.size:
        return math.inf
    return float(np.abs(one.pixels - other.pixels).max())
