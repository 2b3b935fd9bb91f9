"""Images in observations: packed rows against plain transformers, one episode at a time, for every family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.engine.learner.collation import Collator
from mmrl.engine.learner.counting import UnitCost
from mmrl.engine.network.family import FAMILIES
from mmrl.engine.network.policy import Policy, load_policy
from mmrl.engine.network.vision import ImageInputs
from tests.conftest import TEMPERATURE, tower_passes
from tests.engine.test_policy import gradients, relative_error

FULL = pytest.mark.full
FIRST = "qwen2_5_vl"
PICTURED = [
    pytest.param(name, marks=() if name == FIRST else FULL) for name, family in FAMILIES.items() if family.vision
]
"""Families that read images; the short tier has one of them."""

MULTIMODAL = [
    name for name, family in FAMILIES.items() if family.images is not None and family.images.multimodal_positions
]


@pytest.fixture
def build(bench: Callable[..., Any]) -> Callable[..., tuple[Any, Policy, Callable[..., Collator]]]:
    """A family's bench, policy, and collators."""

    def load(family: str) -> tuple[Any, Policy, Callable[..., Collator]]:
        setting = bench(family)
        policy = load_policy(setting.folder, "cpu", "float32", freeze=(), temperature=TEMPERATURE)

        def collator(**options: Any) -> Collator:
            images = ImageInputs(setting.folder, setting.media)
            return Collator(setting.folder, policy.model.base_model, images, "cpu", torch.float32, **options)

        return setting, policy, collator

    return load


def patches(setting: Any, samples: Sequence[Any]) -> dict[str, int]:
    """Patches (or tiles) of each different image."""
    pixels = ImageInputs(setting.folder, setting.media)
    return {ref.hash: len(pixels(ref)[0]) for sample in samples for ref in sample.all_images}


@pytest.mark.proves("packing", "vision_once")
@pytest.mark.parametrize("family", PICTURED)
def test_packed_episodes_equal_plain_transformers_one_by_one(family, build, plain):
    setting, policy, collator = build(family)
    samples = setting.episodes()
    count = sum(len(sample.mask) for sample in samples)
    coefficients_T = torch.randn(count, generator=torch.Generator().manual_seed(0))
    reference = plain(setting.folder.path)
    expected_T = torch.cat([reference.logprobs(sample, setting.media) for sample in samples])
    (expected_T * coefficients_T).sum().backward()
    passes = tower_passes(policy.model, setting.folder.family)
    for share in (True, False):
        policy.zero_grad()
        found_T, entropy_T = policy(collator(share=share)(samples))
        (found_T * coefficients_T).sum().backward()
        np.testing.assert_allclose(found_T.detach(), expected_T.detach(), atol=1e-5, rtol=0)
        assert relative_error(gradients(reference.model), gradients(policy.model)) < 1e-5
        written_T = torch.from_numpy(np.concatenate([sample.mask for sample in samples]))
        assert not entropy_T[~written_T].any() and entropy_T[written_T].all() and not written_T.all()
    assert passes[0] == sum(patches(setting, samples).values()) < passes[1]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in MULTIMODAL])
def test_a_prompts_positions_do_not_depend_on_what_follows(family, build):
    """So samples of a prompt may share it, although each one's positions are computed over the whole of it."""
    setting, policy, collator = build(family)
    collate, pixels, checked = collator(), ImageInputs(setting.folder, setting.media), 0
    for sample in setting.episodes():
        row_3S = collate([sample]).model_inputs["position_ids"][1:, 0]
        ids = torch.from_numpy(np.concatenate([sample.prompt.token_ids, sample.token_ids]).astype(np.int64))[None]
        if not sample.all_images:
            assert torch.equal(row_3S, torch.arange(ids.shape[1] - 1).expand(3, -1))
            continue
        grids = torch.stack([pixels(ref)[1] for ref in sample.all_images])
        types = (ids == setting.folder.image_token_id).int()
        whole_3S = policy.model.base_model.get_rope_index(ids, types, grids)[0][:, 0]
        assert torch.equal(row_3S, whole_3S[:, :-1])
        count = len(sample.prompt.token_ids)
        if len(sample.all_images) > len(sample.prompt.images) > 0:
            alone_3P = collate._positions_of(sample.prompt.token_ids, sample.prompt.images)
            assert torch.equal(alone_3P, whole_3S[:, :count]) and alone_3P.shape[1] == count
            checked += 1
    assert checked == 4


def test_positions_of_episodes_are_remembered_within_a_bound(build, monkeypatch):
    from mmrl.engine.learner import collation

    setting, _, collator = build(FIRST)
    samples, collate = setting.episodes(), collator()
    expected = collate(samples).model_inputs["position_ids"]
    kept = dict(collate._positions_of.known)
    assert torch.equal(collate(samples).model_inputs["position_ids"], expected)
    assert all(collate._positions_of.known[key] is value for key, value in kept.items())
    most = max(value.nbytes + len(key[0]) for key, value in kept.items())
    monkeypatch.setattr(collation, "POSITION_BYTES", most)
    collate = collator()
    for sample in samples:
        collate([sample])
        held = sum(value.nbytes + len(key[0]) for key, value in collate._positions_of.known.items())
        assert held == collate._positions_of.bytes_held <= most
    assert torch.equal(collate(samples).model_inputs["position_ids"], expected)


def test_the_cost_of_a_unit_counts_the_policys_tokens_and_each_of_its_images_once(build):
    setting, _, collator = build(FIRST)
    samples = setting.episodes()
    inputs = collator()(samples)
    units = collator().units(samples)
    assert sorted(len(unit.indices) for unit in units) == [1, 3, 4]
    cost, towerless = UnitCost(setting.folder), UnitCost(setting.folder, tower=False)
    shape = cost._shape
    form = setting.folder.images
    for unit in units:
        own = [samples[index] for index in unit.indices]
        sizes = {ref.hash: (ref.width, ref.height) for sample in own for ref in sample.all_images}
        tower = shape.work(tokens=0, pairs=0, predicted=0, images=[form.grid(*size) for size in sizes.values()])
        assert cost(unit, samples) - towerless(unit, samples) == shape.forward_flops(tower)
    written = sum(int(sample.mask.sum()) for sample in samples)
    assert inputs.num_written == written == 7 + 8 + 8 + 10 + 6 + 5 + 9 + 9
    row = shape.work(tokens=inputs.model_inputs["input_ids"].shape[1], pairs=0, predicted=written)
    pairs = inputs.model_inputs["layout"].pairs
    whole = shape.forward_flops(row) + shape.forward_flops(shape.work(tokens=0, pairs=pairs, predicted=0))
    assert sum(towerless(unit, samples) for unit in units) == whole
