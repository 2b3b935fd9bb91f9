"""Opens the user's browser where there is a screen."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path


@contextmanager
def opened(url: str | None) -> Iterator[None]:
    """Open an address in the user's browser, if there is a screen; None opens nothing.

    The browser is started with a file that only the user can read and that leads to the address: the words of a command
    line are seen by every user of the machine, and the address holds the token.
    """
    if url is None or not _has_screen():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mmrl-view-") as folder:
        file = Path(folder) / "open.html"
        file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(url)}">')
        threading.Thread(target=webbrowser.open, args=(file.as_uri(),), daemon=True).start()
        yield


def _has_screen() -> bool:
    """True if a browser would show on the user's own screen; over ssh it would not."""
    if "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
