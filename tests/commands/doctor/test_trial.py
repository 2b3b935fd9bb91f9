"""How the self-test judges, and what becomes of a stage that fails."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mmrl.commands.doctor import trial
from mmrl.commands.doctor.finding import Finding
from mmrl.commands.doctor.tiny_run import TinyRun
from mmrl.commands.doctor.trial import Trial, judge, until_they_differ
from mmrl.engine.aids import attention_error
from mmrl.engine.spec import EngineSpec
from mmrl.errors import NumericsError, ResourceError
from mmrl.ops.parity import Gap


def gap(size: float) -> Gap:
    return Gap(size, size, size, size)


@pytest.mark.parametrize(
    ("size", "precision", "inexact", "status"),
    [
        (1e-6, "float32", False, "ok"),
        (5e-5, "float32", False, "warn"),
        (1e-3, "float32", False, "bad"),
        (1e-3, "float32", True, "warn"),
        (0.2, "float32", True, "bad"),
        (1e-3, "bfloat16", False, "ok"),
        (3e-2, "bfloat16", False, "warn"),
        (0.2, "bfloat16", False, "bad"),
        (float("nan"), "bfloat16", False, "bad"),
        (float("nan"), "float32", True, "bad"),
    ],
)
def test_a_gap_is_judged_by_precision_and_float32_may_be_tf32(size, precision, inexact, status):
    found, remedy = judge(gap(size), precision, inexact=inexact)
    assert found == status
    assert bool(remedy) == (status != "ok")


def test_tf32_is_allowed_for_on_gpus_only_and_only_between_sampler_and_learner(tmp_path):
    """The sampler's log-probs are off by 1e-3, and so are packed ones from those one by one."""

    def score(_: Any, *, way: str = "packed") -> list[Any]:
        return [np.full(1, -1.0 - 1e-3 * (way == "packed"), np.float32)]

    policy: Any = SimpleNamespace(score=score)
    statuses = {}
    for kind in ("cuda", "cpu"):
        rows: list[Finding] = []
        Trial("float32", kind, tmp_path, rows.append)._compare_learner(policy, [greedy([1], [-1.0])], "step 1")
        statuses[kind] = [row.status for row in rows]
    assert statuses == {"cuda": ["warn", "bad"], "cpu": ["bad", "bad"]}


def test_an_inexact_attention_of_the_learner_is_bad_on_a_gpu_too(monkeypatch, tmp_path):
    monkeypatch.setattr(attention_error, "attention_error", lambda *_: 1e-3)
    rows: list[Finding] = []
    Trial("float32", "cuda", tmp_path, rows.append)._check_attention()
    assert [row.status for row in rows] == ["bad"]


def test_the_kernel_of_vision_towers_is_judged_too_where_there_is_one(monkeypatch, tmp_path):
    monkeypatch.setattr(attention_error, "attention_error", lambda *_: 1e-3)
    monkeypatch.setattr(attention_error, "tower_error", lambda *_: 0.5)
    rows: list[Finding] = []
    Trial("bfloat16", "cuda", tmp_path, rows.append)._check_attention()
    assert [(row.check, row.status) for row in rows] == [("bf16 attention", "ok"), ("bf16 vision attention", "bad")]
    assert rows[1].found.startswith("mmrl_flash_tower: relative error 5.0e-01")


def greedy(ids: list[int], logprobs: list[float]) -> SimpleNamespace:
    return SimpleNamespace(token_ids=np.array(ids), sampler_logprobs=np.array(logprobs, np.float32))


def test_greedy_completions_are_compared_up_to_the_first_other_token():
    one, other = until_they_differ(
        [greedy([1, 2, 3], [-1, -2, -3]), greedy([5, 6], [-1, -1])],
        [greedy([1, 9, 9], [-1, -2, -8]), greedy([5, 6, 7], [-1, -1, -1])],
    )
    assert [values.tolist() for values in one] == [[-1, -2], [-1, -1]]
    assert [values.tolist() for values in other] == [[-1, -2], [-1, -1]]
    broken = until_they_differ([greedy([1, 2], [-1, -1])], [greedy([7, 7], [-3, -3])])
    assert Gap.between(*broken).abs_max == 2


