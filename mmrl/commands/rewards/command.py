"""``mmrl rewards test``."""

from __future__ import annotations

import argparse

from mmrl.commands.arguments import add_json
from mmrl.commands.printing import answer
from mmrl.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    text = "run a reward over recorded completions, without a model: values, timings, disagreements with the record"
    test = commands.add_parser("test", help=text, description=text, allow_abbrev=False)
    test.add_argument("reward", metavar="REWARD", help="a name that `mmrl plugins` lists, or path/to/file.py:name")
    text = "a file of RUN/rollouts, a folder of them or a run's; without any, the built-in samples"
    test.add_argument("--rollouts", nargs="+", action="extend", default=[], metavar="PATH", help=text)
    text = "options of the reward, and label, workers and the like, as in the config"
    test.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=text)
    test.add_argument("--limit", type=int, metavar="N", help="score the first N rollouts only")
    test.add_argument("--timeout", type=float, metavar="S", help="seconds that one call may take, as timeout_s")
    add_json(test)


def run(arguments: argparse.Namespace) -> int:
    from mmrl.commands.rewards.trial import reward_spec, try_reward

    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit is {arguments.limit}", where="mmrl rewards test", possible="1 or more")
    spec = reward_spec(arguments.reward, arguments.set, arguments.timeout)
    trial = try_reward(spec, arguments.rollouts, arguments.limit)
    answer(trial.data(), trial.lines(), as_json=arguments.json, ascii_only=True)
    if trial.error is not None:
        raise trial.error
    return 4 if trial.failed else 0
