"""Where each value of a run's config was written, kept in the run's folder for those who look at it later."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

ORIGINS = "origins.json"
"""By dotted key: ``file:line``, an override, or ``default``; as ``mmrl show`` has them."""


def read_origins(run: Path) -> dict[str, str]:
    """The origins that a run has recorded; none if it has none that can be read."""
    try:
        found = json.loads((run / ORIGINS).read_bytes())
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def merged_origins(
    now: Mapping[str, str], before: Mapping[str, str], run: Path, changed: Collection[str]
) -> dict[str, str]:
    """The origins of a config with which a run goes on.

    A run may go on with its own config.yaml, which holds every value: a value that it has not changed keeps the origin
    that it had before.

    Args:
        run: The run's folder.
        changed: Keys whose values have changed since the checkpoint; what they hold has changed too.
    """
    own = str((run / "config.yaml").resolve())

    def origin(key: str) -> str:
        path = now[key].rpartition(":")[0]
        is_own = bool(path) and str(Path(path).resolve()) == own
        is_changed = any(key == each or key.startswith(f"{each}.") for each in changed)
        return before[key] if is_own and not is_changed and key in before else now[key]

    return {key: origin(key) for key in now}
