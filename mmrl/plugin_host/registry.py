"""Finds plugin classes by entry points: lists without importing, imports on demand, checks, and explains errors.

A plugin's name is its entry point's, or ``distribution:name`` if two packages register the same one. A plugin that no
package registers is named ``path/to/file.py:Name`` or ``import:package.module:Name``; a reward may be a function there.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn, get_args, overload

from pydantic import BaseModel, ValidationError

from mmrl.config.plugin_specs import (
    DatasetSpec,
    EnvironmentSpec,
    Kind,
    MonitorSpec,
    PluginSpec,
    RewardSpec,
    RewardStyle,
)
from mmrl.config.problems import options_errors, suggestion
from mmrl.config.synonyms import spelled
from mmrl.config.yaml_tree import join_errors
from mmrl.errors import ConfigError, MMRLError, PluginError
from mmrl.interfaces import (
    API_VERSION,
    Algorithm,
    DatasetLoader,
    Environment,
    Monitor,
    Plugin,
    PluginConfig,
    Reward,
    Tracker,
)
from mmrl.plugin_host.foreign_rewards import adapt
from mmrl.plugin_host.installed import GIVEN, PluginInfo, installed

INTERFACES: Mapping[Kind, type[Plugin]] = {
    "algorithm": Algorithm,
    "reward": Reward,
    "dataset": DatasetLoader,
    "environment": Environment,
    "tracker": Tracker,
    "monitor": Monitor,
}

_SPECS: Mapping[Kind, type[PluginSpec]] = {
    "reward": RewardSpec,
    "dataset": DatasetSpec,
    "environment": EnvironmentSpec,
    "monitor": MonitorSpec,
}
"""Kinds of plugins for which the framework has options of its own beside the plugin's."""
_FITTING: set[tuple[Kind, type[Plugin]]] = set()
"""Given classes that have passed: each replay of an algorithm asks again, and signatures take a sixth of its time."""


def is_file(name: str) -> bool:
    """True for a name in a file, ``path/to/file.py:Name``."""
    return re.search(r"\.py:\w+$", name) is not None and not is_import(name)


def is_import(name: str) -> bool:
    """True for a name in a module, ``import:package.module:Name``."""
    return re.fullmatch(r"import:[^:]*:.*", name) is not None


def list_plugins() -> list[PluginInfo]:
    """Every installed plugin, by kind and name; imports none."""
    return [info for kind in get_args(Kind) for info, _ in sorted(installed(kind), key=lambda pair: pair[0].name)]


def loaders_of_rows() -> list[str]:
    """The installed dataset loaders that read rows of any kind; one that cannot be imported is none."""
    found = []
    for info in list_plugins():
        if info.kind == "dataset":
            with suppress(PluginError):
                found += [info.name] * vars(resolve("dataset", info.name)).get("reads_rows", False)
    return found


def locate(kind: Kind, name: str) -> PluginInfo:
    """The origin of the plugin of that name; imports nothing.

    Raises:
        PluginError: It is not installed, or is registered twice.
    """
    return _locate(kind, name)[0]


def resolve(kind: Kind, plugin: str | PluginSpec) -> type[Plugin]:
    """The class of a plugin, imported and checked against its interface.

    Args:
        plugin: Its name, or its entry in a config, which may name the convention of a file's function.

    Raises:
        PluginError: It is not installed, is registered twice, cannot be imported, or does not fit.
    """
    name, style = (plugin, None) if isinstance(plugin, str) else (plugin.name, getattr(plugin, "style", None))
    info, entry = _locate(kind, name)
    if entry and kind == "reward" and style:
        what = f"{info} has style: {style}, which says how a file's function is called"
        raise PluginError(what, where=info.target, remedy="leave style out")
    try:
        found: type[Plugin] = entry.load() if entry else _own_plugin(info, style)
    except PluginError:
        raise
    except (Exception, SystemExit) as error:
        raise _failure(info, "cannot be imported", error) from error
    _check_class(info, found)
    return found


