"""Images that a run holds: the driver's objects after many steps are those of a few."""

from __future__ import annotations

import gc
import json
import threading
from collections import Counter

from PIL import Image

from mmrl.data.images import MediaStore
from mmrl.system.freed_memory import FreedMemory
from mmrl.types import EncodedPrompt, ImageRef, RawImage
from tests.faults.runs import at, fake

KNOWN, DECODED, PROMPTS = 8, 10, 3
SIDE = 56


def test_images_and_prompts_of_earlier_steps_are_not_held(models, picture, tmp_path, monkeypatch):
    """20 steps over 60 different images; every cache is full after four."""
    monkeypatch.setattr("mmrl.data.images.KNOWN_FILES", KNOWN)
    monkeypatch.setattr(MediaStore.__init__, "__defaults__", (DECODED * 3 * SIDE**2,))
    rows, held, given_back = [], list[Counter[type]](), list[FreedMemory]()
    monkeypatch.setattr(FreedMemory, "give_back", lambda freed: given_back.append(freed))
    for number in range(60):
        (tmp_path / f"{number}.png").write_bytes(picture(SIDE, SIDE, number).data)
        rows.append({"prompt": f"What is in picture {number}?", "answer": "3", "images": [f"{number}.png"]})

    def count() -> None:
        for thread in threading.enumerate():
            if thread.name in ("mmrl-prompts", "mmrl-rollouts"):
                thread.join()
        gc.collect()
        kinds = RawImage, EncodedPrompt, ImageRef, Image.Image
        held.append(Counter(kind for each in gc.get_objects() for kind in kinds if isinstance(each, kind)))

    with fake(tmp_path, models("qwen2_5_vl")) as runs:
        (tmp_path / "pictures.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        train = {"name": "table", "path": str(tmp_path / "pictures.jsonl"), "images": "images"}
        config = runs.config(
            data={"train": train}, trainer={"steps": 20, "prompts_per_step": PROMPTS, "save_every": 20}
        )
        with at("fake.update", 9, count), at("fake.update", 19, count):
            assert runs.train(config) == 0
    assert len(given_back) == 20, "once a step"
    assert len(list((tmp_path / "run" / "media").glob("*.png"))) == 60
    for each in held:
        assert each[RawImage] == 0, "a file's bytes end with its row"
        assert 0 < each[EncodedPrompt] <= 4 * PROMPTS, "of this step and of the next one"
        assert 0 < each[ImageRef] <= KNOWN + 2 * PROMPTS
        assert 0 < each[Image.Image] <= DECODED
