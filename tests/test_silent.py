"""The published silent faults of silent.toml fit the tree, and the commands find them; ``silent.py`` runs them all."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter

import pytest

from tests import silent
from tests.mutants import ROOT
from tests.silent_runs import RUNS

SOME = ("temperature-missing-in-the-learner", "sampler-and-learner-are-equally-blind")
"""Faults of the full tier: one that tells sampler from learner, and one that leaves both alike."""


@pytest.mark.parametrize("fault", silent.faults(), ids=lambda fault: fault.name)
def test_a_fault_changes_texts_that_are_in_the_code_once(fault: silent.SilentFault) -> None:
    assert fault.kind.endswith(".") and fault.harm and fault.run in RUNS
    for change in fault.changes:
        file = change.file(ROOT)
        ast.parse(file.read_text().replace(change.old, change.new))
        assert change.old != change.new


def test_each_kind_is_told_of_somewhere_and_has_a_name_of_its_own() -> None:
    kinds = [*silent.faults(), *silent.absent()]
    assert all(each.cited and all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", at) for at in each.cited) for each in kinds)
    names = Counter(fault.name for fault in silent.faults())
    assert len(names) >= 16 and set(names.values()) == {1}


def test_the_page_is_what_the_stored_outcomes_say() -> None:
    assert silent.WRITTEN.read_text() == silent.page(silent.stored()), "python -m tests.silent writes it"


def test_each_fault_has_an_outcome_and_runs_without_one_find_nothing() -> None:
    stored = silent.stored()
    assert list(stored["faults"]) == [fault.name for fault in silent.faults()]
    assert {run: outcome["moment"] for run, outcome in stored["runs"].items()} == dict.fromkeys(RUNS, "not found")
    moments = Counter(outcome["moment"] for outcome in stored["faults"].values())
    assert moments["check"] + moments["start"] >= 14 and not moments["not found"]


@pytest.mark.full
def test_some_faults_are_found_when_the_page_says() -> None:
    checked(*SOME)


@pytest.mark.slow
def test_every_fault_is_found_when_the_page_says() -> None:
    checked()


def checked(*names: str) -> None:
    """In a process of its own: this one has imported mmrl."""
    command = [sys.executable, "-m", "tests.silent", "--check", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
