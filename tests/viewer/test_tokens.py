"""Texts of single tokens, by tokenizers of both kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from mmrl.viewer.tokens import Vocabulary
from tests.viewer.made_run import ids, tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize(
    "text", ["the circle is red", " spaces  and\n\tlines ", "é à la 数学 🙂", "<|im_end|><|image_pad|>x", ""]
)
def test_the_pieces_are_the_text_but_for_bytes_before_a_character(folder: Path, text: str) -> None:
    pieces = Vocabulary.of([folder]).pieces(ids(text).tolist())
    assert pieces is not None and len(pieces) == len(ids(text))
    assert "".join(piece for piece in pieces if not piece.startswith("\\x")) == text


def test_bytes_that_are_no_characters_are_shown(folder: Path) -> None:
    vocabulary, special = Vocabulary.of([folder]), ids("<|im_end|>")[0]
    first, second, third = ids("数").tolist()
    assert vocabulary.pieces([first, special, second]) == ["\\xE6", "<|im_end|>", "\ufffd"]
    assert vocabulary.pieces([first, *ids("red").tolist(), third])[0] == "\\xE6"  # type: ignore[index]
    assert vocabulary.pieces([first, second, third, first]) == ["\\xE6", "\\x95", "数", "\\xE6"]
    assert vocabulary.pieces([99_999]) == ["<99999>"]


def test_a_vocabulary_with_marks_for_spaces_is_read_too(tmp_path: Path) -> None:
    words = {"<s>": 0, "▁the": 1, "▁": 2, "red": 3, "<0xE6>": 4}
    made = Tokenizer(models.BPE(vocab=words, merges=[], byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    assert Vocabulary.of([tmp_path]).pieces([0, 1, 2, 3, 4]) == ["<s>", " the", " ", "red", "<0xE6>"]


def test_a_secret_is_in_no_piece(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "rect-horse-bat")
    pieces = Vocabulary.of([folder]).pieces(ids("say correct-horse-battery now").tolist())
    assert pieces is not None and pieces.count("[redacted]") == 1
    shown = "".join(pieces)
    assert "horse" not in shown and shown.startswith("say cor") and shown.endswith("tery now")


def test_without_a_tokenizer_there_are_no_texts_and_a_reason(tmp_path: Path) -> None:
    nothing = Vocabulary.of([tmp_path, tmp_path / "missing"])
    assert nothing.pieces([1]) is None and "numbers and no texts" in (nothing.problem or "")
    (tmp_path / "tokenizer.json").write_text('{"model": 7}')
    damaged = Vocabulary.of([tmp_path])
    assert damaged.pieces([1]) is None and "the tokenizer cannot be read" in (damaged.problem or "")
