"""``mmrl check``."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.commands.arguments import add_config, add_json, load
from mmrl.commands.printing import tell

if TYPE_CHECKING:
    from mmrl.config.load import LoadedConfig
    from mmrl.system.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    return tell(check(load(arguments)), as_json=arguments.json)


def check(loaded: LoadedConfig) -> Report:
    """Check all that needs no device: plugins, model files, every row, the rewards, the disk.

    Raises:
        MMRLError: The plugins do not fit the config; all other errors are in the report.
    """
    from mmrl.cluster.process import prepare_process
    from mmrl.commands.check.examination import examine

    prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        return examine(loaded.config, Path(folder))
