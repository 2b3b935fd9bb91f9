"""Groups that nobody sampled: a row's candidates, which rows are of use, and what a pair learns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmrl.errors import DataError, UselessRow
from mmrl.interfaces import Needs
from mmrl.ops import packing
from mmrl.rollout.batch import batch_of
from mmrl.step.audit.probe_prompts import fitting
from mmrl.step.forward import judged
from mmrl.step.given import Comparisons, Given
from mmrl.step.learn import LearnSettings, finished, learn
from mmrl.types import GIVEN, Candidate, Message, Prompt, RawImage

PAIRED = Needs(whole_groups=True, min_group_size=2)
TEXTS = ("blue", "red or green", "yes", "left of the box", "7", "a", "no")


def row(*candidates: Candidate, name: str = "row") -> Prompt:
    return Prompt(name, (Message("user", "What is it?"),), candidates=candidates)


def scored(*scores: float | None) -> tuple[Candidate, ...]:
    return tuple(Candidate(text, score) for text, score in zip(TEXTS, scores, strict=False))


def test_a_rows_candidates_are_a_group_with_their_scores(vision):
    prompt = replace(vision.prompts[1], prompt=row(*scored(0.5, 2, -1)))
    group = Comparisons.group(prompt, PAIRED, vision.encoder)
    assert group.rewards.tolist() == group.components["score"].tolist() == [0.5, 2, -1] and group.valid.all()
    assert group.is_given and {rollout.weight_version for rollout in group.rollouts} == {GIVEN}
    assert [rollout.text for rollout in group.rollouts] == list(TEXTS[:3])
    assert {tuple(rollout.images) for rollout in group.rollouts} == {prompt.images}
    ends = {int(rollout.token_ids[-1]) for rollout in group.rollouts}
    assert ends == {vision.folder.processor.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert not group.group.prompt.prompt.candidates, "the texts are in the rollouts"


@pytest.mark.parametrize(
    ("candidates", "error", "match"),
    [
        ((), DataError, "has no candidates to compare"),
        (scored(1), DataError, "has 1 candidate, and 'grpo' compares 2"),
        (scored(1, None), DataError, "candidate 1 has no score"),
        (scored(float("nan"), 0), DataError, "candidate 0 has the score nan"),
        (scored(1, 1e39), DataError, r"candidate 1 has the score 1e\+39"),
        ((Candidate("a", 1.0, (RawImage(b"", ""),)), Candidate("b", 0.0)), DataError, "candidate 0 has images of its"),
        ((Candidate("a <|im_end|>", 1.0), Candidate("b", 0.0)), DataError, "candidate 0 holds special tokens"),
        (scored(3, 3, 3), "data/ties", "all candidates have the same score"),
        (scored(3, 3 + 1e-9), "data/ties", "all candidates have the same score"),
        ((Candidate("a", 1.0), Candidate("a", 0.0)), "data/equal_pairs", "the best and the worst candidate are equal"),
        ((Candidate("a", 1.0), Candidate("b " * 40, 0.0)), "data/overlong", "longer than sampler.max_new_tokens = 24"),
    ],
)
def test_rows_that_cannot_be_compared_are_told_from_those_that_say_nothing(vision, candidates, error, match):
    with pytest.raises(DataError, match=match) as caught:
        Comparisons.check_row(row(*candidates), vision.config(), PAIRED, vision.encoder)
    assert caught.value.where in ("row", "")
    if isinstance(error, str):
        assert isinstance(caught.value, UselessRow) and caught.value.counted == error
    else:
        assert type(caught.value) is error


def test_a_single_candidate_is_a_group_where_nothing_is_compared(vision):
    for scores in ((0,), (1, 1)):  # each completion counts by itself
        Comparisons.check_row(row(*scored(*scores)), vision.config(), Needs(), vision.encoder)
    Comparisons.check_row(row(*scored(2, 1, 1)), vision.config(), PAIRED, vision.encoder)
    long = row(Candidate("a", 1.0), Candidate("b " * 40, 0.0))
    with pytest.raises(DataError, match=r"longer than sampler.max_new_tokens = 24: ") as caught:
        Comparisons.check_row(long, vision.config(data={"overlong": "fail"}), PAIRED, vision.encoder)
    assert type(caught.value) is DataError


@pytest.mark.parametrize("source", [Given, Comparisons])
def test_every_probe_of_an_audit_is_a_group_that_can_be_learned(vision, source):
    """Doctor takes an optimizer step on them, whatever the run learns from."""
    probes = fitting(vision.encoder, max_tokens=256, max_images=2).prompts
    groups = [source.group(probe.encoded, PAIRED, vision.encoder) for probe in probes]
    assert len(groups) >= 8 and {len(group.rollouts) for group in groups} == {1 if source is Given else 2}


@pytest.fixture(scope="module")
def pairs(vision, plain) -> Any:
    """Groups of two and three candidates of texts and images, reference log-probs, and DPO's step by hand."""
    import torch

    scores = [(1.0, 0.0), (0.2, 0.9, 0.4), (0.0, 1.0), (3.0, 1.0)]
    prompts = [replace(vision.prompts[i % 3], prompt=row(*scored(*own), name=f"r{i}")) for i, own in enumerate(scores)]
    groups = [Comparisons.group(prompt, PAIRED, vision.encoder) for prompt in prompts]
    batch, rng = batch_of(groups, {}), np.random.default_rng(0)
    reference = [rng.normal(-6, 1, len(mask)).astype(np.float32) for mask in batch.masks]
    model, by_row = plain(vision.folder.path), iter(reference)
    rows = [[(rollout, next(by_row)) for rollout in group.rollouts] for group in groups]
    loss_sum, margins = 0.0, []
    for group, own in zip(groups, rows, strict=True):
        members = own[int(group.rewards.argmax())], own[int(group.rewards.argmin())]
        (chosen, rejected) = (
            model.logprobs(rollout, vision.media, 1.0).sum() - float(frozen.sum()) for rollout, frozen in members
        )
        loss = -torch.nn.functional.logsigmoid(0.5 * (chosen - rejected)) / len(groups)
        loss.backward()
        loss_sum += float(loss)
        margins.append(0.5 * float(chosen - rejected))
    squares = [p.grad.double().square().sum() for p in model.model.parameters() if p.grad is not None]
    return (
        groups,
        replace(batch, reference_logprobs=reference),
        loss_sum,
        margins,
        float(torch.stack(squares).sum().sqrt()),
    )


