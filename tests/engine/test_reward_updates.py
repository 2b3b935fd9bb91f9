"""Reward models in the learner are plain transformers', which read one whole conversation at a time.

The conversations are rendered by the tokenizer's own chat template, and tokenised anew. All of a group's candidates are
in the loss.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from mmrl.engine.learner.collation import Collator
from mmrl.engine.network.family import FAMILIES
from mmrl.engine.network.policy import load_policy
from mmrl.engine.network.reward_model import RewardLoading
from mmrl.engine.network.vision import ImageInputs
from mmrl.engine.spec import EngineSpec
from mmrl.ops.assignment import assign_credit, loss_masks
from mmrl.ops.objective import score_loss, training_rows, weighed_loss
from mmrl.rollout.batch import batch_of, rollouts_of
from mmrl.score_head import sequence_classification_class
from mmrl.step.learn import LearnSettings, finished, learn
from mmrl.types import Rollout, ScoredGroup
from mmrl_algorithms.bradley_terry import BradleyTerry
from tests.engine.plain_updates import CASES, OTHERS, POLICYS, UPDATES, Trained, learner_section, ragged_groups
from tests.engine.test_policy import gradients, relative_error
from tests.proofs import families

CENTRE = 0.05
OPTIONS = {"name": "import:mmrl_algorithms.bradley_terry:BradleyTerry", "centre": CENTRE}
EPS, MAX_NORM = 1e-5, 15.0
LEARNER = learner_section(EPS, MAX_NORM)


def bradley_terry() -> BradleyTerry:
    return BradleyTerry(BradleyTerry.Config(centre=CENTRE))


def groups_of(setting: Any) -> list[list[ScoredGroup]]:
    return ragged_groups(setting, bradley_terry().needs())


class PlainScore:
    """A model's body with a score in nothing but transformers: one whole conversation at a time.

    Args:
        plain: The folder's model that generates text.
        score: (1, H); None to read the folder itself as a reward model.
    """

    def __init__(self, plain: Any, score: torch.Tensor) -> None:
        self.processor, self.vision = plain.processor, hasattr(plain.model.config, "vision_config")
        plain.model.config.num_labels = 1
        self.model = sequence_classification_class(plain.model.config)(plain.model.config).eval()
        self.model.model.load_state_dict(plain.model.model.state_dict())
        self.model.score.weight.data.copy_(score)

    def inputs(self, rollout: Rollout, media: Any) -> dict[str, torch.Tensor]:
        messages = [*((each.role, each.content) for each in rollout.messages), ("assistant", rollout.text)]
        shown = [{"role": role, "content": self._content(text, bool(rollout.images))} for role, text in messages]
        text = self.processor.apply_chat_template(shown, tokenize=False)
        pictures = {"images": [media.load(ref) for ref in rollout.images]} if rollout.images else {}
        return dict(self.processor(text=[text], **pictures, add_special_tokens=False, return_tensors="pt"))

    def __call__(self, rollout: Rollout, media: Any) -> torch.Tensor:
        inputs = self.inputs(rollout, media)
        inputs.pop("token_type_ids", None)
        return self.model(**inputs).logits[0, 0]

    def _content(self, text: str, has_images: bool) -> Any:
        if not self.vision:
            return text
        parts = re.split("(<image>)", text) if has_images else [text]
        return [{"type": "image"} if part == "<image>" else {"type": "text", "text": part} for part in parts if part]


def backward(group: ScoredGroup, model: PlainScore, setting: Any, count: int) -> float:
    """Adds the gradient of one prompt's pairs, one of so many prompts; returns its part of the loss."""
    scores = [model(rollout, setting.media) for rollout in group.rollouts]
    pairs = [(a, b) for i, a in enumerate(scores) for j, b in enumerate(scores) if group.rewards[i] > group.rewards[j]]
    losses = [-logsigmoid(better - worse) + CENTRE * (better + worse) ** 2 for better, worse in pairs]
    loss = torch.stack(losses).mean() / count
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_has_the_ids_of_its_templates_whole_text(family, bench, plain):
    setting = bench(family)
    model = PlainScore.__new__(PlainScore)
    model.processor = setting.folder.processor or setting.folder.tokenizer
    model.vision = setting.folder.family.vision
    for group in (group for step in groups_of(setting)[:2] for group in step):
        prompts = {id(rollout.prompt) for rollout in group.rollouts}
        assert len(prompts) == 1, "the candidates share their prompt"
        for rollout in group.rollouts:
            ids = [*rollout.prompt.token_ids.tolist(), *rollout.token_ids.tolist()]
            assert ids == model.inputs(rollout, setting.media)["input_ids"][0].tolist()
            assert rollout.segments[0].by_policy and not any(each.by_policy for each in rollout.segments[1:])


