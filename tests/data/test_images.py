from __future__ import annotations

import hashlib
import io
import random
import resource
import struct
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from mmrl.data.grid import BudgetSizes, TileSizes
from mmrl.data.images import FORMATS, ImageGrid, MediaStore, blank_file, normalise, normalised_size
from mmrl.errors import ConfigError, DataError, ResourceError
from mmrl.types import RawImage

GRID = ImageGrid(factor=28, min_pixels=56 * 56, max_pixels=1280 * 28 * 28)


def encode(image: Image.Image, format: str = "PNG", **options: Any) -> RawImage:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return RawImage(buffer.getvalue(), label=f"row 7, {format}")


def noise(width: int = 84, height: int = 56, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int) -> bytes:
    """A file of some 60 bytes that claims to be that large."""

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", zlib.compress(b""))
        + png_chunk(b"IEND", b"")
    )


def colour(image: Image.Image, x: int = 28, y: int = 28) -> tuple[int, ...]:
    pixel = image.getpixel((x, y))
    assert isinstance(pixel, tuple)
    return tuple(int(channel) for channel in pixel)


@pytest.mark.parametrize(("factor", "low", "high"), [(28, 3136, 1003520), (32, 4096, 16384 * 1024), (28, 3136, 50176)])
def test_the_size_is_that_of_qwen_vl_utils(factor: int, low: int, high: int) -> None:
    from qwen_vl_utils import smart_resize

    grid, rng, compared = ImageGrid(factor, low, high), random.Random(factor + high), 0
    for _ in range(3000):
        width, height = int(2 ** rng.uniform(1, 13)), int(2 ** rng.uniform(1, 13))
        if max(width, height) / min(width, height) > 100:
            continue
        expected = smart_resize(height, width, factor, low, high)[::-1]
        if min(expected) == 0 or smart_resize(*expected[::-1], factor, low, high)[::-1] != expected:
            continue  # what the processor would resize again; the next test is about these
        compared += 1
        assert grid.size(width, height) == expected
    assert compared > 2000


def test_a_size_is_never_resized_again_and_lies_within_the_limits() -> None:
    grid, rng = ImageGrid(28, 3136, 12544), random.Random(3)
    for _ in range(2000):
        try:
            width, height = grid.size(int(2 ** rng.uniform(1, 13)), int(2 ** rng.uniform(1, 13)))
        except DataError:
            continue
        assert grid.size(width, height) == (width, height)
        assert width % 28 == height % 28 == 0
        assert 3136 <= width * height <= 12544


def test_limits_without_room_for_any_image_are_refused() -> None:
    with pytest.raises(ConfigError, match="No image fits"):
        ImageGrid(28, 4000, 3136)
    with pytest.raises(DataError, match="further apart"):
        ImageGrid(28, 3136, 3136).size(112, 56)


@pytest.mark.parametrize(("fewest", "most"), [(1, 1), (1, 5), (1, 12), (2, 12), (1, 20)])
def test_the_tiles_are_those_that_transformers_cuts_also_out_of_the_stored_image(fewest: int, most: int) -> None:
    from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

    sizes, rng = TileSizes(448, fewest * 448**2, most * 448**2 + 1, 99), random.Random(most)
    assert (sizes.fewest, sizes.most) == (fewest, most)
    for _ in range(500):
        width, height = int(2 ** rng.uniform(5, 12)), int(2 ** rng.uniform(5, 12))
        width, height = sizes.size(width, height)
        cut = get_optimal_tiled_canvas((height, width), (448, 448), fewest, most)
        assert (width, height) == (448 * cut[0], 448 * cut[1])
        assert fewest <= cut[0] * cut[1] <= most and sizes.size(width, height) == (width, height)
        original = int(2 ** rng.uniform(5, 12)), int(2 ** rng.uniform(5, 12))
        cut = get_optimal_tiled_canvas(original[::-1], (448, 448), fewest, most)
        assert sizes.size(*original) == (448 * cut[0], 448 * cut[1])
    # Three by three tiles would become four by four where there may be that many.
    assert sizes.size(1000, 1000) == {1: (448, 448), 5: (896, 896), 12: (1344, 1344), 20: (1792, 1792)}[most]


