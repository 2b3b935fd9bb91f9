"""The ``mmrl`` command: reads the command line, calls the library, prints, and returns an exit code.

Everything heavier than argparse is imported inside the command that needs it, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mmrl.errors import ConfigError, MMRLError
from mmrl.system.version import __version__

if TYPE_CHECKING:
    from mmrl.commands.eval.results import Results
    from mmrl.config.load import LoadedConfig
    from mmrl.config.sections import Kind
    from mmrl.system.report import Report
    from mmrl.system.signals import Interruption

_OVERRIDE = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*=.*|--[A-Za-z_][\w-]*(\.[\w-]+)+(=.*)?", re.DOTALL)
_PROFILED = 2
"""Steps that --profile traces by default."""
_OVERRIDES = """\
section.key=VALUE changes one value, which is YAML. A plugin that is written whole, with its name, replaces the earlier
one and all of its options: data.train={name: NAME, path: PATH}; without a name the mapping changes options."""
_EXIT_CODES = """\
exit codes: 0 done, 1 a bug, 2 bad config or usage, 3 data, 4 a plugin, 5 resources, 6 the numbers,
10 stopped by a signal and ready to go on, 130 Ctrl-C"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code.

    Args:
        argv: By default what the process was started with: then the process is to end with that code.
    """
    if argv is not None:
        return _run(list(argv))
    from mmrl.system.signals import prepare_exit

    finish = prepare_exit()
    code = _run(sys.argv[1:])
    finish(code)
    return code


def _run(words: list[str]) -> int:
    try:
        arguments = _parse(words)
    except SystemExit as stop:  # argparse has printed help or a usage error
        return int(stop.code or 0)
    is_training = arguments.command == "train" and not arguments.dry_run
    try:
        code: int = arguments.run(arguments)
        if not is_training:
            sys.stdout.flush()
        return code
    except MMRLError as error:
        _complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        _print_error("mmrl: interrupted\n")
        return 130
    except Exception as error:
        if isinstance(error, BrokenPipeError) and not is_training:
            return 0  # who reads what the command prints has seen enough
        _print_error(traceback.format_exc())
        return 1
    finally:
        _drop_broken_streams()


def _drop_broken_streams() -> None:
    """Drop what stdout and stderr could not take, as the interpreter's last flush would change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _parse(words: list[str]) -> argparse.Namespace:
    """The command and its arguments, with overrides and config files in any order."""
    parser = _parser()
    overrides: list[str] = []
    # Its number may be left out, and then the next word is none of its own.
    words = [f"{a}={_PROFILED}" if a == "--profile" and not b.isdecimal() else a for a, b in pairwise([*words, ""])]
    if words and words[0] in _OVERRIDABLE:
        words, overrides = _split_overrides(words)
    arguments, rest = parser.parse_known_args(words)
    unknown = [word for word in rest if word.startswith("-") or arguments.command not in _CONFIG_COMMANDS]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)} (overrides are section.key=VALUE)")
    if arguments.command in _CONFIG_COMMANDS:
        arguments.config += map(Path, rest)
    arguments.overrides = overrides
    return arguments


