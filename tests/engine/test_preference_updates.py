"""Whole updates of preferences end in the weights of plain transformers, which see one pair at a time.

The optimizer, its schedule and its clipping are written out here. Groups are ragged: of two to five candidates, of
which the best and the worst are in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
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
from mmrl.step.given import Comparisons
from mmrl.step.learn import LearnSettings, finished, learn
from mmrl.types import Candidate, ScoredGroup
from mmrl_algorithms.dpo import DPO
from tests.engine.test_policy import DECAY, gradients, relative_error
from tests.proofs import families

BETA, UPDATES = 0.5, 4
DPO_OPTIONS = {"name": "import:mmrl_algorithms.dpo:DPO", "beta": BETA}
LR, WEIGHT_DECAY, EPS, MAX_NORM = 1e-3, 0.1, 1e-6, 20.0
"""AdamW's, whose own epsilon is 1e-8: a weight whose gradient is rounding alone would go by the sign of that."""
RATES = (LR / 2, LR, LR, LR / 2)
"""Two steps of warm-up, and a linear fall over the other two."""
LEARNER = {
    "lr": LR, "weight_decay": WEIGHT_DECAY, "warmup_steps": 2, "schedule": "linear", "max_grad_norm": MAX_NORM,
    "deepspeed": {"optimizer": {"params": {"eps": EPS}}},
}  # fmt: skip
WORDS = ("red", "left", "box", "seven", "the", "under", "not", "blue")
FULL = pytest.mark.full


def dpo() -> DPO:
    return DPO(DPO.Config(beta=BETA))


def groups_of(setting: Any) -> list[list[ScoredGroup]]:
    """The groups of each update: three prompts, in turn, with candidates of one to twelve words."""
    rng, made = np.random.default_rng(5), []
    for number in range(3 * UPDATES):
        prompt, count = setting.prompts[number % len(setting.prompts)], (2, 5, 3, 4)[number % 4]
        texts = [" ".join([str(i), *rng.choice(WORDS, rng.integers(0, 12))]) for i in range(count)]
        candidates = tuple(map(Candidate, texts, rng.permutation(count).astype(float)))
        row = replace(prompt.prompt, id=f"r{number}", candidates=candidates)
        made.append(Comparisons.group(replace(prompt, prompt=row), dpo().needs(), setting.encoder))
    return [made[i : i + 3] for i in range(0, len(made), 3)]


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
    partial = partial_loss(algorithm, list(rows.values()), packed_T, entropy_T)
    partial.loss.backward()

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
        "loss": abs(partial.loss.item() - torch.stack(losses).mean().item()),
        "log-probs": (packed_T - expected_T).abs().max().item(),
        "gradient": relative_error(gradients(reference.model), gradients(policy.model)),
    }
    record_property("pairs", [family, found])
    assert len(rows) == 2 * len(groups) < len(masks) and max(found.values()) < 1e-5


@dataclass(frozen=True)
class Trained:
    """A policy after its updates.

    Attributes:
        weights: Those that the family uses, by name.
        moved: The largest change of one.
        losses: Before each update, likewise ``norms``: the gradient's, before it is clipped.
    """

    weights: dict[str, torch.Tensor]
    moved: float
    losses: Sequence[float]
    norms: Sequence[float]


def trained_plainly(setting: Any, plain: Callable[..., Any]) -> Trained:
    policy, reference = plain(setting.folder.path), plain(setting.folder.path)
    weights = {name: p for name, p in policy.model.named_parameters() if setting.folder.family.uses(name)}
    before, means, squares = {name: p.detach().clone() for name, p in weights.items()}, {}, {}
    losses, norms = [], []
    for step, (groups, rate) in enumerate(zip(groups_of(setting), RATES, strict=True), 1):
        policy.model.zero_grad()
        losses.append(sum(backward(group, policy, reference, setting, len(groups)) for group in groups))
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in weights.items()}
        norms.append(math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values())))
        for name, g in gradients.items():
            g = g * min(1.0, MAX_NORM / norms[-1])
            means[name] = 0.9 * means.get(name, 0.0) + 0.1 * g
            squares[name] = 0.999 * squares.get(name, 0.0) + 0.001 * g * g
            root = (squares[name] / (1 - 0.999**step)).sqrt() + EPS
            with torch.no_grad():
                weights[name] -= rate * (WEIGHT_DECAY * weights[name] + means[name] / (1 - 0.9**step) / root)
    moved = max(float((p - before[name]).abs().max()) for name, p in weights.items())
    return Trained({name: p.detach() for name, p in weights.items()}, moved, losses, norms)


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
        for case in (
            ("qwen2_5_vl", 3, 2, 10),
            ("qwen3_vl", 3, 1, 10),
            ("qwen3_vl", 0, 2, 4096),
            ("internvl", 0, 2, 10),
            ("internvl", 3, 1, 4096),
            ("qwen2", 3, 2, 4096),
            ("qwen2", 0, 1, 10),
        )
    ),
]
"""Family, ZeRO stage, ranks, and tokens of a micro-batch, of which 10 are below one pair: each two values once."""


@pytest.fixture
def updated(
    bench: Any, start: Any, start_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Sequence[Any]]:
    """The metrics of each update; the weights are in ``tmp_path / "model"``.

    In this process the head takes some seven tokens at a time, so that chunks end within completions.
    """
    monkeypatch.setitem(device.LOGITS_CHUNK_BYTES, "cpu", 10_000)

    def take(family: str, stage: int, ranks: int, budget: int) -> Sequence[Any]:
        setting, learner = bench(family), {**LEARNER, "zero_stage": stage, "tokens_per_microbatch": budget}
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
    assert [each["loss/total"] for each in found] == pytest.approx(expected.losses, rel=1e-4)
    assert [each["policy/grad_norm"] for each in found] == pytest.approx(expected.norms, rel=1e-4)
    assert [each["lr"] for each in found] == pytest.approx(RATES)
    assert max(expected.norms) > MAX_NORM, "some updates are clipped"
    weights = dict(saved.named_parameters())
    errors = {name: float((p - weights[name]).abs().max()) for name, p in expected.weights.items()}
    error = max(each / (10 if name.endswith(DECAY) else 1) for name, each in errors.items())
    assert error < 1e-5 < 1e-2 * expected.moved


@pytest.mark.parametrize(("family", "stage", "ranks", "budget"), CASES)
def test_whole_updates_end_in_the_weights_of_plain_transformers(
    family, stage, ranks, budget, updated, plain, plainly, tmp_path
):
    found = updated(family, stage, ranks, budget)
    check(found, plainly(family), plain(tmp_path / "model").model)
    assert min(plainly(family).norms) < MAX_NORM, "some updates are not clipped"
    assert {each["perf/microbatches"] for each in found} == {1 if budget > 10 else 3 - (ranks - 1)}


OTHERS = [name for name in FAMILIES if name not in ("qwen2_5_vl", "qwen3_vl", "internvl", "qwen2")]


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_whole_updates_of_every_family_end_in_the_weights_of_plain_transformers(
    family, updated, plain, plainly, tmp_path
):
    check(updated(family, 3, 2, 10), plainly(family), plain(tmp_path / "model").model)
