"""``mmrl show``: the resolved config."""

from __future__ import annotations

import argparse

from mmrl.commands.arguments import add_config, add_json, load
from mmrl.commands.printing import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from mmrl.config.load import to_yaml

    loaded = load(arguments)
    if arguments.json:
        print_json({"config": loaded.config.model_dump(mode="json"), "origins": dict(loaded.origins)})
    else:
        print(to_yaml(loaded.config, loaded.origins), end="")
    return 0