def _split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words for argparse, and the overrides among them: ``a.b=v``, ``--a.b=v`` or ``--a.b v``."""
    others: list[str] = []
    overrides: list[str] = []
    remaining = iter(words)
    for word in remaining:
        is_override = _OVERRIDE.fullmatch(word)
        (overrides if is_override else others).append(word)
        if is_override and "=" not in word:
            overrides += [value for value in [next(remaining, None)] if value is not None]
    return others, overrides


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mmrl",
        description="Reinforcement-learning post-training of vision-language models and text LLMs.",
        epilog=_EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mmrl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Any, text: str, *, answers_json: bool = False) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(run=run)
        if name in _CONFIG_COMMANDS:
            command.usage = f"mmrl {name} [options] CONFIG... [section.key=VALUE | --section.key VALUE]..."
            some = "*" if name in _CONFIG_OPTIONAL else "+"
            command.add_argument("config", nargs=some, type=Path, metavar="CONFIG", help="YAML files, later ones win")
            command.epilog = _OVERRIDES
        if answers_json:
            command.add_argument("--json", action="store_true", help="answer in JSON")
        return command

    train = add("train", _train, "train a policy")
    train.add_argument("--dry-run", action="store_true", help="stop before the first model is loaded")
    text = "auto (the default): go on with the run in trainer.run_dir, if there is one; never: refuse to; a path of "
    text += "another run or of a checkpoint: begin a new run from there"
    train.add_argument("--resume", default="auto", metavar="auto|never|PATH", help=text)
    text = "do not go on from an earlier checkpoint if the newest is damaged"
    train.add_argument("--strict-resume", action="store_true", help=text)
    text = "go on though this key has changed since the checkpoint; repeat for more"
    train.add_argument("--allow-change", action="append", default=[], metavar="KEY", help=text)
    text = f"write a trace of rank 0 to RUN/profile, for Perfetto: of {_PROFILED} steps, or of STEPS"
    verbose = "show what the engines' libraries write; without it, RUN/engines.log has what they write while they start"
    train.add_argument("--verbose", action="store_true", help=verbose)
    train.add_argument("--profile", type=_steps, default=0, metavar="STEPS", help=text)
    add("check", _check, "check config, plugins and data, without a GPU", answers_json=True)
    _add_plan(add("plan", _plan, "tell what a run takes in memory and time, before it starts", answers_json=True))
    add("show", _show, "print the resolved config and where each value was written", answers_json=True)
    _add_eval(add("eval", _eval, "evaluate a model, a run or a checkpoint on data.eval", answers_json=True))
    _add_export(add("export", _export, "write a checkpoint as a model folder, and compare the two", answers_json=True))
    plugins = add("plugins", _plugins, "list the installed plugins", answers_json=True)
    text = "try each, or those named, on the checks of mmrl.testing; kinds are algorithm, reward, dataset and tracker"
    plugins.add_argument("--check", nargs="*", metavar="KIND:NAME", help=text)
    schema = add("schema", _schema, "print the JSON schema of the config, or of a plugin's options")
    schema.add_argument("--plugin", metavar="KIND:NAME", help="kind is algorithm, reward, dataset or tracker")
    _add_doctor(add("doctor", _doctor, "check versions, devices and the engines' numbers", answers_json=True))
    _add_replay(add("replay", _replay, "take finished steps of a run again, from its record", answers_json=True))
    text = "try a reward"
    _add_rewards(commands.add_parser("rewards", help=text, description=text, allow_abbrev=False))
    text = "write a first config, or a plugin package, to edit"
    _add_init(commands.add_parser("init", help=text, description=text, allow_abbrev=False))
    return parser


def _add_eval(evaluate: argparse.ArgumentParser) -> None:
    evaluate.usage = "mmrl eval [options] [CONFIG...] [section.key=VALUE | --section.key VALUE]..."
    text = "instead of model.path: a model folder, a hub name, a run (its newest good checkpoint) or a checkpoint; the "
    text += "config of a run or checkpoint is its own unless CONFIG is given"
    evaluate.add_argument("--model", metavar="PATH", help=text)
    text = "completions of each prompt; by default trainer.eval_samples; with more than one also pass@k and majority@k"
    evaluate.add_argument("--samples", type=int, metavar="K", help=text)
    text = "0 is greedy; by default greedy for one completion, else sampler.temperature"
    evaluate.add_argument("--temperature", type=float, metavar="T", help=text)
    evaluate.add_argument("--max-new-tokens", type=int, metavar="N", help="instead of sampler.max_new_tokens")
    evaluate.add_argument("--limit", type=int, metavar="N", help="evaluate the first N prompts only")
    text = "also sample the prompts with images with grey ones instead, and tell the difference"
    evaluate.add_argument("--blank-images", action="store_true", help=text)
    text = "keep completions and results there; the same command goes on after a kill, without sampling any twice"
    evaluate.add_argument("--output", type=Path, metavar="FOLDER", help=text)


def _add_plan(plan: argparse.ArgumentParser) -> None:
    text = "plan for so many ranks with a GPU each; by default cluster.ranks"
    plan.add_argument("--gpus", type=int, metavar="N", help=text)
    plan.add_argument("--memory", type=_positive, metavar="GB", help="of the GPU of each rank; by default the one here")
    text = "assumed of every completion; by default sampler.max_new_tokens"
    plan.add_argument("--completion-tokens", type=int, metavar="N", help=text)
    text = "load the model on the device here, take three small steps, and estimate the seconds of a whole one"
    plan.add_argument("--measure", action="store_true", help=text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number between 0 and a million")
    return value


def _steps(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps, 1 or more")
    return int(text)


def _add_doctor(doctor: argparse.ArgumentParser) -> None:
    doctor.usage = "mmrl doctor [--gpu | --cpu] [--json] [CONFIG...] [section.key=VALUE | --section.key VALUE]..."
    device = doctor.add_mutually_exclusive_group()
    help_text = "also train a tiny model for two steps on the {}, and compare every number"
    device.add_argument("--gpu", action="store_const", const="cuda", dest="device", help=help_text.format("GPU"))
    device.add_argument("--cpu", action="store_const", const="cpu", dest="device", help=help_text.format("CPU"))


def _add_replay(replay: argparse.ArgumentParser) -> None:
    replay.usage = "mmrl replay RUN [--step N]... [--json] [--config FILE]... [section.key=VALUE]..."
    replay.description = (
        "Score a step's rollouts again, and recompute selection, advantages, loss and metrics from the run's record, "
        "without the policy; exit code 6 where anything differs. With other rewards or another algorithm: "
        "what they would have changed."
    )
    replay.add_argument("run_dir", type=Path, metavar="RUN", help="a run's folder")
    text = "which step, or A-B; repeat for more; by default the newest that was finished and not undone"
    replay.add_argument("--step", action="append", default=[], metavar="N", help=text)
    text = "what if: rewards and algorithm of this config (over the run's), as of the overrides"
    replay.add_argument("--config", action="append", default=[], type=Path, metavar="FILE", help=text)


def _add_export(export: argparse.ArgumentParser) -> None:
    text = "a checkpoint, a run's folder (its newest good checkpoint), or a Hugging Face folder"
    export.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=text)
    export.add_argument("out", type=Path, metavar="OUT", help="a new folder, or an empty one")
    export.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights; default: as stored"
    )
    export.add_argument("--adapter", action="store_true", help="of a run with model.lora: do not merge the adapter")
    text = "of an adapter: the model that was adapted, if it has moved"
    export.add_argument("--base", metavar="MODEL", help=text)
    export.add_argument("--shard-size", type=float, metavar="GB", help="most of a file of weights (1.07)")


def _add_rewards(rewards: argparse.ArgumentParser) -> None:
    commands = rewards.add_subparsers(dest="what", required=True, metavar="WHAT")
    text = "run a reward over recorded completions, without a model: values, timings, disagreements with the record"
    test = commands.add_parser("test", help=text, description=text, allow_abbrev=False)
    test.set_defaults(run=_rewards_test)
    test.add_argument("reward", metavar="REWARD", help="a name that `mmrl plugins` lists, or path/to/file.py:name")
    text = "a file of RUN/rollouts, a folder of them or a run's; without any, the built-in samples"
    test.add_argument("--rollouts", nargs="+", action="extend", default=[], metavar="PATH", help=text)
    text = "options of the reward, and label, workers and the like, as in the config"
    test.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=text)
    test.add_argument("--limit", type=int, metavar="N", help="score the first N rollouts only")
    test.add_argument("--timeout", type=float, metavar="S", help="seconds that one call may take, as timeout_s")
    test.add_argument("--json", action="store_true", help="answer in JSON")


def _add_init(init: argparse.ArgumentParser) -> None:
    kinds = init.add_subparsers(dest="what", required=True, metavar="WHAT")

    def add(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        kind = kinds.add_parser(name, help=text, description=text, allow_abbrev=False)
        kind.set_defaults(run=run)
        return kind

    config = add("config", _init_config, "write a first config to edit")
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
    plugin = add("plugin", _init_plugin, "write a package with an algorithm, a reward and their tests, to edit")
    plugin.add_argument("name", metavar="NAME", help="of the package, such as my-rewards")
    plugin.add_argument("--path", type=Path, metavar="DIR", help="folder to write it to; by default NAME, which is new")


_CONFIG_COMMANDS = {"train", "check", "plan", "show", "eval", "doctor"}
_CONFIG_OPTIONAL = {"doctor", "eval"}
_OVERRIDABLE = {*_CONFIG_COMMANDS, "replay"}


def _load(arguments: argparse.Namespace) -> LoadedConfig:
    from mmrl.config.load import load_config
    from mmrl.plugin_host.registry import options_class
    from mmrl.system.redaction import remember_secrets

    loaded = load_config(arguments.config, arguments.overrides, options_class=options_class)
    remember_secrets(loaded.config.model_dump(mode="json"))
    _warn(loaded)
    return loaded


def _warn(loaded: LoadedConfig) -> None:
    for warning in loaded.warnings:
        _print_error(f"mmrl: warning: {warning}\n")


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _train(arguments: argparse.Namespace) -> int:
    if arguments.dry_run:
        return _check(arguments)
    from mmrl.system.signals import Interruption, Stopped

    try:
        with Interruption() as interruption:
            loaded = _load(arguments)
            from mmrl.commands import train as run

            return run.train(
                loaded,
                interruption,
                resume=arguments.resume,
                strict=arguments.strict_resume,
                allowed=arguments.allow_change,
                profiled_steps=arguments.profile,
                verbose=arguments.verbose,
            )
    except Stopped as stopped:
        goes_on = "--resume auto goes on" if arguments.resume == "never" else "the same command goes on"
        _print_error(f"mmrl: {stopped}; {goes_on}\n")
        return stopped.exit_code


def _check(arguments: argparse.Namespace) -> int:
    loaded = _load(arguments)
    from mmrl.commands import train as run

    return _tell(arguments, run.check(loaded))


def _plan(arguments: argparse.Namespace) -> int:
    loaded = _load(arguments)
    from mmrl.commands import train as run
    from mmrl.commands.plan.forecast import Assumptions

    gpus, memory, tokens = arguments.gpus, arguments.memory, arguments.completion_tokens
    if tokens is not None and not 0 < tokens <= loaded.config.sampler.max_new_tokens:
        raise ConfigError(
            f"completions cannot have {tokens} tokens",
            where="--completion-tokens",
            possible=f"1 to sampler.max_new_tokens: {loaded.config.sampler.max_new_tokens}",
        )
    if arguments.measure and memory is not None:
        raise ConfigError("--measure is for the device that is here", where="--memory", remedy="leave one of them out")
    if gpus is not None and (gpus < 1 or memory is None):
        raise ConfigError(
            f"--gpus {gpus} plans for GPUs", where="--gpus", remedy="name 1 or more, and --memory GB of each"
        )
    assumptions = Assumptions(gpus, None if memory is None else int(memory * 1e9), tokens, arguments.measure)
    return _tell(arguments, run.plan(loaded, assumptions))


def _tell(arguments: argparse.Namespace, report: Report) -> int:
    """Print a report, and its errors to stderr; returns its exit code."""
    from mmrl.system.console import visible
    from mmrl.system.redaction import Redactor

    if getattr(arguments, "json", False):
        _print_json(Redactor().plain(report.complete()))
    else:
        print(visible(Redactor()("\n".join(report.text())), keep="\n"), flush=True)
    for error in report.errors:
        _complain(error)
    return report.exit_code


def _complain(error: MMRLError) -> None:
    _print_error(f"mmrl: {error}\n")


def _print_error(text: str) -> None:
    """Print to stderr, if anybody reads it, without secrets, and with control characters shown."""
    from mmrl.system.console import visible
    from mmrl.system.redaction import Redactor

    with suppress(OSError):
        print(visible(Redactor()(text), keep="\n"), end="", file=sys.stderr)


def _eval(arguments: argparse.Namespace) -> int:
    from mmrl.system.signals import Interruption, Stopped

    try:
        with Interruption() as interruption:
            results = _evaluated(arguments, interruption)
    except Stopped as stopped:
        goes_on = "nothing was kept" if arguments.output is None else "the same command goes on"
        _print_error(f"mmrl: {stopped}; {goes_on}\n")
        return stopped.exit_code
    from mmrl.system.console import visible
    from mmrl.system.redaction import Redactor

    if arguments.json:
        _print_json(Redactor().plain(results.data()))
    else:
        print(visible(Redactor()("\n".join(results.lines())), keep="\n"))
    return 0


def _evaluated(arguments: argparse.Namespace, interruption: Interruption) -> Results:
    from mmrl.commands.eval.subject import load

    loaded, found = load(arguments.model, arguments.config, arguments.overrides, lambda _, error: _complain(error))
    _warn(loaded)
    from mmrl.commands.eval import evaluation

    names = ("samples", "temperature", "max_new_tokens", "limit", "blank_images", "output")
    options = evaluation.Options(**{name: getattr(arguments, name) for name in names})
    if found is None:
        return evaluation.evaluate(loaded.config, options, interruption=interruption)
    with found.explaining(arguments.overrides):
        return evaluation.evaluate(loaded.config, options, checkpoint=found.checkpoint, interruption=interruption)


def _export(arguments: argparse.Namespace) -> int:
    from mmrl.commands.export import export

    report = export(
        arguments.checkpoint,
        arguments.out,
        dtype=arguments.dtype,
        shard_gb=arguments.shard_size,
        adapter=arguments.adapter,
        base=arguments.base,
        on_damage=lambda _, error: _complain(error),
    )
    if arguments.json:
        _print_json(report.data())
    else:
        print("\n".join(report.lines()))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from mmrl.config.load import to_yaml

    loaded = _load(arguments)
    if arguments.json:
        _print_json({"config": loaded.config.model_dump(mode="json"), "origins": dict(loaded.origins)})
    else:
        print(to_yaml(loaded.config, loaded.origins), end="")
    return 0


def _plugins(arguments: argparse.Namespace) -> int:
    import dataclasses

    from mmrl.plugin_host.registry import list_plugins, locate

    everything = list_plugins()
    seats = Counter((info.kind, info.name) for info in everything)
    wanted = [locate(*_kind_and_name(word, "mmrl plugins", "--check")) for word in arguments.check or ()]
    infos = list(dict.fromkeys(wanted)) or everything
    verdicts: Iterator[tuple[str, str]] = repeat(("installed", ""))
    if arguments.check is not None:
        from mmrl.testing.installed import examine

        verdicts = examine(infos)
    widths = {name: max([len(name), *(len(getattr(info, name)) for info in infos)]) for name in _PLUGIN_COLUMNS}
    if not arguments.json:
        _print_row({name: name for name in (*_PLUGIN_COLUMNS, "status")}, widths)
    rows = []
    for (status, note), info in zip(verdicts, infos, strict=False):  # verdicts may be endless
        if seats[info.kind, info.name] > 1:
            note = "; ".join(filter(None, [f"name taken twice, use {info.distribution}:{info.name}", note]))
        rows.append({**dataclasses.asdict(info), "status": status, "note": note})
        if not arguments.json:
            _print_row(rows[-1] | {"status": ": ".join([status, *note.splitlines()[:1]])}, widths)
    bad = [row for row in rows if row["status"] == "bad"]
    if arguments.json:
        _print_json(rows)
    else:
        for row in bad:
            print(f"\nmmrl: {row['note']}", file=sys.stderr)
    return 4 if bad else 0


_PLUGIN_COLUMNS = ("kind", "name", "distribution", "version")


def _print_row(row: dict[str, Any], widths: dict[str, int]) -> None:
    """A row of a table, with its status, as soon as it is known."""
    print("  ".join([*(row[name].ljust(width) for name, width in widths.items()), row["status"]]), flush=True)


def _kind_and_name(word: str, command: str, option: str) -> tuple[Kind, str]:
    from mmrl.plugin_host.registry import INTERFACES

    kind, _, name = word.partition(":")
    if kind not in INTERFACES or not name:
        kinds = ", ".join(f"{known}:NAME" for known in INTERFACES)
        raise ConfigError(f"{option} cannot be {word!r}", where=command, possible=kinds)
    return cast("Kind", kind), name


def _doctor(arguments: argparse.Namespace) -> int:
    import dataclasses

    if arguments.overrides and not arguments.config:
        raise ConfigError("there is no config to override", where=" ".join(arguments.overrides))
    config = _load(arguments).config if arguments.config else None
    from mmrl.commands.doctor.examination import examine
    from mmrl.commands.doctor.finding import exit_code, table

    if arguments.device:
        print("mmrl: a tiny model is trained in float32 and in bfloat16; that takes minutes", file=sys.stderr)
    findings = examine(config, arguments.device)
    code = exit_code(findings)
    if arguments.json:
        _print_json({"exit_code": code, "findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        print("\n".join(table(findings)))
    return code


def _rewards_test(arguments: argparse.Namespace) -> int:
    from mmrl.commands.check.rewards import reward_spec, try_reward

    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit is {arguments.limit}", where="mmrl rewards test", possible="1 or more")
    spec = reward_spec(arguments.reward, arguments.set, arguments.timeout)
    trial = try_reward(spec, arguments.rollouts, arguments.limit)
    if arguments.json:
        print(json.dumps(trial.data(), indent=2))  # in ASCII: completions may hold what a terminal obeys
    else:
        print("\n".join(trial.lines()))
    if trial.error is not None:
        raise trial.error
    return 4 if trial.failed else 0


def _replay(arguments: argparse.Namespace) -> int:
    from mmrl.cluster.process import prepare_process

    prepare_process()
    from mmrl.commands.replay.replay import RecordedRun, replay
    from mmrl.system.redaction import Redactor

    run = RecordedRun.open(arguments.run_dir)
    steps = run.choose(arguments.step)
    reports = []
    for report in replay(run, steps, arguments.config, arguments.overrides):
        reports.append(report)
        if not arguments.json:
            print(Redactor()("\n".join(report.lines())), flush=True)
    differs = any(report.differs for report in reports)
    if arguments.json:
        answer = {"differs": differs, "steps": [report.data() for report in reports]}
        print(json.dumps(Redactor().plain(answer), indent=2))  # in ASCII: a terminal may obey what rewards complain of
    return 6 if differs else 0


def _schema(arguments: argparse.Namespace) -> int:
    from mmrl.config.sections import Config
    from mmrl.plugin_host.registry import options_class

    if arguments.plugin is None:
        _print_json(Config.model_json_schema())
        return 0
    _print_json(options_class(*_kind_and_name(arguments.plugin, "mmrl schema", "--plugin")).model_json_schema())
    return 0


def _init_config(arguments: argparse.Namespace) -> int:
    from mmrl.commands.first_config import translated, write_config

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
    return 0


def _init_plugin(arguments: argparse.Namespace) -> int:
    from mmrl.plugin_host.starter import module_name, write_plugin

    folder = arguments.path or Path(arguments.name)
    for path in write_plugin(arguments.name, folder):
        print(f"wrote {path}")
    shown = folder if folder.is_absolute() else f"./{folder}"
    module = module_name(arguments.name)
    check = f"mmrl plugins --check algorithm:{module} reward:{module}"
    print(f'\nnext: pip install -e "{shown}[test]" && {check} && python -m pytest {folder}')
    return 0
