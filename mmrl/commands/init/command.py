"""``mmrl init``: a first config, or a plugin package."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return kinds.add_parser(name, help=text, description=text, allow_abbrev=False)

    config = add("config", "write a first config to edit")
    config.add_argument("path", type=Path, metavar="PATH", help="file to write; an existing one is left alone")
    config.add_argument("--model", metavar="PATH", help="model.path")
    text = "data.train.name; by default the installed one that reads files of your own"
    config.add_argument("--dataset", metavar="NAME", help=text)
    config.add_argument("--data", metavar="PATH", help="data.train.path")
    config.add_argument("--algorithm", metavar="NAME", help="algorithm.name")
    for name in ("reward", "tracker"):
        text = f"a {name}'s name; repeat for more"
        config.add_argument(f"--{name}", action="append", default=[], metavar="NAME", help=text)
    text = "translate these, as far as that goes: a YAML config of EasyR1, and KEY=VALUE of its words over it"
    config.add_argument("--from", dest="source", nargs="+", default=[], metavar="FILE", help=text)
    plugin = add(
        "plugin", "write a package of plugins with their tests, to edit: algorithm, reward, environment, monitor"
    )
    plugin.add_argument("name", metavar="NAME", help="of the package, such as my-rewards")
    plugin.add_argument("--path", type=Path, metavar="DIR", help="folder to write it to; by default NAME, which is new")


def run(arguments: argparse.Namespace) -> int:
    (_write_config if arguments.what == "config" else _write_plugin)(arguments)
    return 0


def _write_config(arguments: argparse.Namespace) -> None:
    from mmrl.commands.init.first_config import translated, write_config

    values, left_out = translated(arguments.source) if arguments.source else ({}, [])
    train = values.setdefault("data", {}).setdefault("train", {})
    train |= {"name": arguments.dataset} if arguments.dataset else {}
    train |= {"path": arguments.data} if arguments.data else {}
    for key, name, value in (("model", "path", arguments.model), ("algorithm", "name", arguments.algorithm)):
        values[key] = {**values.get(key, {}), **({name: value} if value else {})}
    for key, names in {"rewards": arguments.reward, "trackers": arguments.tracker}.items():
        values |= {key: [{"name": name} for name in names]} if names else {}
    heading = ["Not translated:", *(f"  {line}" for line in left_out)] if left_out else []
    write_config(arguments.path, values, heading)
    print("\n".join(heading + [""] * bool(heading)), end="")
    print(f"wrote {arguments.path}; replace its <placeholders>, then: mmrl check {shlex.quote(str(arguments.path))}")


def _write_plugin(arguments: argparse.Namespace) -> None:
    from mmrl.plugin_host.starter import module_name, write_plugin

    folder = arguments.path or Path(arguments.name)
    for path in write_plugin(arguments.name, folder):
        print(f"wrote {path}")
    shown = folder if folder.is_absolute() else f"./{folder}"
    module = module_name(arguments.name)
    check = " ".join(f"{kind}:{module}" for kind in ("algorithm", "reward", "environment", "monitor"))
    check = f"mmrl plugins --check {check}"
    print(f'\nnext: pip install -e "{shown}[test]" && {check} && python -m pytest {folder}')
