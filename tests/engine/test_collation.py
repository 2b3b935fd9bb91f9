"""What a packed row is made of, where the caches behind it are full."""

from __future__ import annotations

import threading

import torch

from mmrl.engine import device
from mmrl.engine.learner import collation
from mmrl.engine.learner.collation import Collator
from mmrl.engine.network.policy import load_policy
from mmrl.engine.network.vision import BLANK, ImageInputs
from mmrl.types import ImageRef


def test_positions_are_the_same_when_more_prompts_come_than_are_remembered(vision, monkeypatch):
    body = load_policy(vision.folder, "cpu", "float32", freeze=(), temperature=1.0).model.base_model
    collate = Collator(vision.folder, body, ImageInputs(vision.folder, vision.media), "cpu", torch.float32)
    samples = vision.samples([4, 7, 5, 3, 2, 6])
    expected = [collate([sample]).model_inputs["position_ids"] for sample in samples]
    kept = max(positions.nbytes + len(key[0]) for key, positions in collate._positions_of.known.items())
    monkeypatch.setattr(collation, "POSITION_BYTES", 2 * kept)
    for _ in range(2):
        found = [collate([sample]).model_inputs["position_ids"] for sample in samples]
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        held = [positions.nbytes + len(key[0]) for key, positions in collate._positions_of.known.items()]
        assert 0 < sum(held) == collate._positions_of.bytes_held <= 2 * kept


def test_patches_are_the_same_when_more_images_come_than_are_remembered(vision, picture):
    refs: list[ImageRef] = [vision.media.add(picture(56, 84, seed)) for seed in range(4)]
    whole = ImageInputs(vision.folder, vision.media)
    expected = [whole(ref) for ref in refs]
    small = ImageInputs(vision.folder, vision.media, cache_bytes=2 * expected[0][0].nbytes)
    for _ in range(2):
        for ref, (patches, grid) in zip(refs, expected, strict=True):
            found = small(ref)
            assert torch.equal(found[0], patches) and torch.equal(found[1], grid)
            assert small._used_bytes <= 2 * patches.nbytes and len(small._cache) <= 2


def test_patches_of_announced_images_come_from_threads_and_are_the_same(vision, picture, monkeypatch):
    refs: list[ImageRef] = [vision.media.add(picture(56, 28 + 28 * seed, seed)) for seed in range(12)]
    expected = [ImageInputs(vision.folder, vision.media)(ref) for ref in refs]
    names, load = list[str](), vision.media.load
    monkeypatch.setattr(
        vision.media, "load", lambda ref: names.append(threading.current_thread().name) or load(ref), raising=False
    )
    images = ImageInputs(vision.folder, vision.media, threads=device.READING_THREADS["cuda"])
    images.announce([*refs, BLANK])
    for ref, (patches, grid) in zip(refs, expected, strict=True):
        found = images(ref)
        assert torch.equal(found[0], patches) and torch.equal(found[1], grid)
    assert len(names) == 12 and all("read-ahead" in name for name in names)
    images.announce(refs)  # all are kept
    assert [len(images(ref)[0]) for ref in refs] == [len(patches) for patches, _ in expected] and len(names) == 12


def test_a_learner_announces_images_in_the_order_in_which_it_reads_them(engine, vision, monkeypatch):
    told, used = list[ImageRef](), list[ImageRef]()
    call = ImageInputs.__call__
    monkeypatch.setattr(ImageInputs, "announce", lambda self, refs: told.extend(refs))
    monkeypatch.setattr(ImageInputs, "__call__", lambda self, ref: used.append(ref) or call(self, ref))
    with engine.learning() as learner:
        learner.network("policy").score(vision.samples([4, 7, 5, 3, 2, 6]))
    names = [[*dict.fromkeys(ref.hash for ref in refs if ref is not BLANK)] for refs in (told, used)]
    assert names[0] == names[1] and len(names[0]) > 1
