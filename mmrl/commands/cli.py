"""The ``mmrl`` command: finds the command that the command line names, runs it, and returns an exit code.

A command is a module with ``add_arguments`` and ``run``, and ``complete`` where words may be left out. It is imported
when it is named, and imports what is heavier than argparse when it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from mmrl.commands.arguments import split_overrides
from mmrl.commands.catalogue import COMMANDS, EPILOG
from mmrl.commands.printing import complain, print_error
from mmrl.errors import MMRLError
from mmrl.system.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code.

    Args:
        argv: By default the process's own words: then the process must end with that code.
    """
    if argv is not None:
        return _run(list(argv))
    from mmrl.system.signals import prepare_exit

    finish = prepare_exit()
    code = _run(sys.argv[1:])
    finish(code)
    return code


def _run(words: list[str]) -> int:
    try:
        arguments = _parse(words)
    except SystemExit as stop:  # argparse has printed help or a usage error
        return int(stop.code or 0)
    is_training = arguments.command in ("train", "sweep") and not arguments.dry_run and "show" not in arguments
    try:
        code: int = arguments.run(arguments)
        if not is_training:
            sys.stdout.flush()
        return code
    except MMRLError as error:
        complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        print_error("mmrl: interrupted\n")
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and not is_training:
            return 0  # the reader of the output has closed it
        print_error(traceback.format_exc())
        return 1
    finally:
        _drop_broken_streams()


def _drop_broken_streams() -> None:
    """Drop output that cannot be written, as the interpreter's last flush would change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _parse(words: list[str]) -> argparse.Namespace:
    """The command and its arguments, with overrides and config files in any order."""
    parser = argparse.ArgumentParser(
        prog="mmrl",
        description="Reinforcement-learning post-training of vision-language models and text LLMs.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mmrl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {
        name: commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        for name, (_, text) in COMMANDS.items()
    }
    overrides: list[str] = []
    if words and words[0] in parsers:
        module, command = import_module(f"mmrl.commands.{COMMANDS[words[0]][0]}"), parsers[words[0]]
        module.add_arguments(command)
        words = getattr(module, "complete", list)(words)
        command.set_defaults(run=module.run)
        if command.get_default("overrides") is not None:
            words, overrides = split_overrides(words)
    arguments, rest = parser.parse_known_args(words)
    has_config = getattr(arguments, "has_config", False)
    unknown = [word for word in rest if word.startswith("-") or not has_config]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)} (overrides are section.key=VALUE)")
    if has_config:
        arguments.config += map(Path, rest)
    arguments.overrides = overrides
    return arguments
