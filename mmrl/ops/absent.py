"""The error of an algorithm that uses a token column which its run lacks: such a column is None."""

from __future__ import annotations

import dis
import traceback
from collections.abc import Iterator, Set
from contextlib import contextmanager
from types import FrameType

from mmrl.errors import contract_error
from mmrl.token_columns import COLUMNS
from mmrl.types import Batch, PackedTokens


@contextmanager
def absent_columns(algorithm: object, hook: str, given: Batch | PackedTokens) -> Iterator[None]:
    """Name the columns that the block lacked, where it fails because they are None in what it was given.

    Raises:
        PluginError: It fails so. The error names the columns, the need that asks for them, and the columns that it has.
    """
    try:
        yield
    except (AssertionError, AttributeError, TypeError) as error:
        end = "_T" if isinstance(given, PackedTokens) else ""
        has = {column: getattr(given, f"{column.name}{end}", None) is not None for column in COLUMNS}
        absent = {f"{column.name}{end}": column for column, is_there in has.items() if column.need and not is_there}
        where, names = _asked(error, absent.keys())
        if not names:
            raise
        needs = ", ".join(f"{absent[name].need}=True" for name in names)
        failure = contract_error(
            algorithm,
            hook,
            f"asks for {' and '.join(names)}, which this run lacks, as needs() does not name it",
            f"let needs() return Needs({needs}), or do without it where it is None",
            where=where,
            possible=", ".join(column.name for column, is_there in has.items() if is_there),
        )
        failure.details = traceback.format_exc()
        raise failure from None  # its remedy is this one; its details have the traceback


def _asked(error: Exception, attributes: Set[str]) -> tuple[str, list[str]]:
    """The place of the innermost line that uses one of these attributes, and those that it uses."""
    if isinstance(error, AssertionError) or "None" in str(error):
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            if names := _used(frame, line, attributes):
                return f"{frame.f_code.co_filename}:{line}", sorted(names)
    return "", []


def _used(frame: FrameType, line: int, attributes: Set[str]) -> set[str]:
    """Those of the attributes that a line reads, or that it has in a variable which another line gave them."""
    lines: dict[int | None, list[dis.Instruction]] = {}
    for each in dis.get_instructions(frame.f_code):
        lines.setdefault(each.positions.lineno if each.positions else None, []).append(each)

    def names(at: int | None, opname: str) -> set[str]:
        found = [each.argval for each in lines.get(at, ()) if each.opname.startswith(opname)]
        return {name for each in found for name in (each if isinstance(each, tuple) else (each,))}

    found = names(line, "LOAD_ATTR") & attributes
    for other in lines:
        if not names(other, "CALL"):  # what it stores is what it reads
            variables = names(other, "STORE_FAST") & names(line, "LOAD_FAST")
            if any(frame.f_locals.get(variable, 0) is None for variable in variables):
                found |= names(other, "LOAD_ATTR") & attributes
    return found
