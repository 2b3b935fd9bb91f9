"""From credit to a loss: masks, advantages, weights, and sums over micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.errors import OldNameWarning, PluginError
from mmrl.interfaces import Aggregation, Algorithm
from mmrl.ops.assignment import assign_credit, columns_before, loss_masks
from mmrl.ops.credit import token_kl
from mmrl.ops.objective import (
    check_whole_groups,
    pack_tokens,
    partial_loss,
    reduce_partials,
    seen_samples,
    training_rows,
)
from mmrl.types import Batch, Credit, EncodedPrompt, Prompt, Sample, Segment, TokenLoss

NAN = np.nan


class Weighted(Algorithm):
    """Loss ``A log pi``, one term, one metric."""

    aggregation = Aggregation("token-mean")

    def credit(self, batch):
        return Credit(batch.rewards)

    def loss(self, tokens):
        loss_T = tokens.advantages_T * tokens.logprobs_T
        return TokenLoss(loss_T, {"part": 2 * loss_T}, {"size": tokens.mask_T.float() * 3})


@pytest.fixture
def samples() -> list[Sample]:
    """Three completions; the second has a tool's answer in its middle."""
    prompt = EncodedPrompt(prompt=Prompt("p", ()), text="", token_ids=np.zeros(1, np.int32), images=())

    def segment(length, by_policy=True):
        return Segment(np.arange(length, dtype=np.int32), by_policy, np.full(length, -0.5, np.float32))

    return [
        Sample(prompt, (segment(2),)),
        Sample(prompt, (segment(1), segment(2, by_policy=False), segment(1))),
        Sample(prompt, (segment(3),)),
    ]


@pytest.fixture
def batch(samples) -> Batch:
    return Batch(
        rewards=np.array([1.0, -2.0, 4.0]),
        valid=np.ones(3, bool),
        group_ids=np.array([0, 0, 1]),
        masks=[sample.mask for sample in samples],
        truncated=np.zeros(3, bool),
        components={},
        old_logprobs=None,
        reference_logprobs=None,
        sampler_logprobs=[sample.sampler_logprobs for sample in samples],
    )


def test_masks_leave_out_foreign_tokens_invalid_rows_and_rows_not_kept(batch):
    assert [m.tolist() for m in loss_masks(batch, Credit(batch.rewards))] == [
        [True, True], [True, False, False, True], [True, True, True],
    ]  # fmt: skip
    batch = replace(batch, valid=np.array([True, False, True]))
    kept = loss_masks(batch, Credit(batch.rewards, keep=np.array([True, True, False])))
    assert [m.sum() for m in kept] == [2, 0, 0]


def test_advantages_are_spread_over_tokens_or_taken_token_by_token(batch):
    masks = loss_masks(batch, Credit(batch.rewards))
    spread = columns_before(batch, Credit(np.array([1.0, -2.0, NAN])), [*masks[:2], np.zeros(3, bool)])
    assert [a.tolist() for a in spread["advantages"]] == [[1, 1], [-2, 0, 0, -2], [0, 0, 0]]
    ragged = [np.array([1.0, 2.0]), np.array([3.0, NAN, NAN, 4.0]), np.zeros(3)]
    found = columns_before(batch, Credit(ragged), masks)["advantages"]
    assert [a.tolist() for a in found] == [[1, 2], [3, 0, 0, 4], [0, 0, 0]]


def test_weights_span_the_rows_of_the_optimizer_step_only(samples, batch):
    masks = [*batch.masks[:2], np.zeros(3, bool)]
    columns = {"advantages": [np.ones(len(mask)) for mask in masks]}
    mode = Aggregation("seq-mean-token-mean")
    whole = training_rows(samples, masks, columns, batch.group_ids, mode, range(3))
    assert {i: row.weight for i, row in whole.items()} == {0: 1 / (2 * 2), 1: 1 / (2 * 2)}
    one = training_rows(samples, masks, columns, batch.group_ids, mode, [1])
    assert {i: row.weight for i, row in one.items()} == {1: 0.5}
    assert training_rows(samples, masks, columns, batch.group_ids, mode, [2]) == {}


@pytest.fixture
def rows(samples, batch):
    masks = loss_masks(batch, Credit(batch.rewards))
    columns = columns_before(batch, Credit(batch.rewards), masks)
    return training_rows(samples, masks, columns, batch.group_ids, Aggregation("token-mean"), range(3))


