"""Whole updates of preferences end in the weights of plain transformers, which see one pair at a time.

The best and the worst of a group's candidates are in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from mmrl.engine import device
from mmrl.engine.learner.collation import Collator
from mmrl.engine.network.family import FAMILIES
from mmrl.engine.network.policy import load_policy
from mmrl.engine.network.vision import ImageInputs
from mmrl.engine.spec import EngineSpec
from mmrl.ops.assignment import assign_credit, loss_masks
from mmrl.ops.objective import partial_loss, training_rows
from mmrl.rollout.batch import batch_of, rollouts_of
from mmrl.step.learn import LearnSettings, finished, learn
from mmrl.types import ScoredGroup
from mmrl_algorithms.dpo import DPO
from tests.engine.plain_updates import POLICYS, UPDATES, Trained, learner_section, ragged_groups
from tests.engine.test_policy import gradients, relative_error
from tests.proofs import families

BETA = 0.5
DPO_OPTIONS = {"name": "import:mmrl_algorithms.dpo:DPO", "beta": BETA}
EPS, MAX_NORM = 1e-6, 20.0
LEARNER = learner_section(EPS, MAX_NORM)
FULL = pytest.mark.full


def dpo() -> DPO:
    return DPO(DPO.Config(beta=BETA))


def groups_of(setting: Any) -> list[list[ScoredGroup]]:
    return ragged_groups(setting, dpo().needs())


@pytest.mark.parametrize("family", families("packing"))
def test_pairs_in_a_packed_row_equal_plain_transformers_one_by_one(family, bench, plain, record_property):
    """The loss, the log-probs and every parameter's gradient; the reference's log-probs are made up."""
    setting, algorithm = bench(family), dpo()
    groups = [group for step in groups_of(setting)[:2] for group in step]
    policy = load_policy(setting.folder, "cpu", "float32", freeze=(), temperature=1.0)
    images = ImageInputs(setting.folder, setting.media)
    collate = Collator(setting.folder, policy.model.base_model, images, "cpu", torch.float32)
    batch, rng = batch_of(groups, {}), np.random.default_rng(1)
    masks = loss_masks(batch, assign_credit(algorithm, batch))
    frozen = [rng.normal(-6, 0.3, len(mask)).astype(np.float32) for mask in batch.masks]
    columns = {"advantages": [np.zeros(len(mask)) for mask in masks], "reference_logprobs": frozen}
    rows = training_rows(
        rollouts_of(groups), masks, columns, batch.group_ids, algorithm.aggregation,
        range(len(masks)), scores=batch.rewards, whole_groups=True,
    )  # fmt: skip
    packed_T, entropy_T = policy(collate([row.sample for row in rows.values()]))
    share = partial_loss(algorithm, list(rows.values()), packed_T, entropy_T)
    share.loss.backward()

    reference, singles, losses = plain(setting.folder.path), dict[int, torch.Tensor](), []
    for group in range(len(groups)):
        members = np.flatnonzero(batch.group_ids == group)
        pair = members[batch.rewards[members].argmax()], members[batch.rewards[members].argmin()]
        own = [reference.logprobs(rows[i].sample, setting.media, 1.0) for i in pair]
        chosen, rejected = (each.sum() - float(frozen[i].sum()) for i, each in zip(pair, own, strict=True))
        losses.append(-logsigmoid(BETA * (chosen - rejected)))
        (losses[-1] / len(groups)).backward()
        singles |= dict(zip(pair, own, strict=True))
    expected_T = torch.cat([singles[i] for i in rows])

    found = {
        "loss": abs(share.loss.item() - torch.stack(losses).mean().item()),
        "log-probs": (packed_T - expected_T).abs().max().item(),
        "gradient": relative_error(gradients(reference.model), gradients(policy.model)),
    }
    record_property("pairs", [family, found])
    assert len(rows) == 2 * len(groups) < len(masks) and max(found.values()) < 1e-5


def trained_plainly(setting: Any, plain: Callable[..., Any]) -> Trained:
    policy, reference = plain(setting.folder.path), plain(setting.folder.path)

    def step(groups: list[ScoredGroup]) -> float:
        return sum(backward(group, policy, reference, setting, len(groups)) for group in groups)

    return Trained.by(policy.model, [partial(step, each) for each in groups_of(setting)], setting, EPS, MAX_NORM)


def backward(group: ScoredGroup, policy: Any, reference: Any, setting: Any, count: int) -> float:
    """Adds the gradient of a pair, one of so many; returns its part of the loss."""
    order, ratios = np.argsort(group.rewards), []
    for sample in (group.rollouts[order[-1]], group.rollouts[order[0]]):
        with torch.no_grad():
            frozen = reference.logprobs(sample, setting.media, 1.0).sum()
        ratios.append(policy.logprobs(sample, setting.media, 1.0).sum() - frozen)
    loss = -logsigmoid(BETA * (ratios[0] - ratios[1])) / count
    loss.backward()
    return loss.item()


@pytest.fixture(scope="module")
def plainly(bench: Callable[..., Any], plain: Any) -> Callable[[str], Trained]:
    return cache(lambda family: trained_plainly(bench(family), plain))


CASES = [
    ("qwen2_5_vl", 0, 1, 4096),
    *(
        pytest.param(*case, marks=FULL)
        for case in (("qwen2_5_vl", 3, 2, 10), ("qwen3_vl", 3, 1, 10), ("internvl", 0, 2, 10), ("qwen2", 3, 2, 4096))
    ),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("qwen3_vl", 0, 2, 4096), ("internvl", 3, 1, 4096), ("qwen2", 0, 1, 10))
    ),
]
"""Family, ZeRO stage, ranks, and tokens of a micro-batch, of which 10 are below one pair.