def options_class(kind: Kind, plugin: str | PluginSpec) -> type[BaseModel]:
    """The class that validates a plugin's options; arguments and errors as in ``resolve``."""
    return resolve(kind, plugin).Config


@overload
def create(kind: Literal["algorithm"], spec: PluginSpec) -> Algorithm: ...
@overload
def create(kind: Literal["reward"], spec: PluginSpec) -> Reward: ...
@overload
def create(kind: Literal["dataset"], spec: PluginSpec) -> DatasetLoader: ...
@overload
def create(kind: Literal["environment"], spec: PluginSpec) -> Environment: ...
@overload
def create(kind: Literal["tracker"], spec: PluginSpec) -> Tracker: ...
@overload
def create(kind: Literal["monitor"], spec: PluginSpec) -> Monitor: ...
def create(kind: Kind, spec: PluginSpec) -> Plugin:
    """A plugin with its options.

    Raises:
        ConfigError: The options do not fit.
        PluginError: As ``resolve``; or its constructor failed.
    """
    return _construct(locate(kind, spec.name), resolve(kind, spec), spec.options)


@overload
def given(
    kind: Literal["algorithm"], plugin: str | type[Algorithm] | Algorithm, options: Mapping[str, Any] | None = None
) -> Algorithm: ...
@overload
def given(
    kind: Literal["reward"],
    plugin: str | type[Reward] | Reward | Callable[..., Any],
    options: Mapping[str, Any] | None = None,
) -> Reward: ...
@overload
def given(
    kind: Literal["dataset"],
    plugin: str | type[DatasetLoader] | DatasetLoader,
    options: Mapping[str, Any] | None = None,
) -> DatasetLoader: ...
@overload
def given(
    kind: Literal["environment"],
    plugin: str | type[Environment] | Environment,
    options: Mapping[str, Any] | None = None,
) -> Environment: ...
@overload
def given(
    kind: Literal["monitor"], plugin: str | type[Monitor] | Monitor, options: Mapping[str, Any] | None = None
) -> Monitor: ...
def given(kind: Kind, plugin: Any, options: Mapping[str, Any] | None = None) -> Plugin:
    """The plugin of that name or class (which need not be registered), or the given plugin itself, checked like any.

    A function is a reward.

    Raises:
        ConfigError: The options do not fit.
        PluginError: As ``create``.
        ValueError: There are options, and the plugin is an object already.
    """
    if isinstance(plugin, str):
        return _construct(locate(kind, plugin), resolve(kind, plugin), options or {})
    if kind == "reward" and callable(plugin) and not isinstance(plugin, type | Reward):
        plugin = adapt(plugin)
    is_class = isinstance(plugin, type)
    if options and not is_class:
        raise ValueError("options go with the name or the class of a plugin; this one has its options")
    cls = plugin if is_class else type(plugin)
    info = PluginInfo(kind, cls.__qualname__, cls.__module__, GIVEN, f"{cls.__module__}:{cls.__qualname__}")
    if (kind, cls) not in _FITTING:
        _check_class(info, cls)
        _FITTING.add((kind, cls))
    made: Plugin = _construct(info, plugin, options or {}) if is_class else plugin
    return made


def _construct(info: PluginInfo, plugin: type[Plugin], options: Mapping[str, Any]) -> Plugin:
    try:
        return plugin(plugin.Config.model_validate(dict(options)))
    except ValidationError as error:
        problems = options_errors(error, plugin.Config, "")
        raise join_errors(
            [ConfigError(e.what, where=str(info), possible=e.possible, remedy=e.remedy) for e in problems]
        ) from error
    except MMRLError:
        raise
    except Exception as error:
        raise _failure(info, "cannot be created", error) from error