def test_a_loss_by_hand_and_in_parts(rows):
    logprobs = [
        torch.tensor(values, requires_grad=True) for values in ([-1.0, -2.0], [-3.0, NAN, NAN, -4.0], [-1.0] * 3)
    ]
    entropy = [torch.tensor([2.0, 3.0]), torch.tensor([1.0, NAN, NAN, 1.0]), torch.zeros(3)]
    whole = partial_loss(Weighted({}), list(rows.values()), torch.cat(logprobs), torch.cat(entropy))
    expected = (1 * (-1 - 2) - 2 * (-3 - 4) + 4 * (-3)) / 7
    assert whole.loss.item() == pytest.approx(expected)
    reduced = {"loss/total": expected, "loss/part": 2 * expected, "size": 3, "policy/entropy": 1.0}
    assert reduce_partials([whole]) == pytest.approx(reduced)
    whole.loss.backward()
    np.testing.assert_allclose(logprobs[1].grad, np.array([-2, 0, 0, -2]) / 7)

    parts = [
        partial_loss(
            Weighted({}),
            [rows[i] for i in part],
            torch.cat([logprobs[i] for i in part]),
            torch.cat([entropy[i] for i in part]),
        )
        for part in ([1], [2, 0])
    ]
    assert sum(part.loss.item() for part in parts) == pytest.approx(expected)
    assert reduce_partials(parts) == pytest.approx(reduce_partials([whole]))


class Paired(Weighted):
    """A loss of pairs: the log-probs of the better sequences less those of the worse ones, with a mean over pairs."""

    def loss(self, tokens):
        chosen_M, rejected_M = tokens.pairs()
        sums_N = tokens.sequence_sum(tokens.logprobs_T)
        sign_N = torch.zeros_like(sums_N).index_fill(0, chosen_M, -1).index_fill(0, rejected_M, 1)
        margin_N = torch.full_like(sums_N, NAN)
        margin_N[chosen_M] = (sums_N[chosen_M] - sums_N[rejected_M]).detach()
        both = {"preference/margin": margin_N, "preference/nobody": torch.full_like(sums_N, NAN)}
        return TokenLoss((sign_N * sums_N)[tokens.sequence_T], sequence_metrics=both)


def test_pairs_are_best_and_worst_of_each_group_and_their_means_are_over_pairs(samples):
    samples = [samples[i] for i in (0, 2, 0, 1, 2)]
    masks, groups = [sample.mask for sample in samples], np.array([8, 3, 3, 8, 8])
    columns, scores = {"advantages": masks}, np.array([0.5, 1.0, 0.0, 0.5, 2.0])
    mode = Aggregation("token-mean")
    rows = training_rows(samples, masks, columns, groups, mode, range(5), scores=scores, whole_groups=True)
    assert [(row.group, row.score, row.whole_group) for row in rows.values()] == [
        (8, 0.5, True), (3, 1.0, True), (3, 0.0, True), (8, 0.5, True), (8, 2.0, True),
    ]  # fmt: skip
    logprobs = [torch.full((len(mask),), -float(i + 1)) for i, mask in enumerate(masks)]

    def part(*places):
        values = torch.cat([logprobs[i] for i in places]).requires_grad_()
        return partial_loss(Paired({}), [rows[i] for i in places], values, torch.zeros_like(values))

    # Group 8: the fifth row against the first of two worst ones; group 3: the second against the third.
    margins = [-15.0 + 2.0, -6.0 + 6.0]
    whole, parts = reduce_partials([part(0, 1, 2, 3, 4)]), reduce_partials([part(0, 3, 4), part(2, 1)])
    assert whole["preference/margin"] == parts["preference/margin"] == np.mean(margins)
    assert "preference/nobody" not in whole, "a mean of nothing is no metric"
    pairs = pack_tokens([rows[i] for i in (4, 3, 1, 0, 2)], torch.zeros(14), torch.zeros(14)).pairs()
    assert [each.tolist() for each in pairs] == [[0, 2], [1, 4]]


