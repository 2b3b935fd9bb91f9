"""``mmrl export``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmrl.commands.arguments import add_json
from mmrl.commands.printing import answer, complain, note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    text = "a checkpoint, a run's folder (its newest good checkpoint), or a Hugging Face folder"
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=text)
    text = "a new folder, or an empty one; with --push, also one that is this export, and by default REPO's name"
    parser.add_argument("out", type=Path, metavar="OUT", nargs="?", help=text)
    text = "of a checkpoint: policy, critic, ...; default: the policy, or the reward model that was trained"
    parser.add_argument("--role", metavar="ROLE", help=text)
    text = "of the weights; default: as stored"
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help=text)
    parser.add_argument("--adapter", action="store_true", help="of a run with model.lora: do not merge the adapter")
    text = "of an adapter: the model that was adapted, if it has moved"
    parser.add_argument("--base", metavar="MODEL", help=text)
    parser.add_argument("--shard-size", type=float, metavar="GB", help="most of a file of weights (1.07)")
    parser.add_argument("--push", metavar="REPO", help="push the folder to OWNER/NAME on the hub, as one commit")
    access = parser.add_mutually_exclusive_group()
    text = "make REPO private; default: as the hub does"
    access.add_argument("--private", action="store_const", const=True, help=text)
    access.add_argument("--public", dest="private", action="store_const", const=False, help="make REPO public")
    parser.add_argument("--revision", metavar="BRANCH", help="push to a branch, which is made if there is none")
    parser.add_argument("--message", metavar="TEXT", help="of the commit")


def run(arguments: argparse.Namespace) -> int:
    from mmrl.commands.export.publication import export_and_push
    from mmrl.commands.export.repository import Destination

    destination = Destination.wanted(
        arguments.push, revision=arguments.revision, private=arguments.private, message=arguments.message
    )
    report = export_and_push(
        arguments.checkpoint,
        arguments.out,
        destination,
        role=arguments.role,
        dtype=arguments.dtype,
        shard_gb=arguments.shard_size,
        adapter=arguments.adapter,
        base=arguments.base,
        on_damage=lambda _, error: complain(error),
        tell=note,
    )
    answer(report.data(), report.lines(), as_json=arguments.json)
    return 0
