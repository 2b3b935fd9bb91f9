"""The command line of a generator: its options are the keyword arguments of the function that writes."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmrl.errors import DataError, MMRLError


def run(write: Callable[..., None], arguments: Sequence[str] | None = None) -> int:
    """Call ``write(folder, **options)`` with the command line's options; returns the exit code.

    Args:
        write: Its keyword arguments, which all have defaults, are the options; a tuple is given as ``a,b``. Its
            docstring has their help, and its module's the command's.
        arguments: Arguments in place of the process's.
    """
    description = sys.modules[write.__module__].__doc__ or ""
    program = f"mmrl_datasets.{write.__name__.removeprefix('write_')}"
    parser = argparse.ArgumentParser(program, description=description.partition("\n")[0])
    helps = _helps(write)
    parser.add_argument("folder", type=Path, metavar="OUT", help=helps["folder"])
    for name, option in list(inspect.signature(write).parameters.items())[1:]:
        several = isinstance(option.default, tuple)
        shown = ",".join(option.default) if several else option.default
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=_several if several else type(option.default),
            default=option.default,
            metavar="A,B" if several else "N",
            help=f"{helps[name]} ({shown})",
        )
    options: dict[str, Any] = vars(parser.parse_args(arguments))
    try:
        if options.get("seed", 0) < 0:
            raise DataError("a seed is 0 or more", where=f"--seed {options['seed']}")
        write(**options)
    except MMRLError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _helps(write: Callable[..., None]) -> dict[str, str]:
    """The text on each argument in a function's docstring."""
    arguments = (inspect.getdoc(write) or "").partition("Args:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", arguments, re.MULTILINE)
    return {name: " ".join(text.replace("``", "").split()).removesuffix(".") for name, text in found}


def _several(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))
