"""``mmrl export``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmrl.commands.arguments import add_json
from mmrl.commands.printing import answer, complain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    text = "a checkpoint, a run's folder (its newest good checkpoint), or a Hugging Face folder"
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=text)
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder, or an empty one")
    text = "of the weights; default: as stored"
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help=text)
    parser.add_argument("--adapter", action="store_true", help="of a run with model.lora: do not merge the adapter")
    text = "of an adapter: the model that was adapted, if it has moved"
    parser.add_argument("--base", metavar="MODEL", help=text)
    parser.add_argument("--shard-size", type=float, metavar="GB", help="most of a file of weights (1.07)")


def run(arguments: argparse.Namespace) -> int:
    from mmrl.commands.export.model_folder import export

    report = export(
        arguments.checkpoint,
        arguments.out,
        dtype=arguments.dtype,
        shard_gb=arguments.shard_size,
        adapter=arguments.adapter,
        base=arguments.base,
        on_damage=lambda _, error: complain(error),
    )
    answer(report.data(), report.lines(), as_json=arguments.json)
    return 0
