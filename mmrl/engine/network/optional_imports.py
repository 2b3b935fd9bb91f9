"""Imports of transformers without the packages that it imports if they are there, and that nothing here uses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED = ("sklearn",)
"""scikit-learn brings SciPy and pandas, for a sixth of the seconds that transformers takes to import; transformers
wants it for assisted decoding, where a draft model learns its threshold."""


@contextmanager
def without_unused() -> Iterator[None]:
    """Import what the block imports as if the unused packages were not installed; those imported before stay.

    Afterwards they can be imported as ever.
    """
    absent = [name for name in UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: the import system finds no such module
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
