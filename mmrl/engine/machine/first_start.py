"""The sign that engines start for the first time on this machine, which takes minutes; later starts take seconds."""

from __future__ import annotations

import os
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path


def once(*, samples_with_vllm: bool) -> list[str]:
    """The work of this start that later ones need not do: compile packages, look at vLLM's models.

    Python keeps a compiled file beside each module. vLLM keeps what it has found out of its models in a folder, by
    default ``~/.cache/vllm``: `VLLM_CACHE_ROOT <https://docs.vllm.ai/en/latest/configuration/env_vars.html>`_. Neither
    is a sign where Python writes no compiled files, as every start is slow then.
    """
    packages = ["deepspeed", *(["vllm"] if samples_with_vllm else [])]
    found = []
    if not sys.dont_write_bytecode and not all(map(_is_compiled, packages)):
        found.append(f"Python compiles {' and '.join(packages)}")
    if samples_with_vllm and not _has_files(_vllm_cache()):
        found.append("vLLM looks at its models")
    return found


def _is_compiled(package: str) -> bool:
    """True if Python has imported the package before, or it is not there or has no source."""
    spec = find_spec(package)
    origin = None if spec is None else spec.origin
    return origin is None or not origin.endswith(".py") or Path(cache_from_source(origin)).exists()


def _vllm_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("VLLM_CACHE_ROOT") or f"{home}/vllm").expanduser()


def _has_files(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())
