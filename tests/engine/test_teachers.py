"""Teachers: frozen networks that are other models than the policy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.cluster.local import start_engine
from mmrl.config.reference import Teacher
from mmrl.config.sections import Config
from mmrl.engine.network.teacher import open_teacher
from mmrl.engine.spec import EngineSpec
from mmrl.errors import ConfigError
from mmrl.interfaces import Algorithm
from mmrl.plugin_host import registry
from tests.cluster.process_ranks import on_each
from tests.conftest import Bench, tower_passes
from tests.engine.teachers import ROWS, write_teacher

LENGTHS = (4, 19, 7, 3, 11, 24, 6)
PIXELS = (3136, 50176)
FULL = pytest.mark.full
KL = {"name": "grpo", "kl": {"coef": 0.1}}
LORA = {"rank": 4, "targets": ["language"]}
FROZEN = {"freeze": ["vision", "projector"]}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, models: Callable[..., Path]) -> Path:
    """A deeper teacher of the policy's family with another vision tower, and more rows in its embedding."""
    return write_teacher(tmp_path_factory.mktemp("other") / "teacher", models("qwen2_5_vl"), num_hidden_layers=3)


def spec_of(setting: Bench, *paths: Path, **sections: Any) -> EngineSpec:
    """The parts of an engine that learns with these teachers."""
    config: Config = setting.config(**{"algorithm": KL, **sections})
    folders = (open_teacher(Teacher("reference", str(path), None), setting.folder, PIXELS) for path in paths)
    algorithm: Algorithm = registry.create("algorithm", config.algorithm)
    parts = (config, setting.folder, setting.media, algorithm, 2, False)
    return EngineSpec(*parts, teachers=tuple(folders))


def expected(plain: Any, folder: Path, setting: Bench) -> np.ndarray:
    """The log-probs of the samples by plain transformers, at the sampler's temperature."""
    model = plain(folder)
    return np.concatenate(
        [model.logprobs(sample, setting.media).detach().numpy() for sample in setting.samples(LENGTHS)]
    )


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=FULL)])
@pytest.mark.parametrize(
    "model", [pytest.param({}, marks=FULL), FROZEN, {"lora": LORA}], ids=["full", "frozen", "lora"]
)
def test_a_teacher_with_another_tower_of_equal_width_gives_its_own_logprobs(model, stage, other, vision, plain):
    sections = {"model": {"path": vision.folder.path, "dtype": "float32", **model}, "learner": {"zero_stage": stage}}
    engine = start_engine(spec_of(vision, other, **sections))
    samples = vision.samples(LENGTHS)
    with engine.learning() as learner:
        own = np.concatenate(learner.network("policy").score(samples))
        found = np.concatenate(learner.network("reference").score(samples))
        again = np.concatenate(learner.network("reference").score(samples))
        np.testing.assert_array_equal(np.concatenate(learner.network("policy").score(samples)), own)
    np.testing.assert_allclose(found, expected(plain, other, vision), atol=1e-5)
    np.testing.assert_allclose(own, expected(plain, Path(vision.folder.path), vision), atol=1e-5)
    np.testing.assert_array_equal(found, again)
    assert np.abs(found - own).mean() > 0.1


@pytest.mark.parametrize(("tower", "passes"), [(True, [1, 0]), (False, [1, 1])], ids=["equal", "another"])
def test_features_are_shared_where_the_towers_weights_are_equal(tower, passes, vision, tmp_path, plain):
    teacher = write_teacher(tmp_path / "teacher", Path(vision.folder.path), tower=tower)
    sections = {"model": {"path": vision.folder.path, "dtype": "float32", **FROZEN}, "learner": {"zero_stage": 0}}
    engine = start_engine(spec_of(vision, teacher, **sections))
    samples = vision.samples(LENGTHS)
    with engine.learning() as learner:
        networks = [learner.network(role) for role in ("policy", "reference")]
        seen = [tower_passes(network.policy.model, vision.folder.family) for network in networks]
        networks[0].score(samples)
        found = np.concatenate(networks[1].score(samples))
        assert [len(each) for each in seen] == passes
        networks[0].score(samples)
        assert len(seen[0]) == 1  # the teacher's images do not take the policy's away
    np.testing.assert_allclose(found, expected(plain, teacher, vision), atol=1e-5)


