"""``mmrl init config``: a first config, with the installed plugins beside every name to choose."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from mmrl.config.evaluation_names import key_of, sets_of
from mmrl.config.forms import reader_of_files
from mmrl.config.plugin_specs import Kind
from mmrl.config.starter import starter
from mmrl.config.translation import translate
from mmrl.config.yaml_tree import join_errors, read_tree
from mmrl.errors import ConfigError, MMRLError
from mmrl.plugin_host.registry import list_plugins, options_class

_LISTS: Mapping[Kind, str] = {"reward": "rewards", "tracker": "trackers"}
_OVERRIDE = re.compile(r"[\w-]+(\.[\w-]+)+=")
_FUNCTION = "or a function of your own: path/to/file.py:function"


def write_config(path: Path, values: Mapping[str, Any], heading: Sequence[str] = ()) -> None:
    """Write a new file with ``values``, and everything else as comments and placeholders.

    Raises:
        ConfigError: The file exists, or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(first_config(values, heading))
    except FileExistsError as error:
        raise ConfigError("the file exists", where=str(path), remedy="name another, or remove it") from error
    except OSError as error:
        raise ConfigError(f"cannot write the config: {error.strerror}", where=str(path)) from error


def first_config(values: Mapping[str, Any], heading: Sequence[str] = ()) -> str:
    """The text of a config with ``values`` (by section); a value that a run needs and they lack is a placeholder."""
    installed = {kind: [info.name for info in list_plugins() if info.kind == kind] for kind in get_args(Kind)}
    data = {**values.get("data", {})}
    data["train"] = {"name": dataset_of_files() or "<dataset>", **data.get("train", {})}
    filled = {
        **values,
        "model": {"path": "<model>", **values.get("model", {})},
        "data": data,
        "rewards": values.get("rewards") or [{"name": "<reward>"}],
        "algorithm": {"name": "<algorithm>", **values.get("algorithm", {})},
    }
    options, notes = dict[str, type[BaseModel]](), dict[str, str]()
    for key, kind, entry in _plugins(filled):
        notes[key] = f"installed: {', '.join(installed[kind]) or 'none'}"
        notes[key] += f"; {_FUNCTION}" if kind == "reward" else ""
        if (model := _options(kind, entry["name"])) is not None:
            options[key] = model
    return starter(filled, options, notes, heading)


def translated(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The values of another trainer's config in mmrl's words, and a line for each of its keys that was left out.

    Args:
        words: YAML files, and ``a.b=v`` over them.

    Raises:
        ConfigError: A file cannot be read.
    """
    overrides = [word for word in words if _OVERRIDE.match(word)]
    files = [Path(word) for word in words if word not in overrides]
    tree, problems = read_tree(files, overrides)
    if problems:
        raise join_errors(problems)
    names = {kind: [info.name for info in list_plugins() if info.kind == kind] for kind in get_args(Kind)}
    found = translate(
        tree.plain(),
        dataset=dataset_of_files() or "<dataset>",
        algorithms=names["algorithm"],
        trackers={name: _option_names("tracker", name) for name in names["tracker"]},
        near=files[0].parent if files else Path(),
    )
    algorithm = found.values.get("algorithm", {})
    model = _options("algorithm", algorithm["name"]) if "name" in algorithm else None
    loss = None if model is None else model.model_fields.get("loss")
    if loss is not None and "clip_low" in algorithm and "ppo_clip" in get_args(loss.annotation):
        algorithm.setdefault("loss", "ppo_clip")  # EasyR1 and verl clip the ratio whatever the advantage
    for option in [key for key in algorithm if key != "name" and model is not None and key not in model.model_fields]:
        found.left_out.append((f"algorithm.{option}", algorithm.pop(option), f"{algorithm['name']} has no such option"))
    return found.values, found.lines()


def _option_names(kind: Kind, name: str) -> list[str]:
    model = _options(kind, name)
    return [] if model is None else [*model.model_fields]


def dataset_of_files() -> str | None:
    """The installed dataset that reads files which the config has to name; None if there is none."""
    found = reader_of_files(options_class)
    return None if found == "..." else found


def _plugins(values: Mapping[str, Any]) -> list[tuple[str, Kind, Mapping[str, Any]]]:
    found: list[tuple[str, Kind, Mapping[str, Any]]] = [("algorithm", "algorithm", values["algorithm"])]
    data = values["data"]
    found += [("data.train", "dataset", data["train"])] if data.get("train") else []
    found += [(key_of(name), "dataset", entry) for name, entry in sets_of(data.get("eval")).items()]
    found += [(f"data.mix.{index}", "dataset", entry) for index, entry in enumerate(data.get("mix", ()))]
    found += [("environment", "environment", values["environment"])] if values.get("environment") else []
    for kind, section in _LISTS.items():
        found += [(f"{section}.{index}", kind, entry) for index, entry in enumerate(values.get(section, ()))]
    return found


def _options(kind: Kind, name: str) -> type[BaseModel] | None:
    """The class of a plugin's options; None if it cannot be had, which `mmrl check` explains."""
    try:
        return options_class(kind, name)
    except MMRLError:
        return None
