"""The errors of checks for plugins that break a rule."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import numpy as np

from mmrl.errors import MMRLError, PluginError
from mmrl.interfaces import Algorithm, Plugin


class Untried(PluginError):
    """A plugin raised on made-up data that it need not suit; ``where`` names the data."""


def broken(plugin: Plugin, rule: str, found: str, remedy: str, kind: type[PluginError] = PluginError) -> PluginError:
    """The error for a plugin that breaks ``rule``, a statement that should hold; ``found`` has the values."""
    name = f"{type(plugin).__module__}.{type(plugin).__qualname__}"
    return kind(f"{name} breaks a rule: {rule}", where=found, remedy=remedy)


def failed(
    plugin: Plugin, rule: str, error: MMRLError, remedy: str, kind: type[PluginError] = PluginError
) -> PluginError:
    """The error for a plugin that raised; ``remedy`` says what to do unless the exception itself tells."""
    if error.__cause__ is None:
        remedy = error.remedy or remedy
    elif isinstance(plugin, Algorithm):
        remedy = _algorithm_remedy(error.__cause__) or remedy
    failure = broken(plugin, rule, shown(error), remedy, kind)
    failure.details = getattr(error, "details", "")
    return failure


def shown(error: MMRLError) -> str:
    """The error's text and place."""
    return f"{error.what} ({error.where})" if error.where else error.what


def _algorithm_remedy(error: BaseException) -> str:
    """The remedy for exceptions that first algorithms often raise; empty for any other."""
    text = str(error)
    if isinstance(error, FrozenInstanceError):
        return "make a new array instead (rewards = batch.rewards - 1, not batch.rewards -= 1)"
    if isinstance(error, AttributeError) and error.name in ("values", "keep", "metrics", "terms", "loss_T"):
        if type(error.obj).__name__ == "Tensor":
            return "return mmrl.types.TokenLoss(loss_T)"
        if isinstance(error.obj, np.ndarray | list):
            return "return mmrl.types.Credit(advantages)"
    if isinstance(error, AttributeError) and isinstance(error.obj, Plugin):
        return "set it in __init__; numbers that loss needs from credit go through Credit.constants"
    if "NoneType" in text:
        return "fields that needs() does not ask for (log-probs, greedy rewards) are None; ask for them"
    if isinstance(error, RuntimeError) and ("dtype" in text or "scalar type" in text):
        return "make tensors of the type and device of those given: tokens.logprobs_T.new_zeros(n)"
    return ""