@pytest.mark.parametrize(("scores", "places"), [((1.0, 1.0), (0, 1)), ((1.0, 0.0), (1,))])
def test_pairs_without_an_order_are_the_algorithms_fault(samples, scores, places):
    masks = [sample.mask for sample in samples[:2]]
    columns, mode = {"advantages": masks}, Aggregation("token-mean")
    rows = training_rows(samples, masks, columns, np.zeros(2, int), mode, range(2), scores=np.array(scores))
    values = torch.zeros(sum(len(masks[i]) for i in places), requires_grad=True)
    with pytest.raises(PluginError, match="group 0 has no better and no worse sequence in the loss"):
        partial_loss(Paired({}), [rows[i] for i in places], values, values)


class Broad(Weighted):
    def loss(self, tokens):
        return replace(super().loss(tokens), sequence_metrics={"wide": tokens.logprobs_T})


def test_a_value_per_token_is_no_sequence_metric(rows):
    values = torch.zeros(9, requires_grad=True)
    with pytest.raises(PluginError, match=r"wide as torch.float32 of shape \(9,\), not one value per sequence, \(3,\)"):
        partial_loss(Broad({}), list(rows.values()), values, values)


def test_a_single_row_of_a_whole_group_is_the_credits_fault(samples):
    masks = [sample.mask for sample in samples]
    groups, nothing = np.array([5, 5, 6]), np.zeros(3, bool)
    with pytest.raises(PluginError, match="keeps a single row of a group that stays whole: p"):
        check_whole_groups(Weighted({}), samples, masks, groups)
    check_whole_groups(Weighted({}), samples, [*masks[:2], nothing], groups)


class Constant(Weighted):
    """Loss and metric 1 at every token, masked or not, beside a log-prob that has a gradient."""

    def loss(self, tokens):
        loss_T = torch.ones_like(tokens.logprobs_T) + tokens.logprobs_T
        return TokenLoss(loss_T, {"part": loss_T.detach()}, {"size": torch.ones_like(loss_T)})


def test_what_a_loss_gives_for_masked_tokens_counts_nowhere(rows):
    logprobs_T = torch.zeros(9, requires_grad=True)
    partial = partial_loss(Constant({}), list(rows.values()), logprobs_T, torch.zeros(9))
    found = {"loss/total": 1, "loss/part": 1, "size": 1, "policy/entropy": 0}
    assert reduce_partials([partial]) == pytest.approx(found)
    partial.loss.backward()
    np.testing.assert_allclose(logprobs_T.grad, np.array([1, 1, 1, 0, 0, 1, 1, 1, 1]) / 7)


def test_packed_tokens_know_their_sequence_and_carry_no_garbage(rows):
    dirty = [
        replace(row, columns={**row.columns, "old_logprobs": old, "reference_logprobs": np.where(row.mask, -0.2, NAN)})
        for row, old in ((row, np.full(len(row.mask), -0.1)) for row in rows.values())
    ]
    tokens = pack_tokens(dirty, torch.full((9,), -0.3), torch.full((9,), 0.7))
    assert tokens.sequence_T.tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2] and tokens.num_sequences == 3
    assert tokens.mask_T.tolist() == [True] * 3 + [False] * 2 + [True] * 4
    for values, filled in (
        (tokens.logprobs_T, -0.3), (tokens.old_logprobs_T, -0.1), (tokens.reference_logprobs_T, -0.2),
        (tokens.sampler_logprobs_T, -0.5), (tokens.entropy_T, 0.7),
    ):  # fmt: skip
        np.testing.assert_allclose(values, np.where(tokens.mask_T, filled, 0), rtol=1e-6)
    assert tokens.sequence_sum(torch.ones(9)).tolist() == [2, 2, 3]
    assert tokens.sequence_mean(torch.arange(9.0)).tolist() == [0.5, 3.5, 7.0]


def test_old_logprobs_default_to_the_current_ones_without_gradient(rows):
    logprobs = torch.full((9,), -0.3, requires_grad=True)
    tokens = pack_tokens(list(rows.values()), logprobs, torch.zeros(9))
    assert torch.equal(tokens.old_logprobs_T, tokens.logprobs_T) and not tokens.old_logprobs_T.requires_grad
    assert tokens.reference_logprobs_T is None