@pytest.mark.parametrize(
    "learner",
    [
        {"tokens_per_microbatch": 4096, "zero_stage": 0},
        {"tokens_per_microbatch": 16, "zero_stage": 0},
        pytest.param({"tokens_per_microbatch": 120, "zero_stage": 3}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_an_update_on_pairs_is_plain_transformers_one_pair_at_a_time(pairs, start, learner, monkeypatch):
    """Packed rows, a budget below one pair, and ZeRO 3, of groups whose middle candidates are in no loss."""
    from mmrl_algorithms.dpo import DPO

    groups, batch, loss, margins, norm = pairs
    algorithm, sizes, plan = DPO(DPO.Config(beta=0.5)), list[int](), packing.plan_microbatches

    def counted(*args: Any) -> Any:
        parts = plan(*args)
        sizes.append(len(parts))
        return parts

    monkeypatch.setattr("mmrl.engine.learner.microbatches.plan_microbatches", counted)
    engine = start(algorithm=algorithm, learner={**learner, "lr": 1e-3}, sampler={"temperature": 1.0})
    with engine.learning() as policy:
        result = finished(learn(groups, algorithm, policy, LearnSettings(), batch=batch))
    found = result.metrics
    assert sizes[-1] == (4 if learner["tokens_per_microbatch"] == 16 else 1) or learner["zero_stage"]
    assert found["loss/total"] == pytest.approx(loss, rel=1e-5)
    assert found["policy/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert found["preference/margin"] == pytest.approx(np.mean(margins), rel=1e-5)
    assert found["preference/accuracy"] == np.mean([margin > 0 for margin in margins])


def test_an_evaluation_tells_the_log_probs_of_each_pair_and_trains_on_nothing(pairs, start):
    """The policy is the reference before the first update: every pair is a tie."""
    from mmrl_algorithms.dpo import DPO

    groups = pairs[0]
    algorithm = DPO(DPO.Config(beta=0.5))
    engine = start(algorithm=algorithm, learner={"zero_stage": 0}, sampler={"temperature": 1.0})
    with engine.learning() as policy:
        found = judged(groups, algorithm, policy, LearnSettings())
    assert found.metrics["accuracy"] == 0.5 and found.metrics["loss"] == pytest.approx(np.log(2))
    assert [group.scored for group in found.groups] == groups
    for group in found.groups:
        assert not group.trained and not any(group.updates) and not np.concatenate(group.advantages).any()
        lengths = [len(rollout.token_ids) for rollout in group.scored.group.rollouts]
        assert [len(each) for each in group.reference_logprobs] == lengths
        scores = group.scored.rewards
        in_loss = [score in (scores.min(), scores.max()) for score in scores]
        for is_in, own, reference in zip(in_loss, group.logprobs, group.reference_logprobs, strict=True):
            assert own.tolist() == (reference.tolist() if is_in else []), "the middle one is in no loss"