@pytest.mark.parametrize(
    ("error", "area"), [(ResourceError("vLLM does not start"), "engine"), (NumericsError("stale"), "numbers")]
)
def test_a_stage_that_fails_is_a_row_and_ends_what_builds_on_it(error, area, monkeypatch, tmp_path):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(trial.TinyRun, "start", fail)
    rows: list[Finding] = []
    Trial("float32", "cpu", Path(tmp_path), rows.append).run()
    assert [(row.area, row.check, row.status) for row in rows] == [
        ("numbers", "fp32 attention", "ok"),
        (area, "fp32 engines", "bad"),
        ("engine", "fp32 not run", "warn"),
    ]
    assert error.what in rows[1].found and "test_trial.py" in rows[1].found
    assert rows[2].found == "sleep and wake, step 1, step 2, after the updates, speed"


def sleep_rows(
    monkeypatch, tmp_path, freed: int = 550, logprob_after: float = -1.0, sleeps: bool = True
) -> list[Finding]:
    """The rows of the sleep check on a GPU of 100 GiB, of which 60 are free until a sleep frees some MiB."""
    rows: list[Finding] = []
    stage = Trial("bfloat16", "cuda", tmp_path, rows.append)
    answers = iter([([greedy([1], [-1.0])], (60 << 30, 100 << 30)), ([greedy([1], [logprob_after])], None)])
    monkeypatch.setattr(stage, "_greedy", lambda: next(answers))
    monkeypatch.setattr(trial.device, "free_memory_bytes", lambda kind: ((60 << 30) + (freed << 20), 100 << 30))
    stage._run = SimpleNamespace(sleeps=sleeps)
    stage._check_sleep()
    return rows


@pytest.mark.parametrize(("freed", "asleep", "status"), [(550, 60.5, "ok"), (50, 60.0, "bad"), (250, 60.2, "bad")])
def test_a_sleep_that_frees_less_than_half_of_the_kv_cache_is_bad(freed, asleep, status, monkeypatch, tmp_path):
    same, memory = sleep_rows(monkeypatch, tmp_path, freed)
    assert (same.check, same.status) == ("bf16 before = after sleep", "ok")
    assert (memory.area, memory.status) == ("engine", status)
    assert memory.found == f"free 60.0 GiB awake, {asleep} GiB asleep, of 100.0 GiB"


def test_log_probs_that_a_sleep_changes_are_bad(monkeypatch, tmp_path):
    same, _ = sleep_rows(monkeypatch, tmp_path, logprob_after=-2.0)
    assert (same.area, same.status) == ("numbers", "bad")


def test_a_sampler_that_never_sleeps_need_not_free_anything(monkeypatch, tmp_path):
    _, memory = sleep_rows(monkeypatch, tmp_path, 0, sleeps=False)
    assert (memory.status, memory.found) == ("ok", "only vLLM on a GPU sleeps")


@pytest.mark.parametrize(("takes_images", "family", "prompts"), [(True, "qwen2_5_vl", 3), (False, "qwen2", 1)])
def test_the_trials_model_reads_images_where_they_can_be_learned_from_and_its_kv_cache_is_small(
    takes_images, family, prompts, monkeypatch, tmp_path
):
    import transformers

    from mmrl.cluster import local

    specs: list[EngineSpec] = []
    monkeypatch.setattr(local, "start_engine", specs.append)
    if not takes_images:
        monkeypatch.setattr(transformers.Qwen2_5_VLModel, "forward", lambda self, input_ids, **kwargs: None)
    run = TinyRun.start(tmp_path, "cuda", "bfloat16", sampler="vllm")
    assert (specs[0].folder.family.model_type, len(run.prompts), run.sleeps) == (family, prompts, True)
    assert specs[0].config.sampler.engine == {"kv_cache_memory_bytes": 2**29}
    TinyRun.start(tmp_path, "cuda", "bfloat16", sampler="hf")
    assert specs[1].config.sampler.engine == {}