@pytest.mark.parametrize(
    ("credit", "message"),
    [
        (Credit(np.zeros(2)), "one entry for each of 3 rows"),
        (Credit(np.float64(0.0)), r"values of float64.*, not one entry for each of 3 rows"),
        (Credit(np.zeros(3), keep=np.ones(2, bool)), r"bool of shape \(2,\), not a bool for each of 3 rows"),
        (Credit(np.zeros(3), keep=np.array([0, 1, 2])), r"keep as int64 of shape \(3,\), not a bool"),
        (Credit([np.zeros(2), np.zeros(3), np.zeros(3)]), r"row 1 values of shape \(3,\), and it has 4 tokens"),
        (Credit(np.array([0.0, np.inf, 0.0])), "row 1 an advantage that is not finite\n.*divide by nothing"),
        (Credit(np.zeros(3), constants={"tau": np.nan}), "the constant 'tau' as nan"),
        (Credit(np.zeros(3), constants={"tau": np.zeros(2)}), "constants are finite numbers"),
        (np.zeros(3), r"answered float64 of shape \(3,\)\n.*return mmrl.types.Credit"),
    ],
)
def test_credit_that_does_not_fit_the_batch_is_the_algorithms_fault(credit, message, batch, monkeypatch):
    monkeypatch.setattr(Weighted, "credit", lambda self, batch: credit)
    with pytest.raises(PluginError, match=message) as caught:
        assign_credit(Weighted({}), batch)
    assert "Weighted.credit " in caught.value.what


class Imitating(Weighted):
    source = "demonstrations"


class Taught(Imitating):
    def credit(self, batch):
        return Credit(np.full(3, 2.0))


class Inheriting(Taught):
    pass


def test_demonstrations_may_lack_a_credit_for_one_more_version(batch, monkeypatch):
    """A credit that is inherited from an algorithm that samples was not asked in 0.2.0 either."""
    with pytest.warns(OldNameWarning, match="Imitating: advantage 1 of a demonstration"):
        assert assign_credit(Imitating({}), batch).advantages.tolist() == [1, 1, 1]
    for kind in (Taught, Inheriting):
        assert assign_credit(kind({}), batch).advantages.tolist() == [2, 2, 2]

    def credit(self, batch):
        raise NotImplementedError

    monkeypatch.setattr(Taught, "credit", credit)
    with pytest.warns(OldNameWarning, match="that of its own credit"):
        assert assign_credit(Taught({}), batch).advantages.tolist() == [1, 1, 1]
    monkeypatch.setattr(Weighted, "credit", credit)
    with pytest.raises(PluginError, match="NotImplementedError"):
        assign_credit(Weighted({}), batch)


def test_what_torch_lacks_in_the_credit_of_demonstrations_is_an_error(batch, monkeypatch):
    """torch raises NotImplementedError too, in the frame of the credit itself."""

    def credit(self, batch):
        return Credit(torch.zeros(3, device="meta").numpy(force=True))

    monkeypatch.setattr(Taught, "credit", credit)
    with pytest.raises(PluginError, match="NotImplementedError"):
        assign_credit(Taught({}), batch)


def test_credit_may_be_anything_where_no_token_is_in_the_loss(batch, monkeypatch):
    credit = Credit([np.zeros(2), np.array([1.0, NAN, NAN, 1.0]), np.full(3, NAN)], keep=np.array([1, 1, 0], bool))
    monkeypatch.setattr(Weighted, "credit", lambda self, batch: credit)
    assert assign_credit(Weighted({}), batch) is credit


def test_a_loss_that_is_reduced_already_is_the_algorithms_fault(rows, monkeypatch):
    monkeypatch.setattr(Weighted, "loss", lambda self, tokens: TokenLoss(tokens.logprobs_T.mean()))
    with pytest.raises(PluginError, match=r"loss_T as torch.float32 of shape \(\), not one value per token, \(9,\)"):
        partial_loss(Weighted({}), list(rows.values()), torch.zeros(9), torch.zeros(9))


def test_a_full_device_is_no_fault_of_the_algorithm(rows, monkeypatch):
    """The learner halves its micro-batches then."""

    def fail(self: Any, tokens: Any) -> TokenLoss:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Weighted, "loss", fail)
    with pytest.raises(torch.OutOfMemoryError):
        partial_loss(Weighted({}), list(rows.values()), torch.zeros(9), torch.zeros(9))


def test_metrics_of_no_tokens_are_no_metrics():
    assert reduce_partials([]) == {}


