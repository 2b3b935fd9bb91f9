"""``mmrl plan``."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from mmrl.commands.arguments import add_config, add_json, load
from mmrl.commands.printing import tell
from mmrl.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_json(parser)
    text = "plan for so many ranks with a GPU each; by default cluster.ranks"
    parser.add_argument("--gpus", type=int, metavar="N", help=text)
    text = "of the GPU of each rank; by default the one here"
    parser.add_argument("--memory", type=_positive, metavar="GB", help=text)
    text = "assumed after every prompt, observations included; by default the longest allowed"
    parser.add_argument("--completion-tokens", type=int, metavar="N", help=text)
    text = "load the model on the device here, take three small steps, and estimate the seconds of a whole one"
    parser.add_argument("--measure", action="store_true", help=text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number between 0 and a million")
    return value


def run(arguments: argparse.Namespace) -> int:
    config = load(arguments).config
    from mmrl.cluster.process import prepare_process
    from mmrl.commands.plan.forecast import Assumptions, forecast

    gpus, memory, tokens = arguments.gpus, arguments.memory, arguments.completion_tokens
    most = config.max_completion_tokens
    if tokens is not None and not 0 < tokens <= most:
        limit = "sampler.max_new_tokens" if config.environment is None else "the limits of an episode"
        raise ConfigError(
            f"completions cannot have {tokens} tokens",
            where="--completion-tokens",
            possible=f"1 to {limit}: {most}",
        )
    if arguments.measure and memory is not None:
        raise ConfigError("--measure is for the device that is here", where="--memory", remedy="leave one of them out")
    if gpus is not None and (gpus < 1 or memory is None):
        raise ConfigError(
            f"--gpus {gpus} plans for GPUs", where="--gpus", remedy="name 1 or more, and --memory GB of each"
        )
    assumptions = Assumptions(gpus, None if memory is None else int(memory * 1e9), tokens, arguments.measure)
    prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        return tell(forecast(config, Path(folder), assumptions), as_json=arguments.json)