def test_tiles_that_fit_no_limits_are_refused() -> None:
    for limits in ((3136, 448**2 - 1, 12), (2 * 448**2, 448**2, 12), (13 * 448**2, 20 * 448**2, 12)):
        with pytest.raises(ConfigError, match="in tiles of 448") as caught:
            TileSizes(448, *limits)
        assert ("lower data.min_pixels" in caught.value.remedy) == (limits[0] > 3136)
    assert TileSizes(448, 3136, 20 * 448**2, 12).most == 12
    with pytest.raises(DataError, match="too narrow"):
        TileSizes(448, 3136, 448**2, 12).size(1, 40)


@pytest.mark.parametrize(("side", "most", "tokens"), [(48, 1003520, 280), (24, 50176, 70), (48, 2**22, 1120)])
def test_a_budget_is_spent_as_transformers_spends_it_also_on_the_stored_image(
    side: int, most: int, tokens: int
) -> None:
    from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size

    def resized(width: int, height: int) -> tuple[int, int]:
        height, width = get_aspect_ratio_preserving_size(height, width, side // 3, tokens * 9, 3)
        return width, height

    sizes, rng, again = BudgetSizes(side, (70, 140, 280, 560, 1120), 3136, most), random.Random(most), 0
    assert sizes.tokens == tokens
    for _ in range(2000):
        width, height = int(2 ** rng.uniform(1, 13)), int(2 ** rng.uniform(1, 13))
        if max(width, height) > 200 * min(width, height):
            continue
        expected = resized(width, height)
        again += resized(*expected) != expected
        if max(resized(*expected)) > 150 * min(resized(*expected)):
            continue
        while resized(*expected) != expected:  # the processor would resize it once more
            expected = resized(*expected)
        stored = sizes.size(width, height)
        assert stored == expected == sizes.size(*stored) and stored[0] * stored[1] <= tokens * side**2
    assert again > 100


def test_a_budget_that_fits_no_limits_is_refused() -> None:
    for low, high, remedy in (
        (1, 70 * 48**2 - 1, "raise data.max_pixels to 161280"),
        (200000, 300000, "lower data.min"),
    ):
        with pytest.raises(ConfigError, match="in tokens of 48") as caught:
            BudgetSizes(48, (70, 140, 280), low, high)
        assert caught.value.remedy.startswith(remedy)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied_and_known_before_decoding(format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    raw = encode(noise(224, 168), format, exif=exif)
    with Image.open(io.BytesIO(raw.data)) as image:
        expected = ImageOps.exif_transpose(image).convert("RGB")
    result = normalise(raw, GRID)
    assert normalised_size(raw, GRID) == result.size == ((168, 224) if orientation >= 5 else (224, 168))
    assert np.array_equal(np.asarray(result), np.asarray(expected))


def test_the_size_needs_no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise AssertionError("decoded")

    raws = [encode(noise(200, 100), format) for format in FORMATS]
    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    assert {normalised_size(raw, GRID) for raw in raws} == {GRID.size(200, 100)}


@pytest.mark.parametrize(
    ("image", "format", "options", "expected"),
    [
        (Image.new("RGBA", (56, 56), (0, 0, 0, 0)), "PNG", {}, (255, 255, 255)),
        (Image.new("RGBA", (56, 56), (255, 0, 0, 128)), "PNG", {}, (255, 127, 127)),
        (Image.new("RGBA", (56, 56), (0, 0, 0, 0)), "WEBP", {}, (255, 255, 255)),
        (Image.new("LA", (56, 56), (0, 0)), "PNG", {}, (255, 255, 255)),
        (Image.new("P", (56, 56), 0), "PNG", {"transparency": 0}, (255, 255, 255)),
        (Image.new("P", (56, 56), 0), "GIF", {"transparency": 0}, (255, 255, 255)),
        (Image.new("L", (56, 56), 0), "PNG", {"transparency": 0}, (255, 255, 255)),
        (Image.new("RGB", (56, 56), (1, 2, 3)), "PNG", {"transparency": (1, 2, 3)}, (255, 255, 255)),
        (Image.new("1", (56, 56), 1), "PNG", {}, (255, 255, 255)),
        (Image.new("L", (56, 56), 77), "BMP", {}, (77, 77, 77)),
        (Image.new("I;16", (56, 56), 257 * 100), "PNG", {}, (100, 100, 100)),
        (Image.new("I;16", (56, 56), 65535), "TIFF", {}, (255, 255, 255)),
        (Image.new("CMYK", (56, 56), (0, 255, 255, 0)), "TIFF", {}, (255, 0, 0)),
        (Image.new("RGB", (56, 56), (9, 8, 7)).quantize(4), "PNG", {}, (9, 8, 7)),
        (Image.new("RGB", (56, 56), (9, 8, 7)), "PNG", {"icc_profile": b"no profile"}, (9, 8, 7)),
    ],
    ids=lambda value: value.mode if isinstance(value, Image.Image) else str(value)[:20],
)
def test_every_mode_becomes_one_rgb_result(
    image: Image.Image, format: str, options: dict[str, Any], expected: tuple[int, ...]
) -> None:
    result = normalise(encode(image, format, **options), GRID)
    assert result.mode == "RGB"
    assert result.info == {}
    assert np.ptp(np.asarray(result), axis=(0, 1)).max() == 0
    assert colour(result) == expected


@pytest.mark.parametrize(
    ("kind", "pixel", "expected"),
    [(6, b"\x12\x34\x22\x34\x32\x34\0\0", (255, 255, 255)), (4, b"\x12\x34\xff\xff", (0x12, 0x12, 0x12))],
)
def test_sixteen_bits_may_be_transparent(kind: int, pixel: bytes, expected: tuple[int, ...]) -> None:
    rows = zlib.compress((b"\0" + pixel * 56) * 56)
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 56, 56, 16, kind, 0, 0, 0))
    data = b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")
    assert (np.asarray(normalise(RawImage(data, "row"), GRID)) == expected).all()


