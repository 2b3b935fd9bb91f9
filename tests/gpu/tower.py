"""The vision tower of Qwen2.5-VL-3B: attention in a loop over windows, and in one variable-length call."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.bench import Bench, gigabytes, lacks_image_features, milliseconds
from tests.gpu.published import QWEN_3B, TRY, write
from tests.gpu.row import Row

SIZES = ((700, 280), (1120, 896))
"""Pixels: 1,000 and 5,120 patches."""
LOOP, ONE_CALL = "sdpa", "mmrl_flash_tower"
"""Names of the attention functions in transformers."""
LIMIT = 0.05
"""Relative difference of features and of a gradient in bfloat16, after all layers."""


def run(bench: Bench) -> None:
    if reason := lacks_image_features():
        bench.skip("all of it", reason)
        return
    widths = replace(bench.pick(QWEN_3B, TRY), layers=1, vocabulary=600)
    policy, collate, media = _tower(bench, write(bench, bench.folder / "model", widths, vision=True))
    ways = [LOOP]
    if bench.kind == "cuda":
        ways.append(ONE_CALL)
    else:
        bench.skip("one call", "its kernel needs a GPU")
    for size in bench.pick(SIZES, ((84, 56), (112, 140))):
        images, found = collate.images([_drawn(media, *size)]), dict[str, Any]()
        patches = len(images.pixels)
        for way in ways:
            bench.attempt(f"{patches} patches, {way}", partial(_time, bench, policy, images, way, found))
        if len(found) == 2:
            bench.attempt(f"{patches} patches, {ONE_CALL} = {LOOP}", partial(_compare, bench, found))


def _tower(bench: Bench, folder: Path) -> tuple[Any, Any, Any]:
    """A policy, what makes its inputs, and where its images are."""
    import torch

    from mmrl.data.images import MediaStore
    from mmrl.engine.learner.collation import Collator
    from mmrl.engine.network.folder import ModelFolder
    from mmrl.engine.network.policy import load_policy
    from mmrl.engine.network.vision import ImageInputs

    model = ModelFolder.open(str(folder))
    policy = load_policy(model, bench.kind, "bfloat16", freeze=(), temperature=1.0).to(bench.device)
    media = MediaStore(bench.folder / "media", model.image_sizes(3136, 2_000_000))
    inputs = ImageInputs(model, media)
    return policy, Collator(model, policy.model.base_model, inputs, bench.device, torch.bfloat16), media


def _drawn(media: Any, width: int, height: int) -> Any:
    """The reference of an image of noise."""
    from PIL import Image

    from mmrl.types import RawImage

    noise = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG", compress_level=1)
    return media.add(RawImage(buffer.getvalue(), "noise"))


def _time(bench: Bench, policy: Any, images: Any, way: str, found: dict[str, Any], name: str) -> Row:
    import torch

    policy.model.set_attn_implementation({"vision_config": way})
    weights = list(policy.model.base_model.visual.parameters())

    def forward() -> Any:
        return policy(images)[0][0]

    def both() -> Any:
        features = forward()
        return features.detach(), torch.autograd.grad(features.float().square().mean(), weights)[0]

    with torch.no_grad():
        once = bench.seconds(forward)
    twice, peak = bench.seconds(both), bench.peak_bytes(both)
    found[way] = both()
    return bench.row(name, f"{milliseconds(once)} forward, {milliseconds(twice)} with backward, peak {gigabytes(peak)}")


def _compare(bench: Bench, found: dict[str, Any], name: str) -> Row:
    pairs = zip(found[ONE_CALL], found[LOOP], strict=True)
    features, gradient = (float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
    value = f"relative difference of features {features:.1e}, of the patch projection's gradient {gradient:.1e}"
    return bench.row(name, value, good=max(features, gradient) <= LIMIT, why=f"limit {LIMIT:g}")
