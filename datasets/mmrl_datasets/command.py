"""The command line of a generator: its options are the keyword arguments of the function that writes."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.errors import MMRLError

_HELP = {
    "train": "training rows",
    "test": "held-out rows",
    "warmup": "rows for a supervised warm-up",
    "seed": "another seed holds out other problems",
}


def run(
    write: Callable[..., None], description: str, helps: Mapping[str, str], arguments: Sequence[str] | None = None
) -> int:
    """Call ``write(folder, **options)`` with the command line's options; returns the exit code.

    Args:
        write: Its keyword arguments, which all have defaults, are the options; a tuple is given as ``a,b``.
        description: A module's docstring.
        helps: Help of each further option.
        arguments: Arguments in place of the process's.
    """
    parser = argparse.ArgumentParser(_name(write), description=description.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="OUT")
    for name, option in list(inspect.signature(write).parameters.items())[1:]:
        several = isinstance(option.default, tuple)
        shown = ",".join(option.default) if several else option.default
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=_several if several else type(option.default),
            default=option.default,
            metavar="A,B" if several else "N",
            help=f"{(_HELP | dict(helps))[name]} ({shown})",
        )
    options: dict[str, Any] = vars(parser.parse_args(arguments))
    try:
        write(**options)
    except MMRLError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _several(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _name(write: Callable[..., None]) -> str:
    return f"mmrl_datasets.{write.__name__.removeprefix('write_')}"
