"""Pages of digits: answers, what is held out, and looks that are those of the environment."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmrl.errors import DataError
from mmrl.types import Prompt, Turn
from mmrl_datasets.pages import write_pages
from mmrl_datasets.table import Table
from mmrl_environments.zoom import Zoom


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    write_pages(folder, train=20, test=20, warmup=40, looks=0.5, seed=1)
    return folder


def prompts(folder: Path, split: str) -> list[Prompt]:
    return list(Table(Table.Config(path=str(folder), split=split)).load())


def pixels(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def cells(prompt: Prompt) -> dict[int, Any]:
    """The digits of a page, drawn down to 8 x 8 again, by number."""
    page = Image.open(io.BytesIO(prompt.images[0].data)).convert("L").resize((80, 80), Image.Resampling.BICUBIC)
    grey = np.asarray(page)
    return {n + 1: grey[8 * (n // 10) : 8 * (n // 10) + 8, 8 * (n % 10) : 8 * (n % 10) + 8] for n in range(100)}


def test_the_answer_is_the_digit_in_the_cell_that_is_asked_for(folder: Path) -> None:
    from sklearn.datasets import load_digits
    from sklearn.neighbors import KNeighborsClassifier

    source = load_digits()
    model = KNeighborsClassifier(1).fit(255 - source.images.reshape(-1, 64) * (255 / 16), source.target)
    rows = [prompt for split in ("train", "test", "direct") for prompt in prompts(folder, split)]
    asked = [int(prompt.messages[0].content.removeprefix("<image>What digit is in cell ")[:-1]) for prompt in rows]
    read = [model.predict(cells(prompt)[number].reshape(1, 64))[0] for prompt, number in zip(rows, asked, strict=True)]
    assert np.mean([str(found) == prompt.answer for found, prompt in zip(read, rows, strict=True)]) > 0.95
    assert {prompt.demonstration for prompt in rows} <= set("0123456789")


def test_no_digit_of_a_test_page_is_on_another_page(folder: Path) -> None:
    def shown(*splits: str) -> set[bytes]:
        rows = [prompt for split in splits for prompt in prompts(folder, split)]
        return {cell.tobytes() for prompt in rows for cell in cells(prompt).values()}

    assert len(shown("test")) > 300
    assert not shown("test") & shown("train", "warmup")


def test_half_of_the_warm_up_looks_as_the_environment_shows(folder: Path) -> None:
    """The conversation is that of an episode: the same turns, role and pixels."""
    rows, direct = prompts(folder, "warmup"), prompts(folder, "direct")
    looks = [prompt for prompt in rows if len(prompt.images) == 2]
    assert 10 < len(looks) < 30
    zoom = Zoom(Zoom.Config(grid=10, action=r"^zoom (\d+)$", min_side=56))
    for prompt, plain in zip(rows, direct, strict=True):
        assert prompt.images[0].data == plain.images[0].data
        assert prompt.messages[0] == plain.messages[0] and prompt.demonstration == plain.demonstration == prompt.answer
        if len(prompt.images) == 1:
            continue
        _, call, shown = prompt.messages
        zoom.reset(plain, 0)
        answer = asyncio.run(zoom.step(Turn(call.content, (), 0, "stop", 10)))
        assert (shown.role, shown.content) == (answer.role, "<image>")
        (picture,) = answer.content
        assert np.array_equal(np.asarray(picture), pixels(prompt.images[1].data))


def test_pages_that_cannot_be_drawn_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="looks between 0 and 1"):
        write_pages(tmp_path, looks=1.5)
    assert not list(tmp_path.iterdir())


def test_conversations_are_json_in_the_column_of_the_prompt(folder: Path) -> None:
    import pyarrow.parquet as pq

    written = pq.read_table(folder / "warmup.parquet").to_pylist()
    looked = [json.loads(row["problem"]) for row in written if len(row["images"]) == 2]
    assert all([turn["role"] for turn in turns] == ["user", "assistant", "user", "assistant"] for turns in looked)
