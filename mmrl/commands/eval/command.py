"""``mmrl eval``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.commands.arguments import add_config, add_json
from mmrl.commands.printing import answer, complain, print_error, warn

if TYPE_CHECKING:
    from mmrl.commands.eval.results import Results
    from mmrl.config.yaml_tree import Located
    from mmrl.system.signals import Interruption

_OPTIONS = ("on", "best_of", "by", "samples", "temperature", "max_new_tokens", "limit", "blank_images", "output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser, optional=True)
    add_json(parser)
    parser.usage = "mmrl eval [options] [CONFIG...] [section.key=VALUE | --section.key VALUE]..."
    text = "instead of model.path: a model folder, a hub name, a run (its newest good checkpoint) or a checkpoint; the "
    text += "config of a run or checkpoint is its own unless CONFIG is given"
    parser.add_argument("--model", metavar="PATH", help=text)
    parser.add_argument("--on", metavar="NAME", help="the set of data.eval, if it has several by names")
    text = "completions of each prompt; by default trainer.eval_samples; with more than one also pass@k and majority@k"
    parser.add_argument("--samples", type=int, metavar="K", help=text)
    text = "0 is greedy; by default greedy for one completion, else sampler.temperature"
    parser.add_argument("--temperature", type=float, metavar="T", help=text)
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="instead of sampler.max_new_tokens")
    parser.add_argument("--limit", type=int, metavar="N", help="evaluate the first N prompts only")
    text = "also the accuracy and the reward of the best of n completions, for each n up to N (at most --samples)"
    parser.add_argument("--best-of", type=int, metavar="N", help=text)
    text = "what chooses the best one: a component of a reward, or a reward ('model', 'f.py:name', '{name: ...}') that "
    text += "needs not be the config's; by default the weighted sum"
    parser.add_argument("--by", metavar="REWARD", help=text)
    text = "also sample the prompts with images with grey ones instead, and tell the difference"
    parser.add_argument("--blank-images", action="store_true", help=text)
    text = "keep completions and results there; the same command goes on after a kill, without sampling any twice"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=text)


def run(arguments: argparse.Namespace) -> int:
    from mmrl.system.signals import Interruption, Stopped

    options = {name: getattr(arguments, name) for name in _OPTIONS}
    try:
        with Interruption() as interruption:
            results = evaluated(arguments.model, arguments.config, arguments.overrides, options, interruption)
    except Stopped as stopped:
        goes_on = "nothing was kept" if arguments.output is None else "the same command goes on"
        print_error(f"mmrl: {stopped}; {goes_on}\n")
        return stopped.exit_code
    answer(results.data(), results.lines(), as_json=arguments.json)
    return 0


def evaluated(
    model: str | None,
    configs: Sequence[Path | Located],
    overrides: Sequence[str | Located],
    options: Mapping[str, Any],
    interruption: Interruption,
) -> Results:
    """The results of a model, run or checkpoint, with its own config or another; warnings are printed.

    Args:
        options: The fields of ``evaluation.Options``.
    """
    from mmrl.commands.eval.subject import load

    loaded, subject = load(model, configs, overrides, lambda _, error: complain(error))
    warn(loaded.warnings)
    from mmrl.commands.eval.evaluation import evaluate
    from mmrl.commands.eval.options import Options

    config, chosen = loaded.config, Options(**options)
    if subject is None:
        return evaluate(config, chosen, interruption=interruption)
    initial = None
    if subject.initial is not None:
        path, revision = subject.initial
        initial = config.model.model_copy(update={"path": path, "revision": revision})
    with subject.explaining(overrides):
        found = subject.checkpoint
        return evaluate(config, chosen, checkpoint=found, initial=initial, interruption=interruption)
