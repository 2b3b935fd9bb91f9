"""How a check says that a plugin breaks a rule."""

from __future__ import annotations

from mmrl.errors import MMRLError, PluginError
from mmrl.interfaces import Plugin


class Untried(PluginError):
    """A plugin raised on made-up data that it need not be made for; ``where`` says what."""


def broken(plugin: Plugin, rule: str, found: str, remedy: str, kind: type[PluginError] = PluginError) -> PluginError:
    """The error for a plugin that breaks ``rule``, a statement that should hold; ``found`` has the values."""
    name = f"{type(plugin).__module__}.{type(plugin).__qualname__}"
    return kind(f"{name} breaks a rule: {rule}", where=found, remedy=remedy)


def failed(
    plugin: Plugin, rule: str, error: MMRLError, remedy: str, kind: type[PluginError] = PluginError
) -> PluginError:
    """The same, where the plugin raised."""
    failure = broken(plugin, rule, f"{error.what} ({error.where})" if error.where else error.what, remedy, kind)
    failure.details = getattr(error, "details", "")
    return failure