@pytest.mark.parametrize(
    ("image", "format", "expected"),
    [
        (Image.new("YCbCr", (56, 56), (100, 50, 200)), "TIFF", (200, 75, 0)),
        (Image.new("LA", (56, 56), (9, 0)), "TIFF", (255, 255, 255)),
        (Image.new("PA", (56, 56), (1, 0)), "TIFF", (255, 255, 255)),
        (Image.new("I;16B", (56, 56), 0x1234), "TIFF", (0x12, 0x12, 0x12)),
        (Image.new("CMYK", (56, 56), (0, 255, 255, 0)), "JPEG", (255, 0, 0)),
        (Image.new("RGB", (56, 56), (0, 0, 0)), "MPO", (0, 0, 0)),
    ],
    ids=lambda value: value.mode if isinstance(value, Image.Image) else str(value),
)
def test_rarer_modes_too(image: Image.Image, format: str, expected: tuple[int, ...]) -> None:
    more = {"save_all": True, "append_images": [Image.new("RGB", (56, 56), "red")]} if format == "MPO" else {}
    assert (np.asarray(normalise(encode(image, format, **more), GRID)) == expected).all()


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animations_give_their_first_frame(format: str) -> None:
    frames = [Image.new("RGB", (56, 56), name) for name in ("red", "blue")]
    options: dict[str, Any] = {"save_all": True, "append_images": frames[1:]} | (
        {"lossless": True} if format == "WEBP" else {}
    )
    assert colour(normalise(encode(frames[0], format, **options), GRID)) == (255, 0, 0)