def _locate(kind: Kind, name: str) -> tuple[PluginInfo, EntryPoint | None]:
    """The plugin of that name; without an entry point if it is named by its file or module."""
    if is_file(name):
        return _locate_file(kind, name), None
    if is_import(name):
        return _locate_import(kind, name), None
    package, _, short = name.rpartition(":")
    entries = installed(kind)
    found = [
        pair for pair in entries if pair[0].name == short and _normal(package) in ("", _normal(pair[0].distribution))
    ]
    if not found:
        _raise_unknown(kind, name, [info for info, _ in entries])
    if len(found) > 1:
        raise PluginError(
            f"several packages install {_article(kind)} plugin called {short!r}",
            where=", ".join(f"{info.distribution} {info.version} ({info.target})" for info, _ in found),
            possible=", ".join(f"{info.distribution}:{short}" for info, _ in found),
            remedy="select one of them by its long name, or uninstall the other",
        )
    return found[0]


def _normal(distribution: str) -> str:
    """A distribution's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _raise_unknown(kind: Kind, name: str, known: Sequence[PluginInfo]) -> NoReturn:
    names = sorted({info.name for info in known} | {f"{i.distribution}:{i.name}" for i in known if ":" in name})
    install = "install the package that has it (pip install ...); `mmrl plugins` lists the installed ones"
    hint = suggestion(spelled(name), names) or suggestion(name, names)
    raise PluginError(
        f"no installed package has {_article(kind)} plugin called {name!r}",
        possible=", ".join(names) or f"none: no {kind} plugin is installed",
        remedy=f"{hint} Otherwise {install}" if hint else install,
    )


def _article(kind: Kind) -> str:
    return f"an {kind}" if kind[0] in "ae" else f"a {kind}"


def _failure(info: PluginInfo, what: str, error: BaseException) -> PluginError:
    """An error that shows the plugin's exception: its type, message and last frame."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]
    where = f"{info.target} ({frames[-1].filename}:{frames[-1].lineno})" if frames else info.target
    cause = f"{type(error).__name__}: {error}".rstrip(": ")
    return PluginError(
        f"{info} {what}: {cause}",
        where=where,
        remedy=f"repair, upgrade or reinstall {info.distribution}" if info.is_installed else "repair it",
    )


def _check_class(info: PluginInfo, plugin: Any) -> None:
    """Raises PluginError unless ``plugin`` fits the kind that it is registered as."""
    interface = INTERFACES[info.kind]
    if not (isinstance(plugin, type) and issubclass(plugin, interface)):
        _misfit(info, f"{plugin!r} is no subclass of mmrl.interfaces.{interface.__name__}")
    if plugin.api_version != API_VERSION:
        newer = isinstance(plugin.api_version, int) and plugin.api_version > API_VERSION
        older = f"upgrade {info.distribution}" if info.is_installed else "leave out api_version"
        remedy = "upgrade mmrl" if newer else older
        _misfit(info, f"it is written for interface version {plugin.api_version}, not {API_VERSION}", remedy)
    missing = sorted(plugin.__abstractmethods__)
    if missing:
        _misfit(info, f"it lacks {', '.join(missing)}")
    if not (isinstance(plugin.Config, type) and issubclass(plugin.Config, PluginConfig)):
        _misfit(info, "its Config is no subclass of mmrl.interfaces.PluginConfig")
    if issubclass(plugin, Reward) and plugin.score is Reward.score and plugin.score_one is Reward.score_one:
        _misfit(info, "it lacks score_one, or score")
    if issubclass(plugin, Reward):
        for name, value in (("workers", plugin.workers), ("groups_per_call", plugin.groups_per_call)):
            if not (type(value) is int and value >= 1) and not (name == "workers" and value is None):
                _misfit(info, f"its {name} is {value!r}, and no whole number from 1")
        if plugin.secrets and (plugin.workers is None or not set(plugin.secrets) <= set(plugin.Config.model_fields)):
            _misfit(info, "secrets names options of its own, and needs workers of its own")
    framework = _SPECS.get(info.kind, PluginSpec)
    taken = sorted(set(framework.model_fields) & set(plugin.Config.model_fields))
    if taken:
        _misfit(info, f"its options {', '.join(taken)} have names that mmrl uses itself")
    for hook, wanted in vars(interface).items():
        if inspect.isfunction(wanted) and not hook.startswith("_"):
            _check_hook(info, plugin, hook, wanted)


