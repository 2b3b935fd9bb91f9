"""The tools with which Triton compiles on a machine with a GPU, and vLLM with it: a C compiler and Python's headers."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmrl.errors import ResourceError

HEADER = "Python.h"
SEARCHED = ("CPATH", "C_INCLUDE_PATH")
"""Environment variables with further folders of headers."""


@dataclass(frozen=True, slots=True)
class BuildTools:
    """The tools of this process's machine and Python.

    Attributes:
        wanted: Compilers that Triton looks for: that of CC, which may hold arguments too, else gcc and clang.
        compiler: The first of them that is on the PATH; empty if none is.
        include: The folder in which Triton looks for ``Python.h``.
        has_header: True if it is there, or where a C compiler looks too.
    """

    wanted: tuple[str, ...]
    compiler: str
    include: Path
    has_header: bool

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> BuildTools:
        """The tools of this process."""
        wanted = tuple(environ.get("CC", "").split()[:1]) or ("gcc", "clang")
        compiler = next((command for command in wanted if shutil.which(command)), "")
        include = include_folder()
        searched = [include, *(Path(each) for name in SEARCHED for each in environ.get(name, "").split(":") if each)]
        return cls(wanted, compiler, include, any((each / HEADER).is_file() for each in searched))

    @property
    def compiler_remedy(self) -> str:
        """The next thing to do if there is no compiler."""
        here = Path(sys.executable).with_name(self.wanted[0])
        if here.exists():
            return f"activate the environment, which has it: {here.parent} is not on the PATH"
        if "gcc" in self.wanted:
            return "install one and have it on the PATH: apt-get install gcc (dnf install gcc)"
        return f"install {self.wanted[0]} and have it on the PATH, or unset CC"

    @property
    def header_remedy(self) -> str:
        """The command that brings the headers of a distribution's Python."""
        name = f"python{sysconfig.get_python_version()}"
        return f"apt-get install {name}-dev (dnf install {name}-devel), or use a Python that has its headers"


def include_folder() -> Path:
    """The folder of Python's headers, as Triton 3.9 finds it (``triton/runtime/build.py``)."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme))


def check_build_tools(tools: BuildTools, environ: Mapping[str, str] = os.environ) -> None:
    """Make sure that Triton can compile, or has compiled here before.

    Raises:
        ResourceError: It cannot. Without this, vLLM would fail after it has loaded the model.
    """
    if (tools.compiler and tools.has_header) or _has_compiled(environ):
        return
    if not tools.compiler:
        raise ResourceError(
            f"there is no C compiler ({' or '.join(tools.wanted)}), with which Triton compiles vLLM's kernels",
            where="PATH, CC",
            remedy=tools.compiler_remedy,
        )
    raise ResourceError(
        f"Python's header {HEADER} is missing, without which Triton compiles none of vLLM's kernels",
        where=str(tools.include),
        remedy=tools.header_remedy,
    )


def _has_compiled(environ: Mapping[str, str]) -> bool:
    """True if Triton's cache has the module that it compiles against Python's headers, for this Python."""
    home = environ.get("TRITON_HOME") or os.path.expanduser("~")  # unlike Path.home, without an error if there is none
    cache = Path(environ.get("TRITON_CACHE_DIR") or f"{home}/.triton/cache")
    return any(cache.glob(f"*/cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}"))
