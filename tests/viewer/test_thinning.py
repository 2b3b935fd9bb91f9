"""Curves with fewer steps, as a report has them that is too small for all."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from mmrl.viewer.thinning import thinned


def document(steps: int) -> Any:
    values = [step / 7 for step in range(steps)]
    accuracy = [value if step % 20 == 3 else None for step, value in enumerate(values)]
    return {"steps": list(range(steps)), "curves": {"loss": values, "eval/accuracy": accuracy}, "problem": None}


def test_curves_that_fit_are_left_as_they_are() -> None:
    documents = {"a": document(200)}
    assert thinned(documents, 10**6) == (documents, 1)


@pytest.mark.parametrize("share", [3, 10])
def test_what_is_left_is_spread_and_has_the_last_step_and_all_evaluations(share: int) -> None:
    documents = {"a": document(400), "b": document(30), "empty": {"steps": [], "curves": {}, "problem": None}}
    room = len(json.dumps(documents)) // share
    found, every = thinned(documents, room)
    assert sum(len(json.dumps(each)) for each in found.values()) <= room and every >= share
    steps = found["a"]["steps"]
    assert steps[0] == 0 and steps[-1] == 399 and max(b - a for a, b in pairwise(steps)) <= every
    assert [step for step in range(400) if step % 20 == 3] == [step for step in steps if step % 20 == 3]
    assert found["a"]["curves"]["loss"] == [step / 7 for step in steps]
    assert found["b"]["steps"][-1] == 29 and found["empty"] == documents["empty"]


def test_a_run_whose_metrics_are_all_rare_becomes_smaller_too() -> None:
    names = {f"of/{step}": [1.0 if each == step else None for each in range(60)] for step in range(60)}
    documents = {"a": {"steps": list(range(60)), "curves": names, "problem": None}}
    found, _ = thinned(documents, len(json.dumps(documents)) // 2)
    assert len(found["a"]["steps"]) < 60 and found["a"]["steps"][-1] == 59
