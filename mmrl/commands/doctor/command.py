"""``mmrl doctor``."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from mmrl.commands.arguments import add_config, add_json, load
from mmrl.commands.printing import print_json
from mmrl.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, optional=True)
    add_json(parser)
    parser.usage = (
        "mmrl doctor [--quick] [--gpu | --cpu] [--json] [CONFIG...] [section.key=VALUE | --section.key VALUE]..."
    )
    quick = "with a CONFIG, look at machine, versions and nodes alone: start no engine, and audit nothing"
    parser.add_argument("--quick", action="store_true", help=quick)
    device = parser.add_mutually_exclusive_group()
    text = "also train a tiny model for two steps on the {}, and compare every number"
    device.add_argument("--gpu", action="store_const", const="cuda", dest="device", help=text.format("GPU"))
    device.add_argument("--cpu", action="store_const", const="cpu", dest="device", help=text.format("CPU"))


def run(arguments: argparse.Namespace) -> int:
    if arguments.overrides and not arguments.config:
        raise ConfigError("there is no config to override", where=" ".join(arguments.overrides))
    config = load(arguments).config if arguments.config else None
    from mmrl.commands.doctor.examination import examine
    from mmrl.commands.doctor.finding import exit_code, table

    if arguments.device:
        print("mmrl: a tiny model is trained in float32 and in bfloat16; that takes minutes", file=sys.stderr)
    audits = config is not None and not arguments.quick
    if audits:
        print(
            "mmrl: this run's engines are started and audited; that takes minutes (--quick leaves it out)",
            file=sys.stderr,
        )
    findings = examine(config, arguments.device, audits=audits)
    code = exit_code(findings)
    if arguments.json:
        print_json({"exit_code": code, "findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        print("\n".join(table(findings)))
    return code
