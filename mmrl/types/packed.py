"""The inputs of a micro-batch's loss, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmrl.types.arrays import BoolArray, FloatArray
from mmrl.types.rollout import Sample

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """A sample with everything that the loss needs.

    Attributes:
        weight: The sequence weight of the aggregation mode (algorithms: ``sum_i w_i sum_t m_it L_it``).
        mask: (T,) tokens in the loss.
        columns: (T,) by name, the columns of the run that are known before the optimizer step and not sampled
            (``mmrl.token_columns``): ``advantages``, and ``old_logprobs`` where there are several optimizer steps. A
            critic's rows have ``values`` and ``returns``, and no others.
        constants: The constants of the step's ``Credit``.
        views: The views that the run scores, by name; True with a gradient. The sample's prompt has them if
            it has images.
        group: The id of its group in the batch.
        score: Its reward; of what the dataset gave, its score.
        whole_group: True if all rows of the group belong into its micro-batch.
        given: True for the demonstration of a group whose other rows were sampled.
    """

    sample: Sample
    weight: float
    mask: BoolArray
    columns: Mapping[str, FloatArray]
    constants: Mapping[str, float] = field(default_factory=dict)
    views: Mapping[str, bool] = field(default_factory=dict)
    group: int = 0
    score: float = 0.0
    whole_group: bool = False
    given: bool = False

    @property
    def own_views(self) -> list[str]:
        """The scored views that its prompt has; none without images."""
        return [name for name in self.views if name in self.sample.prompt.views]

    @property
    def advantages(self) -> FloatArray:
        """(T,) 0 outside the mask."""
        return self.columns["advantages"]


@dataclass(frozen=True, slots=True)
class PackedView:
    """The same completion tokens in the same order, given a view of their prompts.

    Attributes:
        logprobs_T: Current log-probs given the view, with gradient if the view asks for it. A sequence without images
            has the prompt's own, without gradient.
        entropy_T: Likewise the entropies; with gradient only if ``Needs.entropy_gradient``.
        present_T: bool, tokens of sequences whose prompts have images.
    """

    logprobs_T: torch.Tensor
    entropy_T: torch.Tensor
    present_T: torch.Tensor


def _nothing() -> torch.Tensor:
    import torch

    return torch.zeros(0)


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """The completion tokens of one micro-batch, in packed order, as ``Algorithm.loss`` sees them.

    Masked tokens are present; whatever the loss is there, it is ignored. A sequence is never split.

    Attributes:
        logprobs_T: Current log-probs at the sampling temperature, with gradient.
        old_logprobs_T: Before the step, detached; the current ones where they are not computed.
        sampler_logprobs_T: As the sampler reported them; zeros for what nobody sampled. Of what was sampled from a view
            the sampler has said nothing that these prompts could be compared by, and nothing of a demonstration in a
            sampled group: there they are ``old_logprobs_T``.
        reference_logprobs_T: None without a reference policy.
        advantages_T: Detached.
        mask_T: bool, tokens in the loss.
        sequence_T: int64, which sequence (0..num_sequences-1) each token belongs to.
        num_sequences: Sequences in this micro-batch.
        entropy_T: In nats, of the distribution that each token was sampled from, at the sampling temperature; with
            gradient only if ``Needs.entropy_gradient``.
        constants: The constants of the step's ``Credit``.
        views: By name, what the policy makes of the same completions given each view that ``Needs.views`` scores.
        final_values_N: (num_sequences,) float32 with gradient: a score head's value after the last token of each
            sequence; None of a network without one.
        values_T: With gradient, the critic's values of the places that predict the tokens; as the next two only in
            ``Algorithm.value_loss``, and None in ``loss``. Log-probs, entropies and advantages are 0 there.
        old_values_T: Before the step, detached.
        returns_T: As the step's ``Credit`` has them, detached.
        group_N: (num_sequences,) int64, the id of each sequence's group.
        score_N: (num_sequences,) its reward, or the dataset's score.
        given_N: (num_sequences,) bool, True for demonstrations beside what was sampled (``Batch.given``).
    """

    logprobs_T: torch.Tensor
    old_logprobs_T: torch.Tensor
    sampler_logprobs_T: torch.Tensor
    reference_logprobs_T: torch.Tensor | None
    advantages_T: torch.Tensor
    mask_T: torch.Tensor
    sequence_T: torch.Tensor
    num_sequences: int
    entropy_T: torch.Tensor
    constants: Mapping[str, float] = field(default_factory=dict)
    views: Mapping[str, PackedView] = field(default_factory=dict)
    group_N: torch.Tensor = field(default_factory=_nothing)
    score_N: torch.Tensor = field(default_factory=_nothing)
    given_N: torch.Tensor = field(default_factory=_nothing)
    final_values_N: torch.Tensor | None = None
    values_T: torch.Tensor | None = None
    old_values_T: torch.Tensor | None = None
    returns_T: torch.Tensor | None = None

    @property
    def log_ratio_T(self) -> torch.Tensor:
        """(T,) ``log pi - log pi_ref`` of each token, with gradient; only with a reference policy."""
        assert self.reference_logprobs_T is not None, "the algorithm's needs ask for no reference policy"
        return self.logprobs_T - self.reference_logprobs_T

    def pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(M,) int64 sequences with the best, and (M,) with the worst score of each of M groups; the first of ties.

        The groups are whole only with ``Needs.whole_groups``.

        Raises:
            ValueError: The scores of a group are equal, or it has one sequence; ``Algorithm.credit`` keeps no such one.
        """
        import torch

        places: dict[int, list[int]] = {}
        scores = self.score_N.tolist()
        for sequence, group in enumerate(self.group_N.tolist()):
            places.setdefault(group, []).append(sequence)
        chosen = [max(members, key=lambda sequence: scores[sequence]) for members in places.values()]
        rejected = [min(members, key=lambda sequence: scores[sequence]) for members in places.values()]
        for best, worst in zip(chosen, rejected, strict=True):
            if scores[best] == scores[worst]:
                what = f"group {self.group_N[best].item()} has no better and no worse sequence in the loss"
                raise ValueError(
                    f"{what}; let credit keep groups whose scores differ alone, and Needs(whole_groups=True)"
                )
        made = (torch.tensor(each, dtype=torch.int64, device=self.group_N.device) for each in (chosen, rejected))
        return next(made), next(made)

    def sequence_sum(self, values_T: torch.Tensor) -> torch.Tensor:
        """(num_sequences,) sums over each sequence's tokens in the loss."""
        import torch

        masked_T = torch.where(self.mask_T, values_T, torch.zeros_like(values_T))
        return masked_T.new_zeros(self.num_sequences).index_add(0, self.sequence_T, masked_T)

    def sequence_mean(self, values_T: torch.Tensor) -> torch.Tensor:
        """(num_sequences,) means over each sequence's tokens in the loss; 0 for a sequence without any."""
        counts = self.sequence_sum(self.mask_T.to(values_T.dtype))
        return self.sequence_sum(values_T) / counts.clamp(min=1)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """An unreduced loss.

    Attributes:
        loss_T: The loss of each token; the framework weighs, sums and minimises it.
        terms: Named parts of ``loss_T``, logged as ``loss/<name>`` with the same weights.
        metrics: Per-token values, logged as means over the tokens in the loss.
        sequence_metrics: (num_sequences,) values, logged as means over the sequences of the optimizer step; NaN leaves
            a sequence out.
    """

    loss_T: torch.Tensor
    terms: Mapping[str, torch.Tensor] = field(default_factory=dict)
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    sequence_metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
