"""Log-probs by plain transformers in a wider type than the run's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmrl.engine import device
from mmrl.engine.network import plain_model
from mmrl.engine.network.widening import CHUNK_NUMBERS
from tests.proofs import families

LENGTHS = (4, 19, 7, 3, 11, 24)


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.full)])
def test_they_are_transformers_own_and_tell_the_learners_rounding(stage, start, vision, plain, monkeypatch):
    samples, alone = vision.samples(LENGTHS), plain(vision.folder.path, "float64")
    exact = np.concatenate([alone.logprobs(sample, vision.media).detach().numpy() for sample in samples])
    with start(learner={"zero_stage": stage}).learning() as learner:
        before = torch.get_rng_state()
        wide, single = (learner.network("policy").score(samples, way=way) for way in ("wide", "single"))
        assert torch.equal(torch.get_rng_state(), before)
        # Weights that the learner holds whole are not copied, and need no memory.
        monkeypatch.setattr(device, "spare_memory_bytes", lambda kind: 10_000)
        assert len(learner.network("policy").score(samples, way="wide")) == (0 if stage else len(samples))
        monkeypatch.undo()
        inputs = plain_model.plain_inputs
        monkeypatch.setattr(plain_model, "plain_inputs", lambda *args: no_image_tokens(inputs(*args)))
        own = learner.network("policy").score(samples, way="wide")
        monkeypatch.setattr(plain_model, "token_logprobs", lambda *args, **options: 1 / 0)  # as a kernel may raise
        assert learner.network("policy").score(samples, way="wide") == []
    np.testing.assert_allclose(np.concatenate(wide), exact, atol=1e-9)
    np.testing.assert_array_equal(np.concatenate(own), np.concatenate(wide))  # positions come from the processor
    assert 1e-8 < np.abs(np.concatenate(single) - exact).mean() < 2e-6


def no_image_tokens(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Inputs of which a model computes positions of one axis, as for a text."""
    return {**inputs, "mm_token_type_ids": torch.zeros_like(inputs["mm_token_type_ids"])}


@pytest.mark.parametrize("family", families())
def test_every_family_has_them(family, start, bench, plain, monkeypatch):
    """Some rows of each weight after others, as of a large model's."""
    monkeypatch.setitem(CHUNK_NUMBERS, "cpu", 2000)
    setting = bench(family)
    samples, alone = setting.samples(LENGTHS), plain(setting.folder.path, "float64")
    alone.model.set_experts_implementation("eager")  # the others have no kernel for float64
    exact = np.concatenate([alone.logprobs(sample, setting.media).detach().numpy() for sample in samples])
    with start(bench=setting).learning() as learner:
        wide, single = (learner.network("policy").score(samples, way=way) for way in ("wide", "single"))
    np.testing.assert_allclose(np.concatenate(wide), exact, atol=1e-9)
    apart = np.abs(np.concatenate(wide) - np.concatenate(single))
    assert 1e-8 < apart.mean() < 2e-6 and apart.max() < 1e-5


def test_inserted_images_are_read_and_inserted_tokens_have_none(start, vision):
    samples = vision.episodes()
    with start().learning() as learner:
        wide, single = (learner.network("policy").score(samples, way=way) for way in ("wide", "single"))
    for sample, one, other in zip(samples, wide, single, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
        assert (one[~sample.mask] == 0).all() and (one[sample.mask] < 0).all()