@FULL
@pytest.mark.parametrize(
    ("model", "stage"),
    [
        pytest.param(model, stage, id=f"{name}-{stage}", marks=[pytest.mark.slow] * ((name == "lora") == (stage == 1)))
        for name, model in (("full", FROZEN), ("lora", {"lora": LORA}))
        for stage in (1, 3)
    ],
)
def test_two_ranks_score_as_plain_transformers_with_a_teacher(model, stage, other, vision, plain, start_ranks):
    sections = {"model": {"path": vision.folder.path, "dtype": "float32", **model}, "learner": {"zero_stage": stage}}
    sections["cluster"] = {"name": "ray", "ranks": 2}
    group = start_ranks(spec_of(vision, other, **sections))
    try:
        samples = vision.samples(LENGTHS)
        with group.learning() as learner:
            found = np.concatenate(learner.network("reference").score(samples))
            alone = np.concatenate(learner.network("reference").score(samples[:1]))  # the other rank has none
            held = on_each(group, _teacher_bytes)
    finally:
        group.close()
    wanted = expected(plain, other, vision)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    np.testing.assert_allclose(alone, wanted[: LENGTHS[0]], atol=1e-5)
    whole = sum(4 * parameter.numel() for parameter in plain(other).model.parameters())
    assert held == pytest.approx([whole / 2 if stage == 3 else whole] * 2, rel=1e-3)


def _teacher_bytes(worker: Any) -> int:
    own = [getattr(p, "ds_tensor", p) for p in worker._owner.network("reference").policy.parameters()]
    return sum(tensor.nbytes for tensor in own)


def test_a_teacher_in_the_hosts_memory_is_on_the_device_while_it_computes(other, vision, plain, monkeypatch):
    from mmrl.engine import device
    from mmrl.engine.network import placement

    host = placement.HostWeights
    monkeypatch.setattr(device, "reference_place", lambda kind, zero_stage: "host")
    monkeypatch.setattr(placement, "HostWeights", lambda policy, where, pinned: host(policy, "cpu:0", pinned=False))
    sections = {"model": {"path": vision.folder.path, "dtype": "float32", **FROZEN}, "learner": {"zero_stage": 0}}
    with start_engine(spec_of(vision, other, **sections)).learning() as learner:
        teacher = learner.network("reference").policy
        weight = teacher.model.get_output_embeddings().weight
        home, places = weight.data_ptr(), set()
        teacher.register_forward_pre_hook(lambda *_: places.add(weight.data_ptr()))
        found = learner.network("reference").score(vision.samples(LENGTHS))
        assert home not in places and places and weight.data_ptr() == home
    np.testing.assert_allclose(np.concatenate(found), expected(plain, other, vision), atol=1e-5)


def test_a_text_teacher_scores_the_rows_of_a_policy_that_reads_images(tmp_path, vision, models, plain):
    teacher = write_teacher(tmp_path / "teacher", models("qwen2"), hidden_size=96, num_attention_heads=4)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(vision.folder.path, name), teacher / name)
    sections = {"model": {"path": vision.folder.path, "dtype": "float32", **FROZEN}, "learner": {"zero_stage": 0}}
    samples = [sample for sample in vision.samples(LENGTHS) if not sample.prompt.images]
    with start_engine(spec_of(vision, teacher, **sections)).learning() as learner:
        found = learner.network("reference").score(samples)
    model = plain(teacher)
    model.banned = sorted({*model.banned, *vision.folder.vocabulary.banned})
    wanted = [model.logprobs(sample, vision.media).detach().numpy() for sample in samples]
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(wanted), atol=1e-5)


def test_the_softmax_of_a_teacher_is_over_the_ids_that_the_policy_may_sample(other, vision):
    teacher = open_teacher(Teacher("reference", str(other), None), vision.folder, PIXELS)
    size = vision.folder.vocabulary.size
    assert teacher.vocabulary.size == size + ROWS
    assert {*teacher.vocabulary.banned} == {*vision.folder.vocabulary.banned, *range(size, size + ROWS)}


def refusal(setting: Bench, path: Path, **facts: Any) -> ConfigError:
    """The error with which a teacher is refused."""
    with pytest.raises(ConfigError) as caught:
        open_teacher(Teacher("reference", str(path), None), replace(setting.folder, **facts), PIXELS)
    assert str(path) in caught.value.where and caught.value.where.startswith("reference.path") and caught.value.remedy
    return caught.value


@pytest.fixture
def teacher(vision: Bench, tmp_path: Path) -> Path:
    """A copy of the policy's folder, which a test may damage."""
    return shutil.copytree(vision.folder.path, tmp_path / "teacher")