def _check_hook(info: PluginInfo, plugin: type[Plugin], hook: str, wanted: Callable[..., Any]) -> None:
    """Raises PluginError unless ``hook`` can be called like the interface's: positionally, with as many arguments."""
    static = inspect.getattr_static(plugin, hook)
    given = getattr(plugin, hook)
    if not callable(given):
        _misfit(info, f"{hook} is no method")
    parameters = list(inspect.signature(wanted).parameters)
    arguments = parameters[1:] if isinstance(static, staticmethod | classmethod) else parameters
    try:
        inspect.signature(given).bind(*arguments)
    except TypeError as error:
        called = f"{hook}({', '.join(parameters[1:])})"
        _misfit(info, f"{hook}{inspect.signature(given)} cannot be called as {called}: {error}")


def _misfit(info: PluginInfo, why: str, remedy: str = "") -> NoReturn:
    report = f"report this to the authors of {info.distribution}" if info.is_installed else "correct the class"
    remedy = remedy or report
    raise PluginError(f"{info} does not fit: {why}", where=info.target, remedy=remedy)


def _locate_file(kind: Kind, name: str) -> PluginInfo:
    path = Path(name.rpartition(":")[0])
    return PluginInfo(kind, name, "file", _version(kind, name, path), name)


def _locate_import(kind: Kind, name: str) -> PluginInfo:
    """Imports the packages that the module is in, and not the module."""
    target = name.partition(":")[2]
    module, _, attribute = target.partition(":")
    if not (attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        what = f"{name!r} names no class or function of a module"
        raise PluginError(what, where=f"a {kind}'s name", possible="import:package.module:Name")
    try:
        spec = importlib.util.find_spec(module)
    except (Exception, SystemExit) as error:
        raise _failure(PluginInfo(kind, name, "file", "?", target), "cannot be imported", error) from error
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        remedy = "install it, set PYTHONPATH to the folder that holds it, or name its file: path/to/file.py:"
        raise PluginError(
            f"there is no module {module} for the {kind} {name!r}",
            where=", ".join(sys.path),
            remedy=remedy + attribute,
        )
    return PluginInfo(kind, name, "file", _version(kind, name, Path(spec.origin)), target)


def _version(kind: Kind, name: str, path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError as error:
        what = f"cannot read the file of {kind} {name!r}: {error.strerror}"
        raise PluginError(
            what,
            where=str(path.absolute()),
            remedy="in a config's file a path counts from the file that names it, and then from the working folder",
        ) from None


def _own_plugin(info: PluginInfo, style: RewardStyle | None) -> Any:
    """The class of that name in a file or module; a function becomes a reward class.

    Raises:
        PluginError: It has nothing of that name, or a function that does not fit.
    """
    path, _, name = info.target.rpartition(":")
    module = importlib.import_module(path) if is_import(info.name) else _file_module(info, path)
    found = getattr(module, name, None)
    if isinstance(found, type) or (found is not None and info.kind != "reward"):
        return found
    if callable(found):
        return _function_reward(info, found, style)
    noun, wanted = ("function", inspect.isfunction) if info.kind == "reward" else ("class", inspect.isclass)
    names = [key for key, value in vars(module).items() if wanted(value)]
    remedy = suggestion(name, names) or f"the file has: {', '.join(names) or f'no {noun}'}"
    _misfit(info, f"the file has no {noun} {name}", remedy)


def _file_module(info: PluginInfo, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"mmrl_file_{info.version}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as an import does: dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _function_reward(info: PluginInfo, function: Callable[..., Any], style: RewardStyle | None) -> type[Reward]:
    """A reward class around a function; see ``mmrl.plugin_host.foreign_rewards``."""
    try:
        return adapt(function, style)
    except PluginError as error:
        raise PluginError(
            f"{info} does not fit: {error.what}", where=info.target, possible=error.possible, remedy=error.remedy
        ) from error
