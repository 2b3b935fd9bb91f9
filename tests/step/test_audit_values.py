"""Rows of the audit about a critic: its values packed and one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmrl.engine.network.reward_model import Critic
from mmrl.step.audit.probed import Probed, probed
from mmrl.step.audit.values import value_rows
from tests.engine.critics import valued


@pytest.fixture
def asked(start: Any, vision: Any) -> Any:
    """The probes of an engine, whose critic begins with a head of this kind."""

    def ask(head: str) -> Probed:
        sections = {"critic": {"head": head}, "data": {"max_prompt_tokens": 256}, "learner": {"zero_stage": 0}}
        engine = start(algorithm=valued(), **sections)
        found = probed(engine, vision.encoder, vision.config(**sections))
        assert found is not None
        return found

    return ask


def test_a_critics_values_are_the_same_packed_and_one_by_one(asked):
    rows = list(value_rows(asked("normal")))
    assert len(rows) > 3 and {row.verdict for row in rows} == {"ok"}
    assert all(row.probe.startswith("critic: packed = one by one, ") and row.number < 1e-5 for row in rows)


def test_a_critic_that_reads_another_sample_of_its_row_is_told_of(asked, monkeypatch):
    found, forward = asked("normal"), Critic.forward

    def mixed(critic: Critic, inputs: Any) -> Any:
        values = forward(critic, inputs)
        return values.roll(1) if isinstance(values, torch.Tensor) and len(values) > 30 else values

    monkeypatch.setattr(Critic, "forward", mixed)
    bad = [row for row in value_rows(found) if row.verdict == "bad"]
    assert bad and "the critic's values, packed, are" in bad[0].found and "a shared prompt" in bad[0].finds


def test_a_head_of_zeros_leaves_nothing_to_compare(asked):
    assert list(value_rows(asked("zero"))) == []
