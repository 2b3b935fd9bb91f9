"""Pictures in the conversations that `check` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmrl.commands.check.episodes import decoded
from mmrl.engine.aids.tiny_model import write_model
from mmrl.engine.network.folder import ModelFolder
from mmrl.types import ImageRef


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "told"), [((84, 56), "84x56, 6"), (None, "84x56, 6"), ((90, 60), "84x56 of 90x60, 6")]
)
def test_a_resized_picture_is_marked_with_both_sizes(file: tuple[int, int] | None, told: str, tmp_path: Path) -> None:
    folder = ModelFolder.open(str(write_model(tmp_path / "model")))
    ref = ImageRef("a" * 64, 84, 56, "a.png", file)
    ids = folder.tokenizer(f"See {folder.images.expansion(84, 56)[0]}"[:4])["input_ids"]
    tokens = [*ids, *[folder.image_token_id] * 6]
    import numpy as np

    assert decoded(np.array(tokens, np.int32), [ref], folder).endswith(f"[image aaaaaaaa {told} tokens]")
