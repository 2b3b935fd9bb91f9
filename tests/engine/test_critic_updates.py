"""Critics in the learner are plain transformers with a linear head, which read one sample at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.engine.learner.collation import Collator
from mmrl.engine.network.policy import load_policy
from mmrl.engine.network.reward_model import CriticLoading
from mmrl.engine.network.vision import ImageInputs
from mmrl.engine.spec import EngineSpec
from mmrl.ops.objective import value_loss, weighed_loss
from tests.engine.critics import OPTIONS, PlainCritic, critic_rows, samples_of, valued
from tests.engine.plain_updates import CASES, OTHERS, UPDATES, Trained, learner_section
from tests.engine.test_policy import gradients, relative_error
from tests.engine.test_reward_updates import read
from tests.proofs import families

EPS, MAX_NORM = 1e-5, 60.0
NAMES = ("critic/loss", "critic/grad_norm", "critic/lr")


@pytest.mark.parametrize("family", families("packing", sweep=pytest.mark.slow))
def test_values_in_a_packed_row_equal_plain_transformers_one_by_one(family, bench, plain):
    """Values, those after the last token, the loss, and every parameter's gradient."""
    setting = bench(family)
    samples = samples_of(setting)
    critic = load_policy(setting.folder, "cpu", "float32", freeze=(), temperature=1.0, loading=CriticLoading(seed=3))
    images = ImageInputs(setting.folder, setting.media)
    collate = Collator(setting.folder, critic.model.base_model, images, "cpu", torch.float32)
    rows = critic_rows(samples)
    values_T = critic(collate(samples))
    share = weighed_loss(rows, *value_loss(valued(), rows, values_T))
    share.loss.backward()
    with torch.no_grad():
        final_N = critic(collate.keeping_last()(samples))

    reference = PlainCritic(plain(setting.folder.path), critic.score.detach())
    loss = sum(_backward(reference, row, rows, setting) for row in rows)
    with torch.no_grad():
        expected = [reference(sample, setting.media) for sample in samples]
    expected_T, expected_N = torch.cat([each[:-1] for each in expected]), torch.stack([each[-1] for each in expected])

    assert values_T.dtype == final_N.dtype == torch.float32
    assert 0.1 < expected_T.square().mean().sqrt() < 3, "values begin at a size of one"
    assert (values_T - expected_T).abs().max() < 1e-5 and (final_N - expected_N).abs().max() < 1e-5
    assert abs(share.loss.item() - loss) < 1e-5
    assert relative_error(gradients(reference.model), gradients(critic.model)) < 1e-5
    assert "score.weight" in gradients(critic.model) and not [n for n in gradients(critic.model) if "lm_head" in n]


def _backward(critic: PlainCritic, row: Any, rows: Sequence[Any], setting: Any) -> float:
    """Adds the gradient of a row's part of the loss, which it returns."""
    loss = critic.loss_of(row, setting.media) / sum(int(each.mask.sum()) for each in rows)
    loss.backward()
    return float(loss.detach())


def trained_plainly(setting: Any, plain: Callable[..., Any], start: torch.Tensor) -> Trained:
    critic, samples = PlainCritic(plain(setting.folder.path), start), samples_of(setting)

    def step(seed: int) -> float:
        rows = critic_rows(samples, seed)
        return sum(_backward(critic, row, rows, setting) for row in rows)

    return Trained.by(critic.model, [partial(step, seed) for seed in range(UPDATES)], setting, EPS, MAX_NORM)


@pytest.fixture(scope="module")
def plainly(bench: Callable[..., Any], plain: Any) -> Callable[[str], Trained]:
    def trained(family: str) -> Trained:
        setting = bench(family)
        start = load_policy(setting.folder, "cpu", "float32", freeze=(), temperature=1.0, loading=CriticLoading(0))
        return trained_plainly(setting, plain, start.score.detach())

    return cache(trained)


@pytest.fixture
def updated(bench: Any, start: Any, start_ranks: Any, tmp_path: Path) -> Callable[..., Any]:
    """The metrics of each update; the critic is in ``tmp_path / "critic/model"``."""

    def take(family: str, stage: int, ranks: int, budget: int) -> Any:
        setting = bench(family)
        own = learner_section(EPS, MAX_NORM)
        learner = {**own, "lr": 1e-4, "weight_decay": 0.0, "zero_stage": stage, "tokens_per_microbatch": budget}
        critic = {"lr": own["lr"], "weight_decay": own["weight_decay"], "head": "normal"}
        sections: dict[str, Any] = {"learner": learner, "critic": critic, "trainer": {"steps": UPDATES}}
        if ranks == 1:
            engine = start(bench=setting, algorithm=valued(), **sections)
        else:
            config = setting.config(**sections, algorithm=OPTIONS, cluster={"name": "ray", "ranks": ranks})
            engine = start_ranks(EngineSpec(config, setting.folder, setting.media, valued(), 2, with_sampler=False))
        samples = samples_of(setting)
        try:
            with engine.learning() as learner:
                network = learner.network("critic")
                found = [network.update(critic_rows(samples, seed)) for seed in range(UPDATES)]
                files = learner.save(tmp_path)
        finally:
            if ranks > 1:
                engine.close()
        assert {role: each.model for role, each in files.items()} == {"policy": "model", "critic": "critic/model"}
        return found

    return take


@pytest.mark.parametrize(("family", "stage", "ranks", "budget"), CASES)
def test_whole_updates_end_in_the_weights_of_plain_transformers(
    family, stage, ranks, budget, updated, plain, plainly, bench, tmp_path
):
    found = updated(family, stage, ranks, budget)
    expected = plainly(family)
    expected.check([each.metrics for each in found], read(tmp_path / "critic/model"), NAMES)
    assert max(expected.norms) > MAX_NORM > min(expected.norms), "some updates are clipped"
    assert set(found[0].metrics) == {*NAMES, "critic/clip_fraction"}
    policy, initial = plain(tmp_path / "model").model, plain(bench(family).folder.path).model
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), initial.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_whole_updates_of_every_family_end_in_the_weights_of_plain_transformers(family, updated, plainly, tmp_path):
    found = updated(family, 3, 2, 10)
    plainly(family).check([each.metrics for each in found], read(tmp_path / "critic/model"), NAMES)