The full tier has each value, the slow one each two values.
"""


OTHERS = [name for name in FAMILIES if name not in ("qwen2_5_vl", "qwen3_vl", "internvl", "qwen2")]


@pytest.fixture
def updated(
    bench: Any, start: Any, start_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Sequence[Any]]:
    """The metrics of each update; the weights are in ``tmp_path / "model"``.

    In this process the head takes some seven tokens at a time, so that chunks end within completions.
    """
    monkeypatch.setitem(device.LOGITS_CHUNK_BYTES, "cpu", 10_000)

    def take(family: str, stage: int, ranks: int, budget: int, of_a_row: int = 1) -> Sequence[Any]:
        setting, learner = bench(family), {**LEARNER, "zero_stage": stage, "tokens_per_microbatch": budget}
        learner["sequence_parallel_size"] = of_a_row
        sections: dict[str, Any] = {"learner": learner, "trainer": {"steps": UPDATES}, "sampler": {"temperature": 1.0}}
        if ranks == 1:
            engine = start(bench=setting, algorithm=dpo(), **sections)
        else:
            sections |= {"algorithm": DPO_OPTIONS, "cluster": {"name": "ray", "ranks": ranks}}
            config = setting.config(**sections)
            engine = start_ranks(EngineSpec(config, setting.folder, setting.media, dpo(), 2, with_sampler=False))
        try:
            with engine.learning() as learner:
                found = [finished(learn(groups, dpo(), learner, LearnSettings())) for groups in groups_of(setting)]
                learner.save(tmp_path)
        finally:
            if ranks > 1:
                engine.close()
        return [each.metrics for each in found]

    return take


def check(found: Sequence[Any], expected: Trained, saved: Any) -> None:
    expected.check(found, saved, POLICYS)
    assert max(expected.norms) > MAX_NORM, "some updates are clipped"


@pytest.mark.parametrize(("family", "stage", "ranks", "budget"), CASES)
def test_whole_updates_end_in_the_weights_of_plain_transformers(
    family, stage, ranks, budget, updated, plain, plainly, tmp_path
):
    found = updated(family, stage, ranks, budget)
    check(found, plainly(family), plain(tmp_path / "model").model)
    assert min(plainly(family).norms) < MAX_NORM, "some updates are not clipped"
    assert {each["perf/microbatches"] for each in found} == {1 if budget > 10 else 3 - (ranks - 1)}


@pytest.mark.parametrize(
    "family", [pytest.param("qwen2_5_vl", marks=FULL), *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_whole_updates_of_ranks_that_hold_rows_together_end_in_these_weights_too(
    family, updated, plain, plainly, tmp_path
):
    """A row has the pairs of a group, on two ranks."""
    check(updated(family, 3, 2, 10, of_a_row=2), plainly(family), plain(tmp_path / "model").model)


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_whole_updates_of_every_family_end_in_the_weights_of_plain_transformers(
    family, updated, plain, plainly, tmp_path
):
    check(updated(family, 3, 2, 10), plainly(family), plain(tmp_path / "model").model)
