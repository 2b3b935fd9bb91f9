"""The exceptions that mmrl raises on purpose; each kind has its exit code.

    MMRLError
    ├── ConfigError     2   a bad config or command line, a missing model folder
    ├── DataError       3   a dataset, row or image that cannot be used
    │   └── HubError    3   a model or dataset that a hub does not give
    │       └── HubUnreachableError     the hub cannot be asked, and the cache does not have it
    ├── PluginError     4   a plugin that is not installed, does not fit, or fails
    ├── ResourceError   5   the machine, a port or a device cannot carry the run
    │   ├── RankLostError       a rank died or hangs
    │   │   └── SamplersRestarted   ranks that sample alone did, and are there again
    │   ├── DeviceBusyError     another process holds a device's memory, or the device
    │   └── DeviceMemoryError   a device has too little memory
    └── NumericsError   6   the numbers do not agree, or are not finite

Any other exception is a bug: it keeps its traceback and exits with 1. A signal is no error: ``system.signals.Stopped``
exits with 10, or with 130 after Ctrl-C; with 0 where the calling program asked for it.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar


class OldNameWarning(FutureWarning):
    """A name of an earlier version is in use; it goes with the next one."""


def warn_of_old_name(old: str, new: str) -> None:
    """Warn the caller's caller that it uses a name that has changed."""
    warnings.warn(f"{old} is now {new}; the old name goes with the next version", OldNameWarning, stacklevel=3)


class MMRLError(Exception):
    """An error with an answer: what went wrong, where, what is possible, and what to do.

    Args:
        what: One sentence without a trailing newline.
        where: The file and line, config key, dataset row or plugin concerned.
        possible: The values that would have been accepted.
        remedy: The user's next step.

    Attributes:
        parts: The errors that this one joins; empty if it is one.
    """

    exit_code: ClassVar[int] = 1
    parts: Sequence[MMRLError] = ()

    def __init__(self, what: str, *, where: str = "", possible: str = "", remedy: str = "") -> None:
        self.what, self.where, self.possible, self.remedy = what, where, possible, remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        parts = [self.what]
        parts += [f"  where:    {self.where}"] if self.where else []
        parts += [f"  possible: {self.possible}"] if self.possible else []
        parts += [f"  do:       {self.remedy}"] if self.remedy else []
        return "\n".join(parts)


class ConfigError(MMRLError):
    """A bad config or command line."""

    exit_code = 2


class DataError(MMRLError):
    """A dataset, row or image that cannot be used."""

    exit_code = 3


class UselessRow(DataError):
    """A row from which an algorithm can learn nothing; it is left out and counted, and is no bad row.

    Attributes:
        counted: The name of the count, a metric such as ``data/ties``.
    """

    def __init__(self, what: str, *, counted: str, where: str = "") -> None:
        super().__init__(what, where=where)
        self.counted = counted


class HubError(DataError):
    """A model or dataset that is not here, and that a hub does not give because it is unknown, gated or damaged."""


class HubUnreachableError(HubError):
    """The hub cannot be reached or fails, and the cache lacks files that are needed."""


class PluginError(MMRLError):
    """A plugin that is not installed, does not fit its interface, or fails.

    Attributes:
        details: The plugin's own traceback, for RUN/events.jsonl; empty if it has none.
    """

    exit_code = 4
    details: str = ""


class ResourceError(MMRLError):
    """The machine cannot carry the run: memory, ports, devices, a folder in use."""

    exit_code = 5


class RankLostError(ResourceError):
    """A rank's process is gone, or hangs; its memory is lost."""


class SamplersRestarted(RankLostError):
    """Ranks that sample alone were lost and started again; all that they were sampling is to be sampled again."""


class DeviceBusyError(ResourceError):
    """Another process holds a device or its memory; a later start may succeed."""


class DeviceMemoryError(ResourceError):
    """A device has too little memory for its work.

    Attributes:
        microbatches_help: True if smaller micro-batches need less of it.
    """

    microbatches_help: bool = True


class NumericsError(MMRLError):
    """A self-check failed, or a number that must be finite is not."""

    exit_code = 6


def contract_error(
    plugin: object, hook: str, what: str, remedy: str, *, where: str = "", possible: str = ""
) -> PluginError:
    """The error for a plugin whose ``hook`` broke its contract; ``what`` says how."""
    return PluginError(f"{_qualified(plugin)}.{hook} {what}", where=where, possible=possible, remedy=remedy)


@contextmanager
def plugin_errors(
    plugin: object,
    hook: str,
    *,
    passing: tuple[type[Exception], ...] = (),
    hint: Callable[[Exception], str] = lambda error: "",
) -> Iterator[None]:
    """Turn a plugin's exception in ``hook`` into a PluginError that shows its message and last frame.

    Args:
        passing: Exceptions that are no fault of the plugin.
        hint: A possible cause of an exception, told beside its message; empty if none is known.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (MMRLError, *passing)):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        beside = f" ({found})" if (found := hint(error)) else ""
        failure = PluginError(
            f"{_qualified(plugin)}.{hook} raised {type(error).__name__}: {error}{beside}",
            where=f"{frame.filename}:{frame.lineno}",
            remedy="repair or upgrade the plugin",
        )
        failure.details = traceback.format_exc()
        raise failure from error


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its class if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def error_class(exit_code: int) -> type[MMRLError]:
    """The class of errors with an exit code; ``MMRLError`` if there is none."""
    return next((kind for kind in MMRLError.__subclasses__() if kind.exit_code == exit_code), MMRLError)


def plural(count: float, noun: str) -> str:
    """A count with its noun, for messages: ``1 step``, ``2 steps``, ``0.5 epochs``."""
    return f"{count:g} {noun}" if count == 1 else f"{count:.12g} {noun}s"


def _qualified(plugin: object) -> str:
    return f"{type(plugin).__module__}.{type(plugin).__qualname__}"
