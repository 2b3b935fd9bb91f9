"""The loss rule: an algorithm's per-token losses, times sequence weights, summed; shared by learner and replay."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from mmrl.errors import contract_error, plugin_errors
from mmrl.interfaces import Aggregation, Algorithm
from mmrl.ops.absent import absent_columns
from mmrl.ops.aggregation import sequence_weights
from mmrl.ops.assignment import kind_of
from mmrl.token_columns import COLUMNS
from mmrl.types import (
    BoolArray,
    FloatArray,
    IntArray,
    PackedTokens,
    PackedView,
    Sample,
    TokenLoss,
    TrainingRow,
)

CRITIC_LOSS = "critic/loss"
"""The metric with the critic's loss; its terms are ``critic/loss/<name>``."""


@dataclass(frozen=True, slots=True)
class PartialLoss:
    """One micro-batch's share of an optimizer step.

    Attributes:
        loss: Scalar with gradient; the sum over all micro-batches and ranks is the step's loss.
        sums: Named sums; over ``tokens`` they become means, except losses, which are sums already.
        tokens: Tokens in the loss.
        sequences: Sums over sequences by name, each with the number of sequences that have such a value.
    """

    loss: torch.Tensor
    sums: Mapping[str, float]
    tokens: int
    sequences: Mapping[str, tuple[float, int]] = field(default_factory=dict)


def training_rows(
    samples: Sequence[Sample],
    masks: Sequence[BoolArray],
    columns: Mapping[str, Sequence[FloatArray]],
    group_ids: IntArray,
    aggregation: Aggregation,
    indices: Sequence[int],
    constants: Mapping[str, float] = MappingProxyType({}),
    views: Mapping[str, bool] = MappingProxyType({}),
    scores: FloatArray | None = None,
    whole_groups: bool = False,
    given: BoolArray | None = None,
) -> dict[int, TrainingRow]:
    """The rows of one optimizer step by their index in the batch, weighted.

    Rows without a token in the loss are left out.

    Args:
        columns: B arrays (T_i,) by name, as ``columns_before``.
        indices: The part of the batch that this optimizer step sees; the weights span just that part.
        views: The views that the run scores, by name; True with a gradient.
        scores: (B,) each row's; None for 0.
        whole_groups: True if groups stay whole.
        given: (B,) as ``Batch.given``; None for rows without demonstrations among them.
    """
    weights = sequence_weights(aggregation, [masks[i] for i in indices], group_ids[list(indices)])
    numbers, scored = dict(constants), dict(views)  # they travel
    return {
        i: TrainingRow(
            sample=samples[i],
            weight=float(weight),
            mask=masks[i],
            columns={name: values[i] for name, values in columns.items()},
            constants=numbers,
            views=scored,
            group=int(group_ids[i]),
            score=0.0 if scores is None else float(scores[i]),
            whole_group=whole_groups,
            given=given is not None and bool(given[i]),
        )
        for i, weight in zip(indices, weights, strict=True)
        if weight > 0
    }


def check_whole_groups(
    algorithm: Algorithm, samples: Sequence[Sample], masks: Sequence[BoolArray], group_ids: IntArray
) -> None:
    """Nothing, if each group has several rows in the loss, or none.

    Raises:
        PluginError: There is one alone.
    """
    in_loss = np.array([mask.any() for mask in masks], bool)
    groups, counts = np.unique(group_ids[in_loss], return_counts=True)
    if single := set(groups[counts == 1].tolist()):
        alone = (i for i, group in enumerate(group_ids.tolist()) if group in single and in_loss[i])
        names = dict.fromkeys(samples[i].prompt.id or f"group {group_ids[i]}" for i in alone)
        what = f"keeps a single row of a group that stays whole: {', '.join(list(names)[:8])}"
        raise contract_error(algorithm, "credit", what, "let keep drop all rows of such a group")


