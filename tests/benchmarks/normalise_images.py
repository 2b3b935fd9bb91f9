"""How fast images are checked and normalised, against Pillow's decoding and the same resize alone, in turns in one run.

    python tests/benchmarks/normalise_images.py [IMAGES]

Photographs are imitated by smooth noise of 512x512, half of them PNG and half JPEG, and resized to 504x504, as for
Qwen2.5-VL. Each distinct file is read several times; nothing is cached between readings.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from mmrl.data.images import ImageGrid, MediaStore, normalise, normalised_size
from mmrl.types import RawImage

GRID = ImageGrid(factor=28, min_pixels=3136, max_pixels=1003520)
DISTINCT, ROUND = 50, 100


def draw(seed: int) -> RawImage:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((512, 512), Image.Resampling.BICUBIC), np.int16)
    grain = rng.integers(-3, 4, smooth.shape, dtype=np.int16)
    buffer = io.BytesIO()
    Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).save(buffer, "PNG" if seed % 2 else "JPEG")
    return RawImage(buffer.getvalue(), f"image {seed}")


def pillow_alone(raw: RawImage) -> None:
    Image.open(io.BytesIO(raw.data)).convert("RGB").resize((504, 504), Image.Resampling.BICUBIC)


def checked_and_normalised(raw: RawImage) -> None:
    normalised_size(raw, GRID)
    normalise(raw, GRID)


def seconds(work: Callable[[RawImage], object], images: list[RawImage]) -> float:
    start = time.perf_counter()
    for raw in images:
        work(raw)
    return time.perf_counter() - start


def main(num_images: int) -> None:
    images = [draw(seed) for seed in range(DISTINCT)]
    totals = {"Pillow alone": 0.0, "checked and normalised": 0.0}
    for start in range(0, num_images, ROUND):
        batch = [images[i % DISTINCT] for i in range(start, min(start + ROUND, num_images))]
        totals["Pillow alone"] += seconds(pillow_alone, batch)
        totals["checked and normalised"] += seconds(checked_and_normalised, batch)
    for name, total in totals.items():
        print(f"{name:<24} {num_images / total:7.1f} images/s")
    print(f"ratio of the rates       {totals['Pillow alone'] / totals['checked and normalised']:7.2f}")
    with tempfile.TemporaryDirectory() as folder:
        added = seconds(MediaStore(Path(folder), GRID).add, images)
    print(f"stored, PNG and hashes   {len(images) / added:7.1f} images/s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
