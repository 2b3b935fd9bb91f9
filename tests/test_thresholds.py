"""The list of thresholds in README.md beside this file names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
LIST = (TESTS / "README.md").read_text().partition("## Where size changes the path")[2]


def test_every_test_that_the_list_of_thresholds_names_exists() -> None:
    rows = [line for line in LIST.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        *_, crossing = row.strip("|").rsplit(" | ", 1)
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", crossing)
        assert named or crossing.strip().startswith("none: "), row
        for file, name in named:
            assert re.search(rf"^(async )?def {name}\(", (TESTS / file).read_text(), re.MULTILINE), (file, name)


def test_every_constant_that_the_list_names_is_in_its_module() -> None:
    found = re.findall(r"\| `([\w/]+\.py)` ([A-Z][A-Z0-9_]+(?:, [A-Z][A-Z0-9_]+)*)", LIST)
    assert len(found) > 10
    for file, names in found:
        places = [path for path in (TESTS.parent / "mmrl" / file, TESTS.parent / file) if path.exists()]
        assert all(re.search(rf"^{name}\b", places[0].read_text(), re.MULTILINE) for name in names.split(", ")), file
