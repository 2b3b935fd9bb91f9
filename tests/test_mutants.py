"""The seeded faults of mutants.toml fit the tree; ``mutants.py`` itself runs them."""

from __future__ import annotations

import ast
import re
from dataclasses import replace

import pytest

from tests.mutants import ROOT, Fault, faults

ROOMS = {
    "ops",
    "engine",
    "cluster",
    "rollout",
    "step",
    "runs",
    "config",
    "data",
    "plugin_host",
    "system",
    "commands",
}


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name)
def test_a_fault_changes_one_place_and_names_tests_that_exist(fault: Fault) -> None:
    file = fault.file(ROOT)
    ast.parse(file.read_text().replace(fault.old, fault.new))
    assert fault.old != fault.new and fault.harm and fault.tests
    for test in fault.tests:
        path, _, name = test.partition("::")
        functions = re.findall(r"^(?:async )?def (test_\w+)", (ROOT / path).read_text(), re.MULTILINE)
        assert not name or name.partition("[")[0] in functions, test


def test_a_text_that_occurs_twice_or_never_is_refused() -> None:
    fault = faults()[0]
    for stale in (
        replace(fault, old="import "),
        replace(fault, old="no such text"),
        replace(fault, place="mmrl/none.py"),
    ):
        with pytest.raises(LookupError, match=f"{fault.name}: the text occurs"):
            stale.file(ROOT)


def test_there_are_faults_in_every_room_each_of_a_name_of_its_own() -> None:
    names = [fault.name for fault in faults()]
    assert len(names) >= 24 and len(set(names)) == len(names)
    rooms = {fault.file(ROOT).relative_to(ROOT).parts[1] for fault in faults()}
    assert rooms >= ROOMS | {"mmrl_algorithms", "mmrl_rewards"}