def seen_samples(rows: Sequence[TrainingRow]) -> list[Sample]:
    """The samples whose log-probs a loss takes: the rows', and after all of these each row's in its scored views."""
    return [*(row.sample for row in rows), *(row.sample.seen(name) for row in rows for name in row.own_views)]


def pack_tokens(
    rows: Sequence[TrainingRow],
    logprobs_T: torch.Tensor,
    entropy_T: torch.Tensor,
    final_values_N: torch.Tensor | None = None,
    values_T: torch.Tensor | None = None,
) -> PackedTokens:
    """The rows' completion tokens in packed order, with zeros in place of masked ones.

    Args:
        logprobs_T: Current log-probs of ``seen_samples``, concatenated.
        entropy_T: Likewise the entropies.
        final_values_N: The rows' scores, of a network with a score head.
        values_T: The values of the rows' tokens, of a critic.
    """
    count = sum(len(row.mask) for row in rows)
    (logprobs_T, *seen), (entropy_T, *seen_entropy) = (
        values_T.split([count, *(len(row.mask) for row in rows for _ in row.own_views)])
        for values_T in (logprobs_T, entropy_T)
    )
    mask_T = torch.from_numpy(np.concatenate([row.mask for row in rows])).to(logprobs_T.device)

    def pack(arrays: Sequence[FloatArray]) -> torch.Tensor:
        values_T = torch.from_numpy(np.concatenate(arrays)).to(logprobs_T)
        return torch.where(mask_T, values_T, torch.zeros_like(values_T))

    # Zeros before any arithmetic: a masked NaN that is only multiplied away later would still reach the gradient.
    logprobs_T = torch.where(mask_T, logprobs_T, torch.zeros_like(logprobs_T))
    entropy_T = torch.where(mask_T, entropy_T, torch.zeros_like(entropy_T))
    packed: dict[str, Any] = dict.fromkeys(column.name for column in COLUMNS)  # None is a column that the run lacks
    packed |= {"logprobs": logprobs_T, "entropy": entropy_T, "old_logprobs": logprobs_T.detach()}
    packed["advantages"] = torch.zeros_like(packed["old_logprobs"])  # of a critic's rows
    packed["vpreds"] = None if values_T is None else torch.where(mask_T, values_T, torch.zeros_like(values_T))
    sampled = [column.name for column in COLUMNS if column.known == "sampled"]
    packed |= {name: pack([getattr(row.sample, name) for row in rows]) for name in sampled}
    packed |= {name: pack([row.columns[name] for row in rows]) for name in rows[0].columns}
    lengths = torch.tensor([len(row.mask) for row in rows], device=logprobs_T.device)
    if any(row.sample.view or row.given for row in rows):
        unknown_N = torch.tensor([bool(row.sample.view) or row.given for row in rows], device=lengths.device)
        unknown_T = torch.repeat_interleave(unknown_N, lengths)
        packed |= {name: torch.where(unknown_T, packed["old_logprobs"], packed[name]) for name in sampled}
    return PackedTokens(
        mask_T=mask_T,
        sequence_T=torch.repeat_interleave(torch.arange(len(rows), device=logprobs_T.device), lengths),
        num_sequences=len(rows),
        final_values_N=final_values_N,
        constants=rows[0].constants,
        group_N=torch.tensor([row.group for row in rows], dtype=torch.int64, device=logprobs_T.device),
        score_N=torch.tensor([row.score for row in rows], dtype=logprobs_T.dtype, device=logprobs_T.device),
        given_N=torch.tensor([row.given for row in rows], device=logprobs_T.device),
        views=_packed_views(rows, mask_T, (logprobs_T, entropy_T), (seen, seen_entropy)),
        **{column.packed: packed[column.name] for column in COLUMNS},
    )


_Pair = tuple[torch.Tensor, torch.Tensor]