@pytest.mark.parametrize("size", [(84, 56), (100, 31), (1500, 900), (5, 9)])
def test_normalising_twice_changes_nothing(size: tuple[int, int]) -> None:
    once = normalise(encode(noise(*size)), GRID)
    assert np.array_equal(np.asarray(normalise(encode(once), GRID)), np.asarray(once))


def test_a_resize_is_one_bicubic_resize() -> None:
    image = noise(300, 200)
    expected = image.resize(GRID.size(300, 200), Image.Resampling.BICUBIC)
    assert np.array_equal(np.asarray(normalise(encode(image), GRID)), np.asarray(expected))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image"),
        (encode(noise(), "ICO").data, "no image"),
        (encode(noise()).data[:200], "truncated"),
        (encode(noise(1, 50)).data, "too narrow"),
        (encode(noise(50, 1)).data, "too narrow"),
        (encode(noise(1, 1)).data, "too narrow"),
        (encode(noise(805, 4)).data, "too narrow"),
        (encode(Image.new("F", (56, 56), 0.5), "TIFF").data, "floating-point"),
        (png_header(13000, 13000), "13000x13000"),
        (png_header(2**31 - 1, 2**31 - 1), "decompression bomb"),
        (b"\x89PNG" + bytes(64 * 2**20), "67108868 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_used_is_a_data_error_with_its_label(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        normalise(RawImage(data, label="row 7, images[1]"), GRID)
    assert caught.value.where == "row 7, images[1]"
    assert "0x7" not in str(caught.value), "addresses of objects do not belong in messages"


def test_ten_thousand_mutated_files_give_an_image_or_a_data_error_and_the_size_agrees() -> None:
    grid, files = ImageGrid(28, 56 * 56, 28 * 28 * 16), mutation_seeds()
    refused = accepted = 0
    slowest, before = 0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(10_000):
            rng = random.Random(seed)
            raw = RawImage(mutate(rng.choice(files), files, rng), label="mutant")
            begun = time.process_time()
            found = outcome(raw, grid)
            slowest = max(slowest, time.process_time() - begun)
            assert outcome(raw, grid) == found, f"seed {seed}: not the same twice"
            refused += found.startswith("no image")
            if not found.startswith("no image"):
                accepted += 1
                assert found.startswith(f"{normalised_size(raw, grid)}")
    assert min(refused, accepted) > 1000
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    print(f"{refused} refused, the slowest took {slowest:.2f} s of processor time, {grown} MiB more")
    assert slowest < 10
    assert grown < 700, "50 megapixels take 150 MB in RGB, and a few times that while they are blended"


def outcome(raw: RawImage, grid: ImageGrid) -> str:
    """Size and pixels, or what is wrong; anything but a DataError of this image is a bug."""
    try:
        image = normalise(raw, grid)
    except DataError as error:
        return f"no image: {error}" if error.where == "mutant" else f"without its label: {error}"
    return f"{image.size} {hashlib.sha256(image.tobytes()).hexdigest()}"


def mutation_seeds() -> list[bytes]:
    images: list[tuple[Image.Image, str, dict[str, Any]]] = [(noise(60, 40), format, {}) for format in FORMATS]
    images += [
        (Image.new("RGBA", (40, 60), (1, 2, 3, 9)), "PNG", {}),
        (noise(40, 60).quantize(16), "GIF", {"save_all": True, "append_images": [noise(40, 60, seed=1)]}),
        (noise(40, 60), "TIFF", {"compression": "tiff_lzw"}),
        (noise(40, 60), "JPEG", {"progressive": True}),
        (noise(40, 60), "WEBP", {"lossless": True}),
        (Image.new("I;16", (40, 60), 9000), "PNG", {}),
    ]
    return [encode(image, format, **options).data for image, format, options in images]


def mutate(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Bytes and bits set, most of them in the header; cut short, added to, or spliced with another file."""
    edited = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(min(len(edited), rng.choice([64, 400, 10**6])))
        flipped = edited[place] ^ (1 << rng.randrange(8))
        edited[place] = rng.choice([0, 1, 127, 255, rng.randrange(256), flipped])
    if rng.random() < 0.2:
        del edited[rng.randrange(len(edited)) :]
    if rng.random() < 0.1:
        place = rng.randrange(len(edited) + 1)
        edited[place:place] = rng.randbytes(rng.randint(1, 40))
    if rng.random() < 0.1:
        other, place = rng.choice(others), rng.randrange(len(edited) + 1)
        edited[place:] = other[rng.randrange(len(other)) :]
    return bytes(edited)


BOMB = """
import resource, sys
from mmrl.errors import DataError
from mmrl.data.images import ImageGrid, normalise, normalised_size
from mmrl.types import RawImage
from PIL import Image

Image.init()
grid, refused = ImageGrid(28, 3136, 1003520), []
raws = [RawImage(open(path, "rb").read(), path) for path in sys.argv[1:]]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for raw in raws:
    for use in (normalised_size, normalise):
        try:
            use(raw, grid)
        except DataError as error:
            refused.append(error.what)
print(len(refused), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, refused[0])
"""


def test_a_bomb_is_refused_from_its_header_in_little_memory(tmp_path: Path) -> None:
    rows = zlib.compress(bytes(13000 * (1 + 13000 // 8)), 9)
    header = struct.pack(">IIBBBBB", 13000, 13000, 1, 0, 0, 0, 0)
    bomb = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")
    assert len(bomb) < 30_000
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bomb)
    command = [sys.executable, "-c", BOMB, str(tmp_path / "bomb.png")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    count, kibibytes, message = found.stdout.split(maxsplit=2)
    assert (int(count), message.strip()) == (2, "The image has 13000x13000 pixels")
    assert int(kibibytes) < 64 * 1024


def test_images_of_a_passing_block_are_gone_after_it_and_those_that_were_there_stay(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media", GRID)
    kept = store.add(encode(noise(84, 56)))
    with suppress(KeyError), store.passing():
        passed = store.add(encode(noise(84, 56, seed=1)))
        assert store.add(encode(noise(84, 56), "BMP")).hash == kept.hash and Path(passed.path).exists()
        raise KeyError
    assert [each.name for each in (tmp_path / "media").iterdir()] == [f"{kept.hash}.png"]
    with pytest.raises(DataError):
        store.load(passed)
    later = store.add(encode(noise(84, 56, seed=1)))
    assert later == passed and Path(later.path).exists()
    assert np.array_equal(np.asarray(store.load(later)), np.asarray(noise(84, 56, seed=1)))


def test_the_store_writes_equal_pixels_once_under_their_hash(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media", GRID)
    image = noise(84, 56)
    ref = store.add(encode(image))
    again = store.add(encode(image, "BMP"))
    other = store.add(encode(noise(84, 56, seed=1)))
    assert ref == again != other
    assert ref.hash == hashlib.sha256(b"84x56" + image.tobytes()).hexdigest()
    assert (ref.width, ref.height) == (84, 56)
    assert sorted(p.name for p in (tmp_path / "media").iterdir()) == sorted(f"{r.hash}.png" for r in (ref, other))
    assert np.array_equal(np.asarray(Image.open(ref.path)), np.asarray(image))


def test_an_image_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, raw = MediaStore(tmp_path, GRID), encode(noise())
    ref = store.add(raw)
    Path(ref.path).unlink()
    monkeypatch.setattr("mmrl.data.images.normalise", None)
    assert store.add(raw) == ref
    assert store.load(ref).size == (84, 56)


def test_references_are_bounded_and_an_older_file_is_decoded_to_the_same_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("mmrl.data.images.KNOWN_FILES", 3)
    store = MediaStore(tmp_path, GRID)
    files = [encode(noise(seed=seed)) for seed in range(5)]
    refs = [store.add(file) for file in files]
    assert list(store._refs.values()) == refs[2:]
    assert [store.add(file) for file in files] == refs and len(store._refs) == 3


def test_the_cache_is_bounded_and_forgets_the_least_recently_used(tmp_path: Path) -> None:
    store = MediaStore(tmp_path, GRID, cache_bytes=2 * 3 * 84 * 56)
    first, second, third = (store.add(encode(noise(seed=seed))) for seed in range(3))
    for ref in (first, second, third):
        Path(ref.path).rename(ref.path + ".away")
    assert np.array_equal(np.asarray(store.load(second)), np.asarray(noise(seed=1)))
    assert np.array_equal(np.asarray(store.load(third)), np.asarray(noise(seed=2)))
    with pytest.raises(DataError, match="cannot be read"):
        store.load(first)
    Path(first.path + ".away").rename(first.path)
    store.load(first)
    with pytest.raises(DataError, match="cannot be read"):
        store.load(second)


@pytest.mark.parametrize("damage", ["other pixels", "truncated"])
def test_a_damaged_file_is_noticed_when_it_is_read(tmp_path: Path, damage: str) -> None:
    ref = MediaStore(tmp_path, GRID).add(encode(noise()))
    path = Path(ref.path)
    path.write_bytes(encode(noise(seed=5)).data if damage == "other pixels" else path.read_bytes()[:100])
    with pytest.raises(DataError) as caught:
        MediaStore(tmp_path, GRID).load(ref)
    assert caught.value.where == ref.path


def test_a_store_that_cannot_be_written_is_a_resource_error(tmp_path: Path) -> None:
    (tmp_path / "media").write_text("a file where the folder should be")
    with pytest.raises(ResourceError, match="cannot be stored"):
        MediaStore(tmp_path / "media", GRID).add(encode(noise()))


def test_a_blank_image_has_the_size_of_the_other_and_one_grey(tmp_path, picture):
    store = MediaStore(tmp_path, ImageGrid(28, 3136, 50176))
    ref = store.add(picture(60, 90))
    blank = store.blank(ref)
    assert (blank.width, blank.height) == (ref.width, ref.height) and blank.hash != ref.hash
    assert np.unique(np.asarray(MediaStore(tmp_path, store.grid).load(blank))).tolist() == [128]
    assert store.blank(ref) == blank and blank.file_size == ref.file_size == (60, 90)


@pytest.mark.parametrize(
    ("size", "orientation", "file_size"),
    [
        ((1600, 1200), 1, (1600, 1200)),
        ((1600, 1200), 6, (1200, 1600)),
        ((252, 168), 1, (252, 168)),
        ((8, 8), 3, (8, 8)),
    ],
)
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_a_reference_has_the_size_of_the_file_as_viewers_show_it(size, orientation, file_size, format, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    raw, store = encode(noise(*size), format, exif=exif), MediaStore(tmp_path, ImageGrid(28, 3136, 50176))
    ref = store.add(raw)
    with Image.open(ref.path) as stored:
        assert stored.size == (ref.width, ref.height) == normalised_size(raw, store.grid)
    assert ref.file_size == store.add(raw).file_size == file_size
    measured = store.measure(raw)  # as tall and as wide, without a pixel
    assert measured == replace(ref, hash="", path="")


def test_the_file_of_a_blank_image_is_upright_and_becomes_the_same_blank_image(tmp_path):
    image, file = Image.new("RGB", (90, 40), "red"), io.BytesIO()
    exif = image.getexif()
    exif[0x0112] = 6  # shown turned by 90 degrees
    image.save(file, "JPEG", exif=exif)
    raw, store = RawImage(file.getvalue(), "x"), MediaStore(tmp_path, ImageGrid(28, 28 * 28, 10**6))
    blank = blank_file(raw)
    assert Image.open(io.BytesIO(blank.data)).size == (40, 90)
    assert store.add(blank) == store.blank(store.add(raw)) and blank.label == "x"
