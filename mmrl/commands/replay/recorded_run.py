"""A run's record of its steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from mmrl.commands.arguments import chosen_steps
from mmrl.config.load import load_config
from mmrl.config.plugin_specs import Kind, PluginSpec
from mmrl.config.sections import Config
from mmrl.errors import ConfigError, DataError
from mmrl.plugin_host import registry
from mmrl.rollout.records import RecordedStep, read_step, recorded_steps
from mmrl.runs.files import read_records
from mmrl.runs.setup import RunSetup
from mmrl.system.redaction import remember_secrets
from mmrl.system.version import __version__


@dataclass(frozen=True)
class RecordedRun:
    """A run's folder with the record of its steps; nothing in it is changed, and the run may go on meanwhile.

    Attributes:
        config: The config of config.yaml.
    """

    path: Path
    config: Config

    @classmethod
    def open(cls, path: Path) -> RecordedRun:
        """The run in that folder.

        Raises:
            ConfigError: There is none.
            DataError: It has recorded no rollouts.
        """
        path = path.expanduser()
        if path.absolute().parent.name == "checkpoints":
            what, run_dir = "this is a checkpoint, and has no rollouts", path.absolute().parent.parent
            raise ConfigError(what, where=str(path), remedy=f"give its run, {run_dir}, and --step")
        if not (path / "config.yaml").is_file():
            what = "this is no run: it has no config.yaml"
            raise ConfigError(what, where=str(path), remedy="give the folder that trainer.run_dir named")
        run = cls(path, load_recorded(path))
        if not run.steps:
            raise DataError(
                "the run has recorded no rollouts",
                where=str(path / "rollouts"),
                remedy="give a run that has finished a step; mmrl 0.2 recorded none of runs on demonstrations",
            )
        return run

    @property
    def steps(self) -> list[int]:
        """Steps with recorded rollouts."""
        return list(recorded_steps(self.path))

    def choose(self, wanted: Sequence[str]) -> list[int]:
        """The steps that words such as ``7`` or ``3-5`` name; without any, the newest that was finished and not undone.

        Raises:
            ConfigError: They are not there.
        """
        known = self.steps
        if not wanted:
            return [step for step in known if self.metrics(step) and not self.undone(step)][-1:] or known[-1:]
        return chosen_steps(wanted, known, str(self.path / "rollouts"))

    def read(self, step: int) -> RecordedStep:
        """The record of a step.

        Raises:
            DataError: It is damaged.
        """
        return read_step(recorded_steps(self.path)[step])

    def metrics(self, step: int) -> dict[str, Any] | None:
        """The step's line in metrics.jsonl, the last one of several."""
        return self._lines.get(step)

    def undone(self, step: int) -> str | None:
        """A sentence on the later attempt that began before the step and so undid it; None if none did."""
        attempt = (self.metrics(step) or {}).get("attempt")
        if attempt is None:
            return None
        for number, begin in self._attempts:
            if number > attempt and (begin or 0) < step:
                where = "began from nothing" if begin is None else f"went on from step {begin}"
                return f"step {step} was undone by attempt {number}, which {where}"
        return None

    @cached_property
    def _lines(self) -> dict[int, dict[str, Any]]:
        return {line["step"]: line for line in read_records(self.path / "metrics.jsonl") if "step" in line}

    @cached_property
    def _attempts(self) -> list[tuple[int, int | None]]:
        """Each attempt and the step that it began from, in order."""
        begun = [each for each in read_records(self.path / "attempts.jsonl") if "resumed_from" in each]
        return [(each.get("attempt", 0), each["resumed_from"]) for each in begun]

    def setup(self, config: Config) -> RunSetup:
        return RunSetup(config, self.path / "media")

    def failures(self) -> dict[tuple[int, str, int, str], str]:
        """How rewards failed, from events.jsonl, by epoch, prompt id, member and reward."""
        keys = ("prompt", "member", "reward", "cause")
        events = [each for each in read_records(self.path / "events.jsonl") if each.get("kind") == "reward_failed"]
        return {
            (each.get("epoch", 0), each["prompt"], each["member"], each["reward"]): each["cause"]
            for each in events
            if all(key in each for key in keys)
        }

    def changes_since(self, attempt: int) -> list[str]:
        """The config's changes in attempts after this one."""
        later = [each for each in read_records(self.path / "attempts.jsonl") if each.get("attempt", 0) > attempt]
        return [str(change) for each in later for change in each.get("changes", ())]

    def other_versions(self, config: Config) -> dict[str, list[str]]:
        """Other versions that are installed, of the algorithm (under its kind) and rewards (by component).

        An empty name stands for mmrl itself, and environment.json for itself if it is unreadable.
        """
        try:
            then = json.loads((self.path / "environment.json").read_text())
            plugins = {(each["kind"], each["name"]): each["version"] for each in then["plugins"]}
        except (OSError, ValueError, KeyError, TypeError):  # it is only to explain what differs
            return {"environment.json": ["it cannot be read, so nothing is known of the versions that the run had"]}
        found: dict[str, list[str]] = {}
        if then.get("mmrl") != __version__:
            found[""] = [f"mmrl was {then.get('mmrl')}, and is {__version__}"]
        named = [("algorithm", config.algorithm.name, "algorithm")]
        named += [("reward", spec.name, spec.metric) for spec in config.rewards]
        for kind, name, key in named:
            now, before = (
                registry.locate("reward" if kind == "reward" else "algorithm", name),
                plugins.get((kind, name)),
            )
            if before is not None and before != now.version:
                where = "its file" if now.distribution == "file" else now.distribution
                found.setdefault(key, []).append(f"{where} was {before}, and is {now.version}")
        return found


def load_recorded(path: Path, files: Sequence[Path] = (), overrides: Sequence[str] = ()) -> Config:
    """The config of a run's folder, with files and overrides over it; only algorithm and rewards need be installed."""
    config = load_config([path / "config.yaml", *files], overrides, options_class=_options).config
    remember_secrets(config.model_dump(mode="json"))
    return config


class _AsWritten(BaseModel):
    """Options of a plugin that no replay needs, which may not be installed here."""

    model_config = ConfigDict(extra="allow")


def _options(kind: Kind, plugin: PluginSpec) -> type[BaseModel]:
    return registry.options_class(kind, plugin) if kind in ("algorithm", "reward") else _AsWritten
