"""Settings of a process before the engines' packages are imported; this module imports none of them."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from mmrl.engine import device
from mmrl.errors import OldNameWarning

LOCK_S = 30
"""Seconds after which a lock that no process of this machine holds is nobody's: other machines may share the folder."""


def prepare_process(*, verbose: bool = False) -> device.DeviceKind:
    """Set what torch, transformers, vLLM and DeepSpeed read when they are imported; tell the device.

    Their notices stay off the console, unless ``verbose`` is set, here or in an earlier call. Warnings of old
    names stay.
    """
    if verbose:
        for name, value in device.VERBOSE.items():
            os.environ.setdefault(name, value)
    for name, value in (device.WAITING | device.PAGES | device.QUIET).items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_LOGGING_LEVEL"] == device.QUIET["VLLM_LOGGING_LEVEL"]:
        logging.getLogger("vllm").setLevel(logging.ERROR)  # vLLM warns before it reads that variable
    forget_stale_builds()
    kind = device.detect()  # imports torch
    device.keep_convolutions_whole()
    os.environ.update(device.variables(kind))
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.simplefilter("ignore", category)
    warnings.simplefilter("default", OldNameWarning)  # one of FutureWarning, and meant for whoever wrote a plugin
    _show_warnings_once()
    return kind


def _show_warnings_once() -> None:
    """Show a warning of a line once. Python does so too, and forgets it whenever anyone changes a filter."""
    shown, show = set[tuple[str, str, int]](), warnings.showwarning

    def once(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if (key := (str(message), filename, lineno)) not in shown:
            shown.add(key)
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = once  # the hook that Python's documentation names for this


@contextlib.contextmanager
def garbage_kept() -> Iterator[None]:
    """Keep objects that a block imports and builds out of garbage collection, in the block and later.

    Each collection takes a second. Blocks do not lie within each other.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.unregister(gc.unfreeze)
        atexit.register(gc.unfreeze)  # extensions complain of objects that are never collected


def host_meeting(bound: socket.socket) -> Any:
    """The store at which ranks find each other, on a socket that is bound; keep it as long as they work.

    torch itself would listen on every interface, and whoever reaches the store can change what it holds.
    """
    import torch

    bound.listen()
    host, port = bound.getsockname()[:2]
    store: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]
    return store(host, port, is_master=True, wait_for_workers=False, master_listen_fd=bound.detach())


def forget_shared_memory() -> None:
    """Take the names away from the shared memory of vLLM's tensor-parallel ranks; it stays as long as they use it.

    To be called before ranks start and when they have: vLLM 0.32 leaves its names behind when a process is killed,
    calls those of CPU ranks the same in every run, and cannot start where they are left.
    """
    stale = set(Path("/dev/shm").glob("*-cpushm_*"))
    mapped = {Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if "/psm_" in line}
    for path in stale | mapped:
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid():
                path.unlink()


def forget_stale_builds() -> None:
    """Remove the files of a killed process that was compiling an extension of torch.

    torch 2.13 waits for ever for its file ``lock`` to vanish, and keeps it open while it compiles.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions"
    for lock in Path(folder).expanduser().rglob("lock"):
        with contextlib.suppress(OSError):
            while lock.stat().st_uid == os.getuid() and not _is_open(lock):
                if time.time() - lock.stat().st_mtime > LOCK_S:
                    lock.unlink()
                time.sleep(0.5)


def _is_open(path: Path) -> bool:
    """True if a process of this user and machine has the file open."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if descriptor.samefile(path):
                return True
    return False
