"""A reference that becomes the policy: its weights, or the adapters alone, and what checkpoints have of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.engine.spec import EngineSpec
from mmrl.plugin_host import registry
from mmrl.types import TrainingRow
from tests.engine.test_learner import case_of, rows_of

KL = {"kl": {"coef": 0.1}}
LORA = {"rank": 4, "targets": ["language"]}
FULL = pytest.mark.full


def sections_of(model: dict[str, Any], stage: int, vision: Any, **learner: Any) -> dict[str, Any]:
    """Sections of a run whose reference is reset; small weights are partitioned too."""
    zero = {"zero_optimization": {"stage3_param_persistence_threshold": 1000}}
    return {
        "model": {"path": vision.folder.path, "dtype": "float32", **model},
        "algorithm": KL,
        "reference": {"reset_every": 1},
        "learner": {"zero_stage": stage, "lr": 3e-3, "deepspeed": zero if stage == 3 else {}, **learner},
    }


def step(learner: Any, rows: list[TrainingRow]) -> None:
    known = learner.network("reference").score([row.sample for row in rows])
    columns = [{**row.columns, "reference_logprobs": values} for row, values in zip(rows, known, strict=True)]
    pairs = zip(rows, columns, strict=True)
    result = learner.network("policy").update(
        [replace(row, columns=each, constants={"kl_coef": 0.1}) for row, each in pairs]
    )
    assert not result.fault


def scored(learner: Any, role: str, case: Any) -> np.ndarray:
    return np.concatenate(learner.network(role).score(case.samples))


SETTINGS = [
    pytest.param({}, 0, id="full-0"),
    pytest.param({}, 3, id="full-3"),
    pytest.param({}, 2, id="full-2", marks=FULL),
    pytest.param({"freeze": ["vision", "projector"]}, 0, id="frozen-0", marks=FULL),
    pytest.param({"lora": LORA}, 0, id="lora-0"),
    pytest.param({"lora": LORA}, 3, id="lora-3", marks=FULL),
    pytest.param({"lora": LORA, "dtype": "bfloat16"}, 2, id="lora-bfloat16-2", marks=FULL),
]


@pytest.mark.parametrize(("model", "stage"), SETTINGS)
def test_a_reset_makes_the_reference_the_policy_and_a_checkpoint_keeps_it(model, stage, start, vision, tmp_path):
    case = case_of(vision)
    sections, rows = sections_of(model, stage, vision), rows_of(case)()
    with start(**sections).learning() as learner:
        first = scored(learner, "reference", case)
        assert learner.save(tmp_path / "early").keys() == {"policy"}
        step(learner, rows)
        np.testing.assert_array_equal(scored(learner, "reference", case), first)
        policy = scored(learner, "policy", case)
        learner.reset_reference()
        np.testing.assert_array_equal(scored(learner, "reference", case), policy)
        assert np.abs(policy - first).max() > 0.01
        step(learner, rows)
        later = scored(learner, "policy", case)
        np.testing.assert_array_equal(scored(learner, "reference", case), policy)
        np.testing.assert_array_equal(scored(learner, "policy", case), later)  # the reference's turn leaves no trace
        files = learner.save(tmp_path / "late")
        step(learner, rows)
        expected = scored(learner, "policy", case)
    assert files["reference"].state == "" and not files["reference"].optimizer
    assert files["reference"].model == "reference/model" and not (tmp_path / "late" / "reference" / "state").exists()
    with start(checkpoint=tmp_path / "late", **sections).learning() as learner:
        np.testing.assert_array_equal(scored(learner, "reference", case), policy)
        np.testing.assert_array_equal(scored(learner, "policy", case), later)
        step(learner, rows)
        np.testing.assert_allclose(scored(learner, "policy", case), expected, atol=1e-6)
        assert learner.save(tmp_path / "again").keys() == {"policy", "reference"}


@FULL
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("model", [{}, {"lora": LORA}], ids=["full", "lora"])
def test_two_ranks_reset_the_reference_as_one_does(model, stage, vision, start_ranks, tmp_path):
    case = case_of(vision)
    sections = sections_of(model, stage, vision) | {"algorithm": {"name": "grpo", **KL}}
    config = vision.config(**sections, cluster={"name": "ray", "ranks": 2})
    parts = (config, vision.folder, vision.media, registry.create("algorithm", config.algorithm), 2, False)

    def run(checkpoint: Path | None) -> dict[str, np.ndarray]:
        group, rows = start_ranks(EngineSpec(*parts, checkpoint)), rows_of(case)()
        try:
            with group.learning() as learner:
                found = {"reference before": scored(learner, "reference", case)}
                if checkpoint is None:
                    step(learner, rows)
                    learner.reset_reference()
                    found["reset"] = scored(learner, "policy", case)
                    step(learner, rows)
                    learner.save(tmp_path / "saved")
                return found | {role: scored(learner, role, case) for role in ("policy", "reference")}
        finally:
            group.close()

    first, again = run(None), run(tmp_path / "saved")
    np.testing.assert_array_equal(first["reference"], first["reset"])
    assert np.abs(first["reset"] - first["reference before"]).max() > 0.01
    for role in ("policy", "reference"):
        np.testing.assert_array_equal(again[role], first[role])
