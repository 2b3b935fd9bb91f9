"""The time of evaluations in `mmrl plan --measure`: each set's completions at the pace of a step's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mmrl.commands.plan.evaluations import evaluation_time
from mmrl.config.load import from_mapping


def setup(evaluated: Any, samples: bool = True, **trainer: Any) -> Any:
    base = {"model": {"path": "m"}, "rewards": [{"name": "right"}], "algorithm": {"name": "a"}}
    data = {"train": {"name": "t"}, "eval": evaluated}
    config = from_mapping({**base, "data": data, "trainer": {"steps": 4, **trainer}})
    source, rows = SimpleNamespace(samples=samples), {"data.eval": 30, "data.eval.a": 10, "data.eval.b": 5}
    return SimpleNamespace(config=config, step_source=source, num_rows=lambda key, spec: rows[key])


def test_an_evaluation_takes_as_long_as_its_completions_do() -> None:
    one = setup({"name": "t"}, eval_samples=2)
    assert evaluation_time(one, 8.0, 40) == (
        {"evaluation_s": pytest.approx(12.0)},
        ["about 12 s an evaluation of 60 completions"],
    )
    several = setup({"a": {"name": "t"}, "b": {"name": "t", "samples": 4}})
    data, lines = evaluation_time(several, 8.0, 40)
    assert data["evaluation_s"] == pytest.approx(6.0) and data["evaluation_set_s"] == {"a": 2.0, "b": 4.0}
    assert lines == ["about 6 s an evaluation of 30 completions: a 2, b 4"]


def test_a_run_without_evaluations_has_no_time_for_them() -> None:
    for nothing in (setup(None), setup({"name": "t"}, eval_every=0), setup({"name": "t"}, samples=False)):
        assert evaluation_time(nothing, 8.0, 40) == ({}, [])
