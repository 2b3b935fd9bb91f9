"""A hint beside the error of an algorithm that reads a token column which its run lacks: such a column is None."""

from __future__ import annotations

from traceback import walk_tb
from types import CodeType

from mmrl.token_columns import COLUMNS
from mmrl.types import Batch, PackedTokens


def absent_columns(algorithm: object, given: Batch | PackedTokens, error: Exception) -> str:
    """The columns that are None in what the algorithm was given and that its code reads; empty if there are none."""
    if not isinstance(error, AttributeError | TypeError | ValueError):
        return ""
    names_of = {each: each.packed if isinstance(given, PackedTokens) else each.name for each in COLUMNS}
    read = _names(algorithm, error)
    has = {column: getattr(given, name, None) is not None for column, name in names_of.items() if hasattr(given, name)}
    absent = [each for each, is_there in has.items() if each.need and not is_there and names_of[each] in read]
    if not absent:
        return ""
    needs = ", ".join(f"{column.need}=True" for column in absent)
    there = ", ".join(column.name for column, is_there in has.items() if is_there)
    names = " and ".join(names_of[column] for column in absent)
    return f"this run has no {names}: Needs({needs}) asks for {'them' if len(absent) > 1 else 'it'}; it has {there}"


def _names(algorithm: object, error: Exception) -> set[str]:
    """The names that the failing functions use, with functions inside them and methods of the algorithm by name."""
    codes = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    for code in codes:  # grows
        methods = [getattr(getattr(type(algorithm), name, None), "__code__", None) for name in code.co_names]
        codes += [each for each in (*code.co_consts, *methods) if isinstance(each, CodeType) and each not in codes]
    return {name for code in codes for name in code.co_names}
