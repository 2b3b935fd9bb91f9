"""Process rewards: steps by hand, and values against the model itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrl.errors import ConfigError
from mmrl.testing import check_reward, make_rollouts
from mmrl.types import Spans, Unscored
from mmrl_methods.process import Process, steps_of

TEXT = "a b\n\n c + d \ne # 1"


@pytest.fixture(scope="module")
def folder(write_model: Callable[..., Path]) -> Path:
    return write_model("CausalLM")


def made(folder: Path, **options: Any) -> Process:
    return Process(Process.Config(path=str(folder), device="cpu", tag="#", **options))


def test_steps_are_lines_that_are_not_blank() -> None:
    assert [TEXT[start:end] for start, end in steps_of(TEXT, "\n")] == ["a b", "c + d", "e # 1"]
    assert steps_of("x;;y", ";;") == [(0, 1), (3, 4)]
    assert steps_of(" \n", "\n") == []


def test_values_are_the_models_at_its_own_tags(folder: Path) -> None:
    """+ is token 4 and - is token 5. The policy's own tag, the third of four, is not read."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (rollout,) = make_rollouts([TEXT], question="Q")
    ids = AutoTokenizer.from_pretrained(folder)("Q a b #\nc + d #\ne # 1 #", return_tensors="pt")["input_ids"]
    logits = AutoModelForCausalLM.from_pretrained(folder)(ids).logits[0]
    tags = torch.flatten((ids[0] == 6).nonzero())[[0, 1, 3]]
    expected = [float(1 / (1 + (logit[5] - logit[4]).exp())) for logit in logits[tags]]
    found = made(folder).score_one(rollout)
    assert isinstance(found, Spans)
    assert [value for *_, value in found.spans] == pytest.approx(expected, rel=1e-5)
    assert [TEXT[start:end] for start, end, _ in found.spans] == ["a b", "c + d", "e # 1"]
    totals = {"min": min(expected), "product": math.prod(expected), "mean": sum(expected) / 3}
    for total, value in (totals | {"last": expected[-1], "sum": sum(expected)}).items():
        scored = made(folder, total=total).score_one(rollout)
        assert isinstance(scored, Spans) and scored.value == pytest.approx(value, rel=1e-5)


def test_what_it_cannot_judge_is_unscored_or_refused(folder: Path) -> None:
    empty, long = make_rollouts(["\n", "a " * 20], question="Q")
    assert made(folder).score_one(empty) == Spans(0.0, ())
    assert isinstance(made(folder, max_tokens=10).score_one(long), Unscored)
    with pytest.raises(ConfigError, match="'yes it is -' is not one token for each word"):
        made(folder, good="yes it is").prepare()


def test_it_keeps_the_rules_of_rewards(folder: Path) -> None:
    check_reward("process", options={"path": str(folder), "device": "cpu", "tag": "#"})