def test_a_teacher_with_another_tokenizer_is_refused_with_the_first_id_that_differs(vision, teacher):
    text = json.loads((teacher / "tokenizer.json").read_text())
    words = text["model"]["vocab"]
    one, other = sorted(words, key=words.get)[40:42]
    words[one], words[other] = words[other], words[one]
    (teacher / "tokenizer.json").write_text(json.dumps(text))
    error = refusal(vision, teacher)
    assert error.what == f"token id 40 is {one!r} to the policy, and {other!r} to the teacher"


def test_a_teacher_without_rows_for_the_policys_ids_is_refused(vision, teacher):
    config = json.loads((teacher / "config.json").read_text())
    config["text_config"]["vocab_size"] = 40
    (teacher / "config.json").write_text(json.dumps(config))
    assert "token id 40 is " in (error := refusal(vision, teacher)).what
    assert error.what.endswith("to the policy, and no token to the teacher")


def test_a_teacher_with_other_patches_is_refused_with_the_number_of_tokens(vision, teacher):
    config = json.loads((teacher / "config.json").read_text())
    config["vision_config"]["patch_size"] = 28
    (teacher / "config.json").write_text(json.dumps(config))
    assert refusal(vision, teacher).what == "an image of 56x56 pixels is 4 tokens to the policy, and 1 to the teacher"


def test_a_teacher_of_another_family_is_refused_unless_it_reads_text_alone(vision, models):
    error = refusal(vision, models("qwen3_vl"))
    assert "the teacher is of type qwen3_vl, and the policy of type qwen2_5_vl" in error.what
    assert "or a text model for rows without images" in error.possible


def test_a_quantised_teacher_is_refused(vision, teacher):
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    assert "the teacher's weights are stored quantised (awq)" in refusal(vision, teacher).what


def test_a_teacher_without_weights_is_refused(vision, teacher):
    (teacher / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"the folder is there, and has a config.json and no \*.safetensors"
    ) as caught:
        open_teacher(Teacher("reference", str(teacher), None), vision.folder, PIXELS)
    assert caught.value.where == "reference.path"
    open_teacher(Teacher("reference", str(teacher), None), vision.folder, PIXELS, with_weights=False)


def by_source(setting: Bench) -> list[Any]:
    """The samples, those of text alone from one source, those with images from another."""

    def sourced(sample: Any) -> Any:
        source = "pictures" if sample.prompt.images else "texts"
        return replace(sample, prompt=replace(sample.prompt, prompt=replace(sample.prompt.prompt, source=source)))

    return [sourced(sample) for sample in setting.samples(LENGTHS)]


SPLIT = [{"sources": ["texts"]}, {"sources": ["pictures"]}]
MIXED = [{"weight": 3.0}, {"sources": ["pictures"], "weight": 1.0}]


@pytest.mark.parametrize(("entries", "shares"), [(SPLIT, (0.0, 1.0)), (MIXED, (0.75, 0.25))], ids=["split", "mixed"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=FULL)])
def test_each_row_is_scored_by_the_teachers_of_its_source(
    entries, shares, ranks, other, vision, plain, tmp_path, start_ranks
):
    second = write_teacher(tmp_path / "second", Path(vision.folder.path), seed=2, tower=True)
    teachers = [{"path": str(path), **entry} for path, entry in zip((other, second), entries, strict=True)]
    sections = {"model": {"path": vision.folder.path, "dtype": "float32", **FROZEN}, "learner": {"zero_stage": 3}}
    config = vision.config(
        **sections, algorithm=KL, reference={"teachers": teachers}, cluster={"name": "ray", "ranks": ranks}
    )
    assert [each.path for each in config.reference.models] == [str(other), str(second)]
    folders = tuple(open_teacher(each, vision.folder, PIXELS) for each in config.reference.models)
    parts = (config, vision.folder, vision.media, registry.create("algorithm", config.algorithm), 2, False)
    samples = by_source(vision)
    group = start_ranks(EngineSpec(*parts, teachers=folders))
    try:
        with group.learning() as learner:
            found = learner.network("reference").score(samples)
            texts = learner.network("reference").score(samples[:1])  # the second has no rows
    finally:
        group.close()
    models = [plain(path) for path in (other, second)]
    for sample, values in zip(samples, found, strict=True):
        single = [model.logprobs(sample, vision.media).detach().numpy() for model in models]
        first, later = shares if sample.prompt.images else (1.0, 0.0)
        np.testing.assert_allclose(values, first * single[0] + later * single[1], atol=1e-5)
    np.testing.assert_allclose(texts[0], found[0], atol=1e-5)
