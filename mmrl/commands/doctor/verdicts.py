"""Shows rows of the audit in the doctor's table."""

from __future__ import annotations

from mmrl.commands.doctor.finding import REPORT, Finding
from mmrl.step.audit.probe_row import ProbeRow

WRONG = f"do not train with this: {REPORT}"


def shown(row: ProbeRow, prefix: str = "") -> Finding:
    """The finding of a probe."""
    return Finding(
        "numbers",
        f"{prefix}{row.probe}",
        row.verdict,
        f"{row.found} ({'must exceed' if row.is_least else 'bound'} {row.bound:.2g})",
        WRONG if row.verdict == "bad" else "",
        number=row.number,
        bound=row.bound,
        is_least=row.is_least,
        finds=row.finds,
    )