def _packed_views(
    rows: Sequence[TrainingRow],
    mask_T: torch.Tensor,
    own: _Pair,
    seen: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
) -> dict[str, PackedView]:
    """``PackedTokens.views``.

    Args:
        own: Log-probs and entropies given the prompts themselves.
        seen: Likewise given the views, one after the other of each row.
    """
    if not (views := rows[0].views):
        return {}
    lengths = [len(row.mask) for row in rows]
    first = [values_T.detach().split(lengths) for values_T in own]
    places = iter(range(len(seen[0])))
    place_of = {(i, name): next(places) for i, row in enumerate(rows) for name in row.own_views}
    found = {}
    for name, has_gradient in views.items():
        parts = []
        for one, other in zip(first, seen, strict=True):
            values_T = torch.cat(
                [other[place_of[i, name]] if (i, name) in place_of else one[i] for i in range(len(rows))]
            )
            values_T = values_T if has_gradient else values_T.detach()
            parts.append(torch.where(mask_T, values_T, torch.zeros_like(values_T)))
        present = [torch.full((n,), (i, name) in place_of, device=mask_T.device) for i, n in enumerate(lengths)]
        found[name] = PackedView(parts[0], parts[1], torch.cat(present))
    return found


def partial_loss(
    algorithm: Algorithm,
    rows: Sequence[TrainingRow],
    logprobs_T: torch.Tensor,
    entropy_T: torch.Tensor,
    final_values_N: torch.Tensor | None = None,
) -> PartialLoss:
    """One micro-batch's share of the step's loss, ``sum_i w_i sum_t m_it L_it``, and of its metrics.

    Args:
        rows: At least one.
        logprobs_T: Current log-probs of ``seen_samples``, concatenated; likewise ``entropy_T``.
        final_values_N: As ``pack_tokens``.
    """
    return weighed_loss(rows, *token_loss(algorithm, rows, logprobs_T, entropy_T, final_values_N))


def score_loss(
    algorithm: Algorithm, rows: Sequence[TrainingRow], final_values_N: torch.Tensor
) -> tuple[PackedTokens, TokenLoss]:
    """As ``token_loss``, of a reward model, which has scores alone."""
    nothing_T = final_values_N.detach().new_zeros(sum(len(row.mask) for row in rows))
    return token_loss(algorithm, rows, nothing_T, nothing_T, final_values_N)


def value_loss(
    algorithm: Algorithm, rows: Sequence[TrainingRow], values_T: torch.Tensor
) -> tuple[PackedTokens, TokenLoss]:
    """As ``token_loss``, of a critic.

    Args:
        values_T: The current values of the rows' tokens, concatenated.
    """
    nothing_T = torch.zeros_like(values_T.detach())
    return _answered(algorithm, "value_loss", pack_tokens(rows, nothing_T, nothing_T, values_T=values_T))


def token_loss(
    algorithm: Algorithm,
    rows: Sequence[TrainingRow],
    logprobs_T: torch.Tensor,
    entropy_T: torch.Tensor,
    final_values_N: torch.Tensor | None = None,
) -> tuple[PackedTokens, TokenLoss]:
    """The packed tokens, and the algorithm's loss of each; as ``partial_loss``, before anything is summed.

    Raises:
        PluginError: It fails, or answers values of another shape.
    """
    return _answered(algorithm, "loss", pack_tokens(rows, logprobs_T, entropy_T, final_values_N))


def _answered(algorithm: Algorithm, hook: str, tokens: PackedTokens) -> tuple[PackedTokens, TokenLoss]:
    """The tokens, and what ``loss`` or ``value_loss`` of the algorithm answers."""
    hint = functools.partial(absent_columns, algorithm, tokens)
    with plugin_errors(algorithm, hook, passing=(torch.OutOfMemoryError,), hint=hint):
        result = getattr(algorithm, hook)(tokens)
        _check_loss(algorithm, hook, result, tokens)
    return tokens, result


