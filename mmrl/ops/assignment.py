"""The credit of a batch: the algorithm is asked, its answer checked, and masks and columns made of it."""

from __future__ import annotations

import dis
import functools
import math
from collections.abc import Sequence

import numpy as np
import torch

from mmrl.errors import contract_error, plugin_errors, warn_of_old_name
from mmrl.interfaces import Algorithm
from mmrl.ops.absent import absent_columns
from mmrl.token_columns import COLUMNS, CRITIC_COLUMNS
from mmrl.types import Batch, BoolArray, Credit, FloatArray


def assign_credit(algorithm: Algorithm, batch: Batch) -> Credit:
    """The algorithm's credit for a batch.

    Raises:
        PluginError: It raised, such as for a column that the run lacks, or answered no Credit that fits the batch:
            values one per row, or one per token, all finite in the loss; keep one bool per row; constants finite
            numbers.
    """
    with plugin_errors(algorithm, "credit", hint=functools.partial(absent_columns, algorithm, batch)):
        credit = credit_of(algorithm, batch)
        _check_credit(algorithm, batch, credit)
    return credit


def credit_of(algorithm: Algorithm, batch: Batch) -> Credit:
    """The algorithm's answer, which nothing has checked.

    Version 0.2.0 gave every demonstration advantage 1 and did not ask. Until the next version, with a warning, an
    algorithm that learns from demonstrations gets that if its ``credit`` can only raise, or is inherited from an
    algorithm that learns from something else.
    """
    if algorithm.source == "demonstrations":
        owner = next(each for each in type(algorithm).__mro__ if "credit" in vars(each))
        is_own = owner is type(algorithm) or getattr(owner, "source", None) == algorithm.source
        if not is_own or _only_raises(vars(owner)["credit"]):
            name = type(algorithm).__name__
            what = f"{name}: advantage 1 of a demonstration that no credit is asked for"
            warn_of_old_name(what, "that of its own credit")
            return Credit(np.ones(len(batch.masks)))
    return algorithm.credit(batch)


def _only_raises(function: object) -> bool:
    """True of a function of Python whose code has no way to return, such as one that raises NotImplementedError."""
    code = getattr(function, "__code__", None)
    return code is not None and not any(each.opname.startswith("RETURN") for each in dis.get_instructions(code))


def _check_credit(algorithm: Algorithm, batch: Batch, credit: Credit) -> None:
    def demand(holds: bool, what: str, remedy: str) -> None:
        if not holds:
            raise contract_error(algorithm, "credit", what, remedy)

    rows = len(batch.masks)
    demand(isinstance(credit, Credit), f"answered {kind_of(credit)}", "return mmrl.types.Credit(advantages)")
    values = credit.advantages
    ordered = values.ndim > 0 if isinstance(values, np.ndarray) else isinstance(values, Sequence)
    what = f"gave values of {kind_of(values)}, not one entry for each of {rows} rows"
    demand(
        ordered and len(values) == rows,
        what,
        "give a number, or an array of its tokens' (T_i,), for each row, also for invalid ones",
    )
    if credit.keep is not None:
        fits = np.shape(credit.keep) == (rows,) and np.asarray(credit.keep).dtype == bool
        remedy = "give a mask; of indices: np.isin(np.arange(len(batch.rewards)), indices)"
        demand(fits, f"gave keep as {kind_of(credit.keep)}, not a bool for each of {rows} rows", remedy)
    for name, number in credit.constants.items():
        fits = isinstance(number, int | float | np.number) and math.isfinite(number)
        demand(fits, f"gave the constant {name!r} as {number!r}", "constants are finite numbers, such as float(x)")
    for i, (value, mask) in enumerate(zip(values, loss_masks(batch, credit), strict=True)):
        if np.shape(value) not in ((), mask.shape):
            what = f"gave row {i} values of shape {np.shape(value)}, and it has {mask.size} tokens"
            demand(False, what, "give one number, or one for each of its tokens")
        if not _is_finite(value, mask):
            remedy = (
                "divide by nothing that can be 0, as a group's deviation can; mmrl.ops.credit.group_advantages does not"
            )
            demand(False, f"gave row {i} an advantage that is not finite", remedy)
    if algorithm.needs().values:
        _check_returns(algorithm, batch, credit.returns)


def _check_returns(algorithm: Algorithm, batch: Batch, returns: object) -> None:
    """Raises PluginError unless there is a finite number for each token that the critic learns."""
    rows = len(batch.masks)
    if not (isinstance(returns, Sequence) and len(returns) == rows):
        what = f"gave returns of {kind_of(returns)}, not an array for each of {rows} rows, which the critic learns"
        raise contract_error(algorithm, "credit", what, "return Credit(advantages, returns=[...]), (T_i,) for each row")
    for i, (value, mask) in enumerate(zip(returns, value_masks(batch), strict=True)):
        if np.shape(value) != mask.shape:
            what = f"gave row {i} returns of shape {np.shape(value)}, and it has {mask.size} tokens"
            raise contract_error(algorithm, "credit", what, "give one number for each of its tokens")
        if not _is_finite(value, mask):
            remedy = "compute returns of all valid rows, also of those that keep drops: the critic learns them"
            raise contract_error(algorithm, "credit", f"gave row {i} a return that is not finite", remedy)


def _is_finite(value: object, mask: BoolArray) -> bool:
    """True if a number, or those of the tokens in the mask, are finite."""
    finite = np.isfinite(np.asarray(value))
    return bool(finite.all() or not np.any(mask & ~finite))


def kind_of(value: object) -> str:
    """The type of a value, with its shape."""
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, np.ndarray | torch.Tensor) else ""
    length = f" of length {len(value)}" if isinstance(value, list | tuple) else ""
    return f"{getattr(value, 'dtype', type(value).__name__)}{shape}{length}"


def loss_masks(batch: Batch, credit: Credit) -> list[BoolArray]:
    """B masks (T_i,) of the tokens in the loss: written by the policy, in a valid row that the credit keeps; none while
    the critic alone learns."""
    keep_B = batch.valid if credit.keep is None else batch.valid & np.asarray(credit.keep, bool)
    keep_B = keep_B & (not batch.pretrains)
    return [np.asarray(mask, bool) & bool(keep) for mask, keep in zip(batch.masks, keep_B, strict=True)]


def value_masks(batch: Batch) -> list[BoolArray]:
    """B masks (T_i,) of the tokens that the critic learns: written by the policy, in a valid row."""
    return [np.asarray(mask, bool) & bool(valid) for mask, valid in zip(batch.masks, batch.valid, strict=True)]


def columns_before(
    batch: Batch, credit: Credit, masks: Sequence[BoolArray], *, critic: bool = False
) -> dict[str, Sequence[FloatArray]]:
    """B arrays (T_i,) by name: the token columns of a batch and its credit that are known before an optimizer step.

    Those by credit are 0 outside the masks.

    Args:
        critic: True for the critic's columns, False for all others.
    """
    columns = [column for column in COLUMNS if (column in CRITIC_COLUMNS) == critic]
    found = {column.name: getattr(batch, column.name) for column in columns if column.known == "before the step"}
    for column in columns:
        if column.known == "by credit" and (given := getattr(credit, column.name)) is not None:
            values = zip(given, masks, strict=True)
            found[column.name] = [np.where(mask, np.asarray(value, np.float64), 0.0) for value, mask in values]
    return {name: values for name, values in found.items() if values is not None}
