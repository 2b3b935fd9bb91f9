"""``mmrl schema``: the JSON schema of the config, or of a plugin's options."""

from __future__ import annotations

import argparse

from mmrl.commands.printing import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plugin", metavar="KIND:NAME", help="kind is algorithm, reward, dataset, environment or tracker"
    )


def run(arguments: argparse.Namespace) -> int:
    from mmrl.commands.plugins import kind_and_name
    from mmrl.config.sections import Config
    from mmrl.plugin_host.registry import options_class

    if arguments.plugin is None:
        print_json(Config.model_json_schema())
    else:
        print_json(options_class(*kind_and_name(arguments.plugin, "mmrl schema", "--plugin")).model_json_schema())
    return 0