class Curious(Weighted):
    """Uses columns as its options say, and asks for none."""

    def credit(self, batch):
        return Credit(self.config["credit"](self, batch))

    def reference(self, batch):
        return batch.reference_logprobs

    def loss(self, tokens):
        return TokenLoss(tokens.advantages_T * (tokens.old_logprobs_T - tokens.reference_logprobs_T))


def asserting(algorithm, batch):
    assert batch.reference_logprobs is None and len(batch.rewards) > 10**6, "too few rows"


def by_a_variable(algorithm, batch):
    old, reference = batch.old_logprobs, batch.reference_logprobs
    return token_kl(old, reference, batch.masks)


REFERENCE = "this run has no reference_logprobs: Needs(reference_logprobs=True) asks for it; it has sampler_logprobs"
BOTH = (
    "this run has no old_logprobs and reference_logprobs: Needs(old_logprobs=True, reference_logprobs=True) asks for "
    "them; it has sampler_logprobs"
)


@pytest.mark.parametrize(
    ("credit", "message", "hint"),
    [
        (lambda self, batch: np.concatenate(batch.reference_logprobs), "TypeError: dispatcher", REFERENCE),
        (lambda self, batch: np.concatenate(self.reference(batch)), "TypeError: dispatcher", REFERENCE),
        (lambda self, batch: sum((lambda: batch.reference_logprobs)()), "TypeError: 'NoneType' object is", REFERENCE),
        (by_a_variable, "TypeError: 'NoneType' object is not iterable", BOTH),
        (
            lambda self, batch: 1.0 * self.config.get("scale") if batch.reference_logprobs is None else 2.0,
            "TypeError: unsupported operand type(s) for *: 'float' and 'NoneType'",
            REFERENCE,
        ),
        (lambda self, batch: 1.0 * self.config.get("scale"), "TypeError: unsupported operand type(s)", ""),
        (lambda self, batch: batch.sampler_logprobs.mean(), "AttributeError: 'list' object has", ""),
        (asserting, "AssertionError: too few rows", ""),
    ],
)
def test_an_error_of_credit_keeps_its_message_and_a_column_that_it_reads_and_lacks_is_a_hint(
    batch, credit, message, hint
):
    with pytest.raises(PluginError) as caught:
        assign_credit(Curious({"credit": credit}), batch)
    assert f"Curious.credit raised {message}" in caught.value.what
    assert caught.value.what.endswith(f" ({hint})") if hint else "this run" not in caught.value.what
    assert caught.value.remedy == "repair or upgrade the plugin" and "Traceback" in caught.value.details


def test_an_error_of_a_loss_has_the_hint_too(rows):
    with pytest.raises(PluginError, match=r"Curious\.loss raised TypeError: unsupported operand") as caught:
        partial_loss(Curious({}), list(rows.values()), torch.zeros(9), torch.zeros(9))
    hint = "this run has no reference_logprobs_T: Needs(reference_logprobs=True) asks for it; it has advantages,"
    assert hint in caught.value.what


def test_a_row_without_images_has_no_gradient_through_its_view(samples):
    """It has its own log-probs there; and one with images has those given the view, in its place."""
    seen = replace(samples[2].prompt, views={"other": samples[2].prompt})
    samples = [samples[0], samples[1], replace(samples[2], prompt=seen)]
    masks = [sample.mask for sample in samples]
    columns = {"advantages": [np.ones(len(mask)) for mask in masks]}
    found = training_rows(
        samples, masks, columns, np.arange(3), Aggregation("token-mean"), range(3), views={"other": True}
    )
    rows = list(found.values())
    assert [len(sample.token_ids) for sample in seen_samples(rows)] == [2, 4, 3, 3]
    logprobs_T = torch.arange(12.0, requires_grad=True)
    tokens = pack_tokens(rows, logprobs_T, torch.arange(12.0) + 20)
    view = tokens.views["other"]
    assert tokens.logprobs_T.tolist() == [0, 1, 2, 0, 0, 5, 6, 7, 8]  # a tool wrote two of them
    assert view.logprobs_T.tolist() == [0, 1, 2, 0, 0, 5, 9, 10, 11]
    assert view.entropy_T.tolist() == [20, 21, 22, 0, 0, 25, 29, 30, 31]
    assert view.present_T.tolist() == [False] * 6 + [True] * 3
    view.logprobs_T.sum().backward()
    assert logprobs_T.grad is not None
    assert logprobs_T.grad.tolist() == [0] * 9 + [1] * 3
