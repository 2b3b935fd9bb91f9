"""Numbers and worlds of ranks that sample and of ranks that learn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mmrl.cluster.ranks import rank_names
from mmrl.cluster.sides import of_one_side, sides_of
from mmrl.config.load import from_mapping
from mmrl.engine.spec import EngineSpec
from mmrl_algorithms.grpo import GRPO


def config(cluster: dict[str, int], **sections: Any) -> Any:
    base = {"model": {"path": "m"}, "data": {"train": {"name": "table"}}, "algorithm": {"name": "grpo"}}
    return from_mapping({**base, "cluster": {"name": "ray", **cluster}, **sections})


def test_ranks_that_take_turns_are_one_world() -> None:
    sides = sides_of(config({"ranks": 4}, sampler={"tensor_parallel_size": 2}))
    assert (sides.samplers, sides.learners, sides.worlds) == (range(4), range(4), [range(4)])
    assert sides.turns(on_cpu=True) == sides.turns(on_cpu=False) == [[0, 1, 2, 3]]


def test_each_set_that_samples_together_is_a_world_and_the_learner_is_another() -> None:
    apart = config({"sampler_ranks": 4, "learner_ranks": 3}, sampler={"tensor_parallel_size": 2})
    sides = sides_of(apart)
    assert (sides.samplers, sides.learners) == (range(4), range(4, 7))
    assert sides.worlds == [range(2), range(2, 4), range(4, 7)]
    assert sides.turns(on_cpu=False) == [[0, 1, 2, 3, 4, 5, 6]]
    assert sides.turns(on_cpu=True) == [[0, 1, 4, 5, 6], [2, 3]]  # their shared memory has one name
    assert rank_names(apart.cluster)[3:5] == ["sampler rank 3", "learner rank 0"]


@pytest.mark.parametrize(
    ("algorithm", "samples", "ranks"),
    [(None, True, 3), (GRPO(GRPO.Config()), False, 2), (GRPO(GRPO.Config()), True, None)],
)
def test_an_engine_that_needs_one_side_has_its_ranks_alone(algorithm: Any, samples: bool, ranks: int | None) -> None:
    apart = config({"sampler_ranks": 3, "learner_ranks": 2}, trainer={"staleness": 1})
    spec = EngineSpec(apart, SimpleNamespace(), SimpleNamespace(), algorithm, 0, with_sampler=samples)  # type: ignore[arg-type]
    found = of_one_side(spec).config
    assert (found.cluster.is_split, found.trainer.staleness) == ((False, 0) if ranks else (True, 1))
    assert found.cluster.num_ranks == (ranks or 5)
