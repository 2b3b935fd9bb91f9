"""The first-party algorithms keep the rules with other options than their own, too."""

from __future__ import annotations

from typing import Any

import pytest

from mmrl.testing import check_algorithm

IN_LOSS = {"kl": {"coef": 0.1, "where": "loss", "estimator": "k3"}}
IN_REWARD = {"kl": {"coef": 0.1, "where": "reward"}}
ADAPTIVE = {"kl": {"coef": 0.1, "where": "loss", "target": 0.05, "unit": "sequence"}}
DYNAMIC = {"dynamic_sampling": {"metric": "math"}}
NO_KL = {"kl": {"coef": 0.0}}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {**IN_LOSS, "correction": {"mode": "token-truncate"}, "entropy_coef": 0.01}),
        ("grpo", {**ADAPTIVE, "dual_clip": 3.0, "mask_truncated": True}),
        ("grpo", {**NO_KL, "reward_norm": "group", "reward_clip": [-1.0, 1.0]}),
        ("dapo", {**DYNAMIC, "correction": {"mode": "token-mask", "low": 0.5, "high": 5.0}}),
        ("dapo", {"mask_truncated": True, "aggregation": "prompt-mean-token-mean", **IN_REWARD}),
        ("dr_grpo", {**IN_LOSS, "correction": {"mode": "seq-geo-mask"}, "length_norm": 16}),
        ("gspo", {"correction": {"mode": "seq-truncate"}, "entropy_coef": 0.01}),
        ("gspo_token", {**IN_LOSS, "mask_truncated": True}),
        ("gmpo", {"correction": {"mode": "seq-mask"}, **IN_LOSS}),
        ("cispo", {"entropy_coef": 0.01, **IN_REWARD}),
        ("sapo", {"reward_norm": "group", "correction": {"mode": "seq-geo-reject"}}),
        ("rloo", {"loss": "sequence_clip", "aggregation": "seq-mean-token-mean", **IN_REWARD}),
        ("rloo", {"loss": "ppo_clip", **IN_LOSS, "reward_clip": [-0.5, 0.5]}),
        ("remax", {**IN_REWARD, "reward_clip": [-0.5, 0.5], "mask_truncated": True}),
        ("reinforce_pp", {**IN_LOSS, "entropy_coef": 0.01}),
        ("reinforce_pp_baseline", {"level": "sample"}),
        ("reinforce_pp_baseline", {"level": "sample", "mask_truncated": True, **DYNAMIC, **IN_LOSS}),
        ("raft", {"entropy_coef": 0.01, **IN_LOSS}),
        ("raft_pp", {**DYNAMIC, "correction": {"mode": "token-truncate", "high": 1.5}}),
        ("reinforce_rej", {**IN_LOSS, "mask_truncated": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_an_algorithm_keeps_the_rules_with_these_options(name: str, options: dict[str, Any]) -> None:
    check_algorithm(name, options=options, rewards=("math",))
    check_algorithm(name, options=options, rewards=("math", "overlong"))