def weighed_loss(rows: Sequence[TrainingRow], tokens: PackedTokens, result: TokenLoss) -> PartialLoss:
    """The share of the step's loss of packed rows, from what ``token_loss`` or ``value_loss`` answered."""
    logprobs_T = tokens.logprobs_T
    weights = torch.tensor([row.weight for row in rows], dtype=logprobs_T.dtype, device=logprobs_T.device)
    weights_T = weights[tokens.sequence_T]

    def masked_sum(values_T: torch.Tensor) -> torch.Tensor:
        return torch.where(tokens.mask_T, values_T, torch.zeros_like(values_T)).sum()

    loss = masked_sum(weights_T * result.loss_T)
    with torch.no_grad():
        total, terms = ("loss/total", "loss") if tokens.values_T is None else (CRITIC_LOSS, CRITIC_LOSS)
        named = {total: loss}
        named |= {f"{terms}/{name}": masked_sum(weights_T * term_T) for name, term_T in result.terms.items()}
        named |= {name: masked_sum(values_T) for name, values_T in result.metrics.items()}
        if tokens.final_values_N is None and tokens.values_T is None:
            named["policy/entropy"] = masked_sum(tokens.entropy_T)
        names, values = list(named), torch.stack([value.double() for value in named.values()])
        sequences = {name: _summed(values_N) for name, values_N in result.sequence_metrics.items()}
    sums = dict(zip(names, values.tolist(), strict=True))
    return PartialLoss(loss, sums, int(sum(np.count_nonzero(row.mask) for row in rows)), sequences)


def _summed(values_N: torch.Tensor) -> tuple[float, int]:
    """The sum of the values that are not NaN, and their number."""
    known = values_N[~values_N.isnan()].double()
    return float(known.sum()), len(known)


def _check_loss(algorithm: Algorithm, hook: str, result: TokenLoss, tokens: PackedTokens) -> None:
    """Raises PluginError unless everything is per token: a reduced loss would broadcast without an error."""
    if not isinstance(result, TokenLoss):
        raise contract_error(algorithm, hook, f"answered {kind_of(result)}", "return mmrl.types.TokenLoss(loss_T)")
    shape = tokens.logprobs_T.shape
    for name, value in {"loss_T": result.loss_T, **result.terms, **result.metrics}.items():
        if not (isinstance(value, torch.Tensor) and value.shape == shape):
            what = f"gave {name} as {kind_of(value)}, not one value per token, {tuple(shape)}"
            remedy = "reduce nothing: weights and sums are mmrl's; of a value per sequence: x[tokens.sequence_T]"
            raise contract_error(algorithm, hook, what, remedy)
    for name, value in result.sequence_metrics.items():
        if not (isinstance(value, torch.Tensor) and value.shape == (tokens.num_sequences,)):
            what = f"gave {name} as {kind_of(value)}, not one value per sequence, {(tokens.num_sequences,)}"
            remedy = "make a tensor of NaN for tokens.num_sequences, and fill in the sequences that have a value"
            raise contract_error(algorithm, hook, what, remedy)
    found = ((name, getattr(tokens, name)) for name in ("values_T", "final_values_N", "logprobs_T"))
    name, values = next((name, values) for name, values in found if values is not None)
    if values.requires_grad and not result.loss_T.requires_grad:
        remedy = f"let loss_T depend on tokens.{name} without detaching it, outside torch.no_grad"
        raise contract_error(algorithm, hook, "gave a loss_T without a gradient", remedy)


def reduce_partials(partials: Sequence[PartialLoss]) -> dict[str, float]:
    """The step's metrics: losses summed, all else averaged over the tokens in the loss, or over sequences."""
    tokens = max(sum(partial.tokens for partial in partials), 1)
    totals: dict[str, float] = {}
    for partial in partials:
        for name, value in partial.sums.items():
            totals[name] = totals.get(name, 0.0) + value
    sums = ("loss/", CRITIC_LOSS)
    means = {name: total if name.startswith(sums) else total / tokens for name, total in totals.items()}
    for name in dict.fromkeys(name for partial in partials for name in partial.sequences):
        found = [partial.sequences[name] for partial in partials if name in partial.sequences]
        if count := sum(number for _, number in found):
            means[name] = sum(total for total, _ in found) / count
    return means
