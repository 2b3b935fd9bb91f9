"""Notes, in every process of a run, which functions a prompt passes through; `architecture.py --walk` says what counts.

A copy of this file that is called ``sitecustomize`` and lies on PYTHONPATH begins with each process. The environment
tells what to follow: WALK_ROOT (the checkout), WALK_WORD (a word that is in one row alone), WALK_NOTES (a folder).
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

DEPTH = 12
"""Containers and records inside each other that are searched."""
FEWEST_TOKENS = 4
"""Of a completion that is known by its tokens: fewer are found anywhere."""
START, END = "Trainer.train_step", "DeepSpeedEngine.step"


class Follower:
    """A profile function, see ``sys.setprofile``.

    Notes are lines [time, kind, where, name]: of a ``call`` its file and function, of a ``carrier`` its module and
    class, one for each, and an ``end``. A process that does not train, such as a reward's, notes all that it does.
    """

    def __init__(self, root: str, word: str, notes: Path, *, trains: bool) -> None:
        self._root, self._words = f"{root}/", {word}
        self._encoded, self._tokens = set[bytes](), set[bytes]()
        self._notes = notes.open("a", buffering=1)
        self._noted = set[tuple[str, str, str]]()
        self._files: dict[CodeType, str] = {}
        self._is_on, self._is_over = not trains, False
        self._own = threading.local()

    def __call__(self, frame: FrameType, event: str, answer: Any) -> None:
        code = frame.f_code
        if not self._is_on:
            self._is_on = code.co_qualname == START
        elif code.co_qualname == END:
            self._is_over = True
            self._note("end", "", "")
        if self._is_over or not self._is_on or event not in ("call", "return") or not self._file(code):
            return
        if getattr(self._own, "is_busy", False):  # with properties of records that are searched
            return
        self._own.is_busy = True
        try:
            found = [self._carries(value, DEPTH) for value in (_arguments(frame) if event == "call" else [answer])]
            if any(found) and not _is_property(frame):
                self._note("call", self._file(code), code.co_qualname.replace(".<locals>", ""))
        finally:
            self._own.is_busy = False

    def _file(self, code: CodeType) -> str:
        """Relative to the root; empty of code elsewhere and of what has no name."""
        if code not in self._files:
            path = code.co_filename
            is_ours = path.startswith(tuple(self._root + folder for folder in ("mmrl/", "plugins/", "datasets/")))
            self._files[code] = path.removeprefix(self._root) if is_ours and code.co_name[0] != "<" else ""
        return self._files[code]

    def _carries(self, value: Any, depth: int) -> bool:
        """Whether a value carries the prompt; notes the records on the way to it."""
        if isinstance(value, str):
            return any(word in value for word in self._words)
        if isinstance(value, bytes):
            return value in self._encoded
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            return self._holds_tokens(value)
        if depth == 0 or isinstance(value, type):
            return False
        if isinstance(value, Mapping):
            parts = [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            parts = list(value)
        elif is_dataclass(value):
            parts = [getattr(value, field.name, None) for field in fields(value)]
        else:
            return False
        found = [self._carries(part, depth - 1) for part in parts]
        kind = type(value)
        if any(found) and kind.__module__.startswith("mmrl") and (is_dataclass(kind) or hasattr(kind, "_fields")):
            self._note("carrier", kind.__module__, kind.__name__)
            self._learn(value)
        return any(found)

    def _learn(self, value: Any) -> None:
        """How else the row is known: by its image's file and hash, and by tokens of the prompt or of completions."""
        if isinstance(segments := getattr(value, "segments", None), tuple):
            self._tokens |= {_bytes(each.token_ids) for each in segments if len(each.token_ids) >= FEWEST_TOKENS}
        elif isinstance(images := getattr(value, "images", None), tuple):
            self._words |= {image.hash for image in images if hasattr(image, "hash")}
            self._encoded |= {image.data for image in images if hasattr(image, "data")}
            self._tokens |= {_bytes(value.token_ids)} if hasattr(value, "token_ids") else set()

    def _holds_tokens(self, array: Any) -> bool:
        if not self._tokens or "int" not in str(array.dtype):
            return False
        content = _bytes(array.detach().cpu().numpy() if hasattr(array, "detach") else array)
        return any(tokens in content for tokens in self._tokens)

    def _note(self, kind: str, where: str, name: str) -> None:
        if (kind, where, name) not in self._noted:
            self._noted.add((kind, where, name))
            self._notes.write(json.dumps([time.monotonic(), kind, where, name]) + "\n")


def _bytes(ids: Any) -> bytes:
    found: bytes = ids.astype("int64").tobytes()
    return found


def _arguments(frame: FrameType) -> list[Any]:
    """All but ``self`` and ``cls``."""
    code, values = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return [values[name] for name in code.co_varnames[:count] if name in values and name not in ("self", "cls")]


def _is_property(frame: FrameType) -> bool:
    found = inspect.getattr_static(type(frame.f_locals.get("self")), frame.f_code.co_name, None)
    return isinstance(found, (property, cached_property))


if __name__ == "sitecustomize":
    folder = Path(os.environ["WALK_NOTES"])
    follower = Follower(
        os.environ["WALK_ROOT"], os.environ["WALK_WORD"], folder / str(os.getpid()), trains="mmrl" in sys.orig_argv
    )
    threading.setprofile(follower)
    sys.setprofile(follower)
