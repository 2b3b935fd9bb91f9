"""The texts of a run's tokens, one for each, by the tokenizer of its model: ``tokenizers`` alone, no torch."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.system.redaction import Redactor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"


class Vocabulary:
    """Tokens to texts.

    Attributes:
        problem: Why there are no texts; None if there are.
    """

    def __init__(self, tokenizer: Tokenizer | None, problem: str | None = None, *, is_by_byte: bool = False) -> None:
        self._tokenizer, self.problem, self._is_by_byte = tokenizer, problem, is_by_byte
        self._known: dict[int, str | bytes] = {}
        self._special = set() if tokenizer is None else set(tokenizer.get_added_tokens_decoder())

    @classmethod
    def of(cls, folders: Sequence[Path]) -> Vocabulary:
        """The vocabulary of the first folder with a tokenizer."""
        for folder in folders:
            if (file := folder / FILE).is_file():
                return _read(file, file.stat().st_mtime_ns)
        return cls(None, "no checkpoint and no model folder of this run is here, so tokens have numbers and no texts")

    def pieces(self, ids: Sequence[int]) -> list[str] | None:
        """A text for each token, whitespace included and without secrets; None if there is no tokenizer.

        A character of several tokens is at the last of them; those before show their bytes, such as ``\\xE6\\x95``.
        """
        if self._tokenizer is None:
            return None
        decoder, found = codecs.getincrementaldecoder("utf-8")("replace"), list[str]()
        for each in ids:
            known = self._known[each] if each in self._known else self._known.setdefault(each, self._read(each))
            if isinstance(known, str):
                decoder.reset()
                found.append(known)
            else:
                found.append(decoder.decode(known) or "".join(f"\\x{byte:02X}" for byte in known))
        return Redactor().parts(found)

    def _read(self, id_: int) -> str | bytes:
        """A token's text; its bytes where they are no whole characters."""
        assert self._tokenizer is not None
        token = self._tokenizer.id_to_token(id_)
        if token is None:
            return f"<{id_}>"
        if id_ in self._special or not self._is_by_byte:
            return token if id_ in self._special else token.replace("▁", " ")
        raw = bytes(_BYTES.get(each, 0x3F) for each in token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw


@lru_cache(maxsize=4)
def _read(file: Path, changed: int) -> Vocabulary:
    from tokenizers import Tokenizer

    try:
        is_by_byte = "ByteLevel" in json.dumps(json.loads(file.read_bytes()).get("decoder"))
        return Vocabulary(Tokenizer.from_file(str(file)), is_by_byte=is_by_byte)
    except Exception as error:  # tokenizers raises Exception itself
        return Vocabulary(None, f"the tokenizer cannot be read, so tokens have numbers and no texts: {error}")


def _byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for, as GPT-2 has assigned them."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [each for each in range(0x100) if each not in plain]
    return {chr(each): each for each in plain} | {chr(0x100 + i): each for i, each in enumerate(others)}


_BYTES = _byte_letters()
