"""``mmrl monitor``: the alarms that monitors tell of a run's record, the same as when it went on."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.commands.arguments import add_json
from mmrl.commands.printing import answer, warn
from mmrl.errors import ConfigError, plural

if TYPE_CHECKING:
    from mmrl.config.sections import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    parser.usage = "mmrl monitor RUN [--set NAME.KEY=VALUE ...] [--json]"
    parser.description = "Show a run's record to its monitors, or to all if it had none, and print their alarms."
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run's folder, live or done")
    text = "options of monitors, such as length_hacking.growth=2 or dead_groups.off=true"
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="NAME.KEY=VALUE", help=text)


def run(arguments: argparse.Namespace) -> int:
    from mmrl.runs.history import read_metrics
    from mmrl.runs.monitoring import fault_of, monitors_of, recorded_alarms
    from mmrl.runs.reader import load_run

    found = load_run(arguments.run_dir)
    config, faults = _config(found.config, arguments.set), list[str]()

    def note(label: str, error: Exception) -> None:
        faults.append(fault_of(label, error))

    monitors = monitors_of(config, note)
    alarms = list(recorded_alarms(found.path, config, note, monitors))
    warn(faults)
    last = max(read_metrics(found.path), default=0)
    count = f"{plural(len(alarms), 'alarm')} in {plural(last, 'step')}"
    lines = [f"step {alarm.step}  {alarm.monitor}: {alarm.message}" for alarm in alarms]
    data = {"steps": last, "monitors": list(monitors), "alarms": [dataclasses.asdict(alarm) for alarm in alarms]}
    answer(data, [*lines, f"{count}, of {', '.join(monitors) or 'no monitor'}"], as_json=arguments.json)
    return 0


def _config(recorded: Mapping[str, Any], words: Sequence[str]) -> Config:
    """A run's config with the monitors that it had, or all, and these options.

    Raises:
        ConfigError: The words are no options of monitors, or the config cannot be read.
    """
    from mmrl.config.load import from_mapping
    from mmrl.config.plugin_specs import EVERY, MonitorSpec
    from mmrl.config.yaml_tree import join_errors, read_tree

    tree, problems = read_tree([], words)
    if problems:
        raise join_errors(problems)
    entries = [dict(each) for each in recorded.get("monitors") or [{"name": EVERY}]]
    for name, options in tree.plain().items():
        if not isinstance(options, Mapping):
            raise ConfigError(f"{name} is no option of a monitor", where="--set", possible="NAME.KEY=VALUE")
        entry = next((each for each in entries if MonitorSpec(name=each["name"]).label == name), None)
        if entry is None:
            entries.append(entry := {"name": name})
        entry.update(options)
    return from_mapping({**recorded, "monitors": entries})
