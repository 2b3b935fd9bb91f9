"""``mmrl view``: shows runs in a browser, from a server that only this machine and this user's browser reach."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmrl.errors import ConfigError

_PORTS = range(1024, 65536)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "mmrl view RUN... [--port N] [--no-browser]"
    parser.description = "Show recorded runs, live ones too, in a browser: curves, rollouts with images and tokens, "
    parser.description += (
        "evaluations, configs. Several runs are compared, seeds of one setting as a band. Ctrl-C ends it."
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or a sweep's for all its runs"
    )
    text = "the port on 127.0.0.1; by default a free one. On another machine: ssh -L N:127.0.0.1:N HOST"
    parser.add_argument("--port", type=int, default=0, metavar="N", help=text)
    parser.add_argument("--no-browser", action="store_true", help="only print the address")


def run(arguments: argparse.Namespace) -> int:
    from mmrl.viewer.browser import opened
    from mmrl.viewer.pages import Pages
    from mmrl.viewer.server import ViewServer

    if arguments.port and arguments.port not in _PORTS:
        what = f"{arguments.port} is no port of a viewer"
        raise ConfigError(what, where="--port", possible=f"{_PORTS.start} to {_PORTS.stop - 1}")
    server = ViewServer(Pages(arguments.runs), arguments.port)
    print(f"{server.url}\nOpen this address; Ctrl-C ends the viewer.", flush=True)
    with opened(None if arguments.no_browser else server.url):
        try:
            server.run()
        except KeyboardInterrupt:
            return 0
    return 0