@pytest.mark.parametrize("family", families("packing", sweep=pytest.mark.slow))
def test_scores_in_a_packed_row_equal_plain_transformers_one_by_one(family, bench, plain):
    """The loss, the scores and every parameter's gradient."""
    setting, algorithm = bench(family), bradley_terry()
    groups = [group for step in groups_of(setting)[:2] for group in step]
    policy = load_policy(setting.folder, "cpu", "float32", freeze=(), temperature=1.0, loading=RewardLoading(seed=3))
    images = ImageInputs(setting.folder, setting.media)
    collate = Collator(setting.folder, policy.model.base_model, images, "cpu", torch.float32, keeps_last=True)
    batch = batch_of(groups, {})
    masks = loss_masks(batch, assign_credit(algorithm, batch))
    rows = training_rows(
        rollouts_of(groups), masks, {"advantages": [np.zeros(len(mask)) for mask in masks]}, batch.group_ids,
        algorithm.aggregation, range(len(masks)), scores=batch.rewards, whole_groups=True,
    )  # fmt: skip
    scores_N = policy(collate([row.sample for row in rows.values()]))
    share = weighed_loss(list(rows.values()), *score_loss(algorithm, list(rows.values()), scores_N))
    share.loss.backward()

    reference = PlainScore(plain(setting.folder.path), policy.score.detach())
    loss = sum(backward(group, reference, setting, len(groups)) for group in groups)
    with torch.no_grad():
        expected_N = torch.stack([reference(sample, setting.media) for sample in rollouts_of(groups)])

    assert scores_N.dtype == torch.float32 and len(rows) == len(masks) == len(scores_N)
    assert 0.1 < expected_N.square().mean().sqrt() < 3, "scores begin at a size of one"
    assert abs(share.loss.item() - loss) < 1e-5
    assert (scores_N - expected_N).abs().max() < 1e-5
    assert relative_error(gradients(reference.model), gradients(policy.model)) < 1e-5
    assert "score.weight" in gradients(policy.model) and not [n for n in gradients(policy.model) if "lm_head" in n]


@dataclass(frozen=True)
class TrainedModel(Trained):
    """A reward model after its updates.

    Attributes:
        scores: Of the first update's conversations, before and after all updates.
    """

    scores: tuple[torch.Tensor, torch.Tensor]


def trained_plainly(setting: Any, plain: Callable[..., Any], start: torch.Tensor) -> TrainedModel:
    model = PlainScore(plain(setting.folder.path), start)
    steps = groups_of(setting)

    @torch.no_grad()
    def scores() -> torch.Tensor:
        return torch.stack([model(rollout, setting.media) for rollout in rollouts_of(steps[0])])

    def step(groups: list[ScoredGroup]) -> float:
        return sum(backward(group, model, setting, len(groups)) for group in groups)

    first = scores()
    found = Trained.by(model.model, [partial(step, groups) for groups in steps], setting, EPS, MAX_NORM)
    return TrainedModel(found.weights, found.moved, found.losses, found.norms, (first, scores()))


@pytest.fixture(scope="module")
def plainly(bench: Callable[..., Any], plain: Any) -> Callable[[str], TrainedModel]:
    def trained(family: str) -> TrainedModel:
        setting = bench(family)
        start = load_policy(setting.folder, "cpu", "float32", freeze=(), temperature=1.0, loading=RewardLoading(0))
        return trained_plainly(setting, plain, start.score.detach())

    return cache(trained)


@pytest.fixture
def updated(bench: Any, start: Any, start_ranks: Any, tmp_path: Path) -> Callable[..., Any]:
    """The metrics of each update, and the scores before and after; the model is in ``tmp_path / "reward/model"``."""

    def take(family: str, stage: int, ranks: int, budget: int, of_a_row: int = 1) -> Any:
        setting, learner = bench(family), {**LEARNER, "zero_stage": stage, "tokens_per_microbatch": budget}
        learner["sequence_parallel_size"] = of_a_row
        sections: dict[str, Any] = {"learner": learner, "trainer": {"steps": UPDATES}}
        if ranks == 1:
            engine = start(bench=setting, algorithm=bradley_terry(), **sections)
        else:
            config = setting.config(**sections, algorithm=OPTIONS, cluster={"name": "ray", "ranks": ranks})
            spec = EngineSpec(config, setting.folder, setting.media, bradley_terry(), 2, with_sampler=False)
            engine = start_ranks(spec)
        steps, made = groups_of(setting), bradley_terry()
        try:
            with engine.learning() as learner:
                network, samples = learner.network("reward"), rollouts_of(steps[0])
                scores = [network.final_values(samples)]
                found = [finished(learn(groups, made, learner, LearnSettings())) for groups in steps]
                scores.append(network.final_values(samples))
                files = learner.save(tmp_path)
        finally:
            if ranks > 1:
                engine.close()
        assert [(role, each.model) for role, each in files.items()] == [("reward", "reward/model")]
        return [each.metrics for each in found], scores

    return take


def check(found: Any, expected: TrainedModel, saved: Any) -> None:
    metrics, scores = found
    expected.check(metrics, saved, POLICYS)
    for own, plain in zip(scores, expected.scores, strict=True):
        np.testing.assert_allclose(own, plain, atol=1e-4)
    assert abs(expected.scores[0] - expected.scores[1]).max() > 0.1


def read(folder: Path) -> Any:
    """A reward model's folder as anybody reads it who has the class."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    kind = sequence_classification_class(config)
    model, told = kind.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and config.architectures == [kind.__name__]
    assert config.num_labels == 1 and config.mmrl_score == {"reads": "last"}
    return model


@pytest.mark.parametrize(("family", "stage", "ranks", "budget"), CASES)
def test_whole_updates_end_in_the_weights_of_plain_transformers(
    family, stage, ranks, budget, updated, plainly, tmp_path
):
    found = updated(family, stage, ranks, budget)
    check(found, plainly(family), read(tmp_path / "reward/model"))
    assert max(plainly(family).norms) > MAX_NORM > min(plainly(family).norms), "some updates are clipped"
    assert {each["perf/microbatches"] for each in found[0]} == {1 if budget > 10 else 3 - (ranks - 1)}


@pytest.mark.full
def test_whole_updates_of_ranks_that_hold_rows_together_end_in_these_weights_too(updated, plainly, tmp_path):
    """The last token of a conversation lies on one of two ranks."""
    check(updated("qwen2_5_vl", 0, 2, 10, of_a_row=2), plainly("qwen2_5_vl"), read(tmp_path / "reward/model"))


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_whole_updates_of_every_family_end_in_the_weights_of_plain_transformers(family, updated, plainly, tmp_path):
    check(updated(family, 3, 2, 10), plainly(family), read(tmp_path / "reward/model"))
