"""A policy and a critic in one learner: each as if it were alone, on weights of its own or on the policy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.critic_runs import ROLES, UPDATES, WAYS, take, ways

FULL = pytest.mark.full


@pytest.mark.parametrize("way", ways())
def test_two_networks_equal_two_runs_alone(way, start, vision):
    """To the bit: an update of one between two of the other changes nothing of it."""
    both = take(start, vision, way, "cp" * UPDATES)
    take(start, vision, way, "p" * UPDATES).equals(both, "policy")
    take(start, vision, way, "c" * UPDATES).equals(both, "critic")
    begun = take(start, vision, way, "")
    for role in ROLES.values():
        assert any(not torch.equal(value, begun.weights[role][name]) for name, value in both.weights[role].items())
    assert np.abs(both.values - begun.values).max() > 1e-3


@pytest.mark.parametrize("way", ways())
def test_weights_are_shared_where_they_can_be(way, start, vision):
    """And features of images where no tower is trained: the tower then sees an image once for both networks."""

    def look(learner: object) -> None:
        policy, critic = (learner.network(role) for role in ROLES.values())
        own = {id(p) for p in policy.policy.model.parameters()}
        shared = [p for p in critic.policy.model.parameters() if id(p) in own]
        frozen = [p for p in critic.policy.model.parameters() if not p.requires_grad]
        adapts, stage = "lora" in WAYS[way].get("model", {}), WAYS[way].get("learner", {}).get("zero_stage", 0)
        assert len(shared) == (len(frozen) if adapts and stage < 3 else 0) and (not shared or len(shared) > 20)
        same = critic._batches.features is policy._batches.features
        assert same == (way == "frozen towers" or (adapts and "all parts" not in way))

    take(start, vision, way, "", also=look)
