"""The tasks of a process that ``child_command`` starts, which are commands of ``mmrl``; this is the process's end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mmrl.errors import MMRLError
from mmrl.system.signals import SIGNALS, Interruption, Request, Stopped, prepare_exit

if TYPE_CHECKING:
    from mmrl.config.load import LoadedConfig

Answer = dict[str, Any]


def serve() -> None:
    """Do the requested task, and exit as its command."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # Ray's processes block SIGINT, and their children with them
    finish = prepare_exit()
    with Interruption() as interruption:
        code = _serve(interruption)
    finish(code)
    sys.exit(code)


def _serve(interruption: Interruption) -> int:
    outcome: dict[str, Any] = {"exit_code": 1}
    place = None
    try:
        caller = os.fdopen(os.dup(0), "rb")
        with open(os.devnull, "rb") as nowhere:
            os.dup2(nowhere.fileno(), 0)
        request = json.loads(caller.readline())
        place = Path(request["outcome"])
        threading.Thread(target=_watch, args=(caller, interruption), daemon=True).start()
        sys.argv = [f"mmrl.{request['task']}"]
        outcome = {"exit_code": 0, "answer": TASKS[request["task"]](request, interruption)}
    except Stopped as stopped:
        outcome = {"exit_code": stopped.exit_code, "message": str(stopped)}
    except MMRLError as error:
        outcome = {"exit_code": error.exit_code, "error": _fields(error)}
    except Exception as error:
        outcome = {"exit_code": 1, "message": f"{type(error).__name__}: {error}", "bug": traceback.format_exc()}
    if place is not None:
        from mmrl.system.redaction import Redactor

        with contextlib.suppress(OSError):
            place.write_text(json.dumps(Redactor().plain(outcome)), encoding="ascii")
    return int(outcome["exit_code"])


def _watch(caller: IO[bytes], interruption: Interruption) -> None:
    """End as after SIGTERM when the caller says so, or is gone."""
    line = caller.readline()
    interruption.ask(Request(*json.loads(line)) if line else Request("as the program that started it is gone", 10))


def _fields(error: MMRLError) -> dict[str, Any]:
    parts = {name: getattr(error, name) for name in ("what", "where", "possible", "remedy")}
    return {
        **parts,
        "classes": [each.__name__ for each in type(error).__mro__],
        "details": getattr(error, "details", ""),
    }


def _loaded(request: Mapping[str, Any]) -> LoadedConfig:
    """The checked config of a request, whose secrets are kept out of all texts from now on."""
    from mmrl.config.load import LoadedConfig, from_mapping
    from mmrl.plugin_host.registry import options_class
    from mmrl.system.redaction import remember_secrets

    remember_secrets(request["config"])
    return LoadedConfig(from_mapping(request["config"], options_class=options_class), request.get("origins", {}))


def _train(request: Mapping[str, Any], interruption: Interruption) -> Answer:
    from mmrl.commands.train import train

    train(_loaded(request), interruption, allowed=request["allowed"])
    return {}


def _check(request: Mapping[str, Any], interruption: Interruption) -> Answer:
    from mmrl.commands.check.command import check

    report = check(_loaded(request))
    lines = [*report.text(), *(f"error      {error}" for error in report.errors)]
    return {"data": dict(report.complete()), "text": "\n".join(lines)}


def _evaluate(request: Mapping[str, Any], interruption: Interruption) -> Answer:
    from mmrl.commands.eval.command import evaluated
    from mmrl.config.yaml_tree import Located

    config, output = request["config"], request["options"]["output"]
    configs = [] if config is None else [Path(config) if isinstance(config, str) else Located.of(config, "config")]
    overrides = [Located.of_dotted(request["overrides"], "overrides")]
    options = {**request["options"], "output": None if output is None else Path(output)}
    found = evaluated(request["model"], configs, overrides, options, interruption)
    return {"data": found.data(), "text": "\n".join(found.lines())}


def _export(request: Mapping[str, Any], interruption: Interruption) -> Answer:
    from mmrl.commands.export.publication import export_and_push
    from mmrl.commands.export.repository import Destination
    from mmrl.commands.printing import complain, note

    source, out = Path(request["source"]), None if request["out"] is None else Path(request["out"])
    report = export_and_push(
        source,
        out,
        Destination.wanted(**request["push"]),
        **request["options"],
        on_damage=lambda _, error: complain(error),
        tell=note,
    )
    return {"data": report.data(), "text": "\n".join(report.lines())}


def _sweep(request: Mapping[str, Any], interruption: Interruption) -> Answer:
    from mmrl.commands.sweep.command import raise_for, sweep
    from mmrl.config.yaml_tree import Located

    config = request["config"]
    paths = [
        Path(config) if isinstance(config, str) else Located.of(config, "config"),
        Located.of(request["given"], "arguments of mmrl.sweep"),
        Located.of_dotted(request["overrides"], "overrides"),
    ]
    options = {**request["options"], "folder": Path(request["options"]["folder"])}
    raise_for(sweep(paths, request["words"], interruption, **options))
    return {}


TASKS = {"train": _train, "check": _check, "evaluate": _evaluate, "export": _export, "sweep": _sweep}
