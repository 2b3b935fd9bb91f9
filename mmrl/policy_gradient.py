"""The frame of policy-gradient algorithms: the options that they share, and the order in which those act.

An algorithm defines its advantages and its surrogate loss. The frame adds the rest, in this order,

    rewards      components normalised, summed, clipped, penalties added      (reward_norm, reward_clip)
    KL           beta (log pi_old - log pi_ref) per token, off the reward     (kl.where: reward)
    advantages   the algorithm's own
    keep         completions cut at the limit leave the loss                  (mask_truncated)

on the driver and, for each token,

    policy       the algorithm's own surrogate, times rollout correction      (correction)
    + beta KL    of an estimator                                              (kl.where: loss)
    - c H        the entropy of the policy                                    (entropy_coef)

An algorithm that needs none of this may implement ``mmrl.interfaces.Algorithm`` itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from mmrl.interfaces import (
    CORRECTION_BOUNDS,
    Aggregation,
    AggregationMode,
    Algorithm,
    CorrectionMode,
    KLEstimator,
    Needs,
    PluginConfig,
    Refill,
    RunFacts,
    Starvation,
)
from mmrl.ops.credit import (
    group_advantages,
    less_sequence_kl,
    mixed_groups,
    shaped_rewards,
    token_kl,
    valid_masks,
)
from mmrl.types import Batch, BoolArray, Credit, FloatArray, PackedTokens, ScoredGroup, TokenLoss

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class KLOptions(PluginConfig):
    """The penalty that keeps the policy near the reference, the initial policy."""

    loss_estimator: ClassVar[KLEstimator] = "k2"

    coef: NotNegative = 0.0
    """Its weight, beta; 0 loads no reference policy."""
    where: Literal["loss", "reward"] = "loss"
    """Added to each token's loss, or subtracted from the reward, token by token, before advantages."""
    estimator: KLEstimator | None = None
    """Per-token estimator; null is the algorithm's own in the loss, and k1 in the reward."""
    target: Positive | None = None
    """The KL that `coef` is steered to, from step to step; null leaves it as it is."""
    unit: Literal["token", "sequence"] = "token"
    """Whose mean KL `target` is: a token's or a sequence's."""
    horizon: Positive = 10000.0
    """Completions in which `coef` may change by a fifth, which is also the most in one step."""

    @model_validator(mode="after")
    def _check(self) -> KLOptions:
        if self.where == "reward" and self.estimator not in (None, "k1"):
            raise ValueError(f"estimator {self.estimator!r} in the reward is biased; leave it out or use k1")
        if self.where == "loss" and self.estimator == "k1":
            raise ValueError("estimator 'k1' in the loss has zero expected gradient; use k2 or k3, or where: reward")
        if self.target is not None and not self.coef:
            raise ValueError("target has nothing to steer: coef, its first value, is 0")
        if self.target is None and (self.unit != "token" or self.horizon != 10000.0):
            raise ValueError("unit and horizon go with target, which is null")
        return self


class CorrectionOptions(PluginConfig):
    """Weights against the difference between sampler and learner; see `mmrl.ops.correction`."""

    mode: CorrectionMode
    """The ratio that is the weight (a token's, a sequence's, or its geometric mean), and the rule beyond the bounds."""
    low: Positive | None = None
    """Lower bound of the weight; null is the mode's own."""
    high: Positive | None = None
    """Upper bound of the weight; null is the mode's own."""

    @model_validator(mode="after")
    def _check(self) -> CorrectionOptions:
        low, high = CORRECTION_BOUNDS[self.mode]
        low, high = low if self.low is None else self.low, high if self.high is None else self.high
        if low is not None and low >= high:
            raise ValueError(f"low must be less than high, and with the defaults of {self.mode} they are {low}, {high}")
        if self.mode.endswith("reject") and not (low or 0) <= 1 <= high:
            raise ValueError(f"{self.mode} between {low} and {high} rejects sequences that need no correction")
        return self


class DynamicSamplingOptions(PluginConfig):
    """Replace groups whose completions are all equally right by groups of other prompts (arXiv:2503.14476)."""

    metric: str | None = None
    """The reward whose raw values must differ within a group; null is the first of `rewards`. Where it does not score
    the group's source, the first one that does."""
    max_rounds: Annotated[int, Field(ge=1)] = 10
    """Rounds of replacements in a step, one prompt for each rejected group."""
    on_starvation: Starvation = "train_partial"
    """When the rounds are used up: train on the groups there are (in as many updates), keep them for the next step, or
    stop."""


class ClipOptions(PluginConfig):
    """The clip of a surrogate with a ratio."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below `1 - clip_low`."""
    clip_high: Positive = 0.2
    """The ratio is clipped above `1 + clip_high`."""

    @property
    def clip(self) -> dict[str, Any]:
        """The options as arguments of a surrogate."""
        return {"clip_low": self.clip_low, "clip_high": self.clip_high}


class DualClipOptions(ClipOptions):
    """The clip of a surrogate with a ratio per token."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound `c` on the loss of negative advantages, `-c A`; greater than `1 + clip_high`."""

    @property
    def clip(self) -> dict[str, Any]:
        return {**super().clip, "dual_clip": self.dual_clip}

    @model_validator(mode="after")
    def _check_dual_clip(self) -> DualClipOptions:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(f"dual_clip must be greater than 1 + clip_high = {1 + self.clip_high}")
        return self


class StdOptions(PluginConfig):
    """The standard deviation that advantages are divided by."""

    std_eps: Positive = 1e-6
    """Added to the standard deviation of a group's rewards."""
    std_ddof: Literal[0, 1] = 1
    """1 for the sample's standard deviation, 0 for the population's."""

    @property
    def std(self) -> dict[str, Any]:
        """The options as arguments of ``group_advantages``."""
        return {"eps": self.std_eps, "ddof": self.std_ddof}


class PolicyGradient(Algorithm):
    """Base of algorithms that weigh a policy gradient by advantages.

    Attributes:
        min_group_size: Rollouts per prompt without which the advantages are undefined.
        greedy_rollout: True if the advantages need a greedy rollout of each prompt.
    """

    min_group_size: ClassVar[int] = 1
    greedy_rollout: ClassVar[bool] = False

    class Config(PluginConfig):
        aggregation: AggregationMode = "token-mean"
        """The average over per-token losses."""
        length_norm: Positive | None = None
        """The length constant of `seq-mean-token-sum-norm`; null is `sampler.max_new_tokens`."""
        kl: KLOptions = KLOptions()
        """The penalty for leaving the initial policy."""
        correction: CorrectionOptions | None = None
        """Weights against the difference between sampler and learner; null is none."""
        entropy_coef: NotNegative = 0.0
        """Weight of the policy's entropy, which is then maximised."""
        mask_truncated: bool = False
        """Leave completions that were cut at the limit out of the loss (they stay in the baseline)."""
        reward_norm: Literal["none", "group"] = "none"
        """group: each reward relative to its group's mean and the sample's deviation, before the weighted sum."""
        reward_clip: tuple[float, float] | None = None
        """Bounds of the weighted sum, before penalties are added; null is none."""
        dynamic_sampling: DynamicSamplingOptions | None = None
        """Replace groups without a signal; null trains on all sampled groups."""

        @model_validator(mode="after")
        def _check(self) -> PolicyGradient.Config:
            if self.length_norm is not None and self.aggregation != "seq-mean-token-sum-norm":
                raise ValueError("length_norm goes with aggregation: seq-mean-token-sum-norm")
            if self.reward_clip is not None and self.reward_clip[0] >= self.reward_clip[1]:
                raise ValueError(f"reward_clip must be [low, high], low less than high, not {list(self.reward_clip)}")
            return self

    config: Config

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if not issubclass(cls.Config, PolicyGradient.Config):
            what = f"{cls.__qualname__}.Config does not extend PolicyGradient.Config, whose options the frame reads"
            raise TypeError(f"{what}; write class Config(PolicyGradient.Config): ...")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._kl_coef: float = self.config.kl.coef
        self._sequences = self._tokens = 0

    @abstractmethod
    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        """The advantages of a batch.

        Args:
            rewards: (B,) shaped, 0 where invalid.
            kl: B arrays (T_i,) to be taken off the rewards, 0 outside the masks; None if the KL is not in the reward.
        """

    @abstractmethod
    def surrogate(self, tokens: PackedTokens) -> TokenLoss:
        """The policy's loss, as the functions in ``mmrl.ops.surrogate`` give it."""

    def needs(self) -> Needs:
        config = self.config
        dynamic = config.dynamic_sampling
        return Needs(
            reference_logprobs=config.kl.coef > 0,
            old_logprobs=config.kl.coef > 0 and config.kl.where == "reward",
            min_group_size=max(self.min_group_size, 2 if dynamic or config.reward_norm == "group" else 1),
            greedy_rollout=self.greedy_rollout,
            entropy_gradient=config.entropy_coef > 0,
            refill=None if dynamic is None else Refill(dynamic.max_rounds, dynamic.on_starvation),
        )

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation(self.config.aggregation, self.config.length_norm)

    def check(self, run: RunFacts) -> Sequence[str]:
        return (*self._check_selection(run), *self._check_lag(run))

    def _check_selection(self, run: RunFacts) -> Iterator[str]:
        if self.config.dynamic_sampling is None:
            return
        metric = self.config.dynamic_sampling.metric or run.rewards[0]
        if not run.has_component(metric):
            raise ValueError(f"dynamic_sampling.metric is {metric!r}, and the rewards are {', '.join(run.rewards)}")
        if metric != run.accuracy:
            yield f"dynamic_sampling selects by {metric!r}, and accuracy is {run.accuracy!r}"

    def _check_lag(self, run: RunFacts) -> Iterator[str]:
        """Warnings of what is learned from tokens that older weights have sampled."""
        if not run.is_behind:
            return
        if self.config.correction is None:
            yield (
                "older weights sample what is learned, and without correction the gradient is biased by it; "
                "set correction: {mode: token-truncate}, or seq-truncate for whole completions"
            )
        for view in (view for view in self.needs().views if view.sampled):
            yield f"older weights sample, and correction leaves alone what is sampled from view {view.name!r}"

    def select(self, groups: Sequence[ScoredGroup]) -> Sequence[bool]:
        """Keeps a group if two valid completions differ in the raw metric: by range, not by standard deviation."""
        assert self.config.dynamic_sampling is not None
        name = self.config.dynamic_sampling.metric

        def mixed(group: ScoredGroup) -> bool:
            scores = [group.component(name)] if name else []
            scores += group.components.values()
            values = next((each for each in scores if not np.isnan(each[group.valid]).any()), scores[0])
            return bool(mixed_groups(values, np.zeros(len(values), int), group.valid).any())

        return [mixed(group) for group in groups]

    def credit(self, batch: Batch) -> Credit:
        config, metrics = self.config, dict[str, float]()
        rewards_B = shaped_rewards(batch, clip=config.reward_clip, normalise=config.reward_norm == "group")
        kl = None
        if config.kl.coef and config.kl.where == "reward":
            assert batch.old_logprobs is not None
            assert batch.reference_logprobs is not None
            masks = valid_masks(batch)
            kl = token_kl(batch.old_logprobs, batch.reference_logprobs, masks)
            metrics["kl/reference"] = sum(kl_T.sum() for kl_T in kl) / max(sum(mask.sum() for mask in masks), 1)
            kl = [self._kl_coef * kl_T for kl_T in kl]
            self._count(masks)
        credit = self.advantages(batch, rewards_B, kl)
        keep_B = batch.valid if credit.keep is None else batch.valid & credit.keep
        if config.mask_truncated:
            keep_B = keep_B & ~batch.truncated
        if kl is None:
            self._count(valid_masks(batch, keep_B))
        constants = {**credit.constants, "kl_coef": self._kl_coef}
        return replace(credit, keep=keep_B, metrics={**metrics, **credit.metrics}, constants=constants)

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        from mmrl.ops.correction import correction_metrics, correction_weights
        from mmrl.ops.kl import kl_per_token

        config = self.config
        result = self.surrogate(tokens)
        log_ratio_T = (tokens.logprobs_T - tokens.old_logprobs_T).detach()
        metrics = {
            **result.metrics,
            "policy/ppo_kl": -log_ratio_T,
            "policy/ppo_kl_k3": log_ratio_T.clamp(max=20.0).exp() - 1 - log_ratio_T,
        }
        loss_T, terms = result.loss_T, {}
        if config.correction is not None:
            options = config.correction
            weight_T, raw_T = correction_weights(tokens, options.mode, low=options.low, high=options.high)
            loss_T = weight_T * loss_T
            metrics |= correction_metrics(tokens, weight_T, raw_T)
        terms["policy"] = loss_T
        if config.kl.coef and config.kl.where == "loss":
            assert tokens.reference_logprobs_T is not None
            estimator = config.kl.estimator or config.kl.loss_estimator
            kl_T = kl_per_token(estimator, tokens.logprobs_T, tokens.reference_logprobs_T, tokens.old_logprobs_T)
            terms["kl"] = tokens.constants["kl_coef"] * kl_T
            loss_T = loss_T + terms["kl"]
            metrics["kl/reference"] = kl_T
        if config.entropy_coef:
            terms["entropy"] = -config.entropy_coef * tokens.entropy_T
            loss_T = loss_T + terms["entropy"]
        return TokenLoss(loss_T, terms, metrics, result.sequence_metrics)

    def observe(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Adds ``kl/coef``, which this step had, and ``correction/ess``; then steers the coefficient."""
        from mmrl.ops.kl import adapted_coefficient

        further, kl = dict[str, float](), self.config.kl
        if (square := metrics.get("correction/weight_square_mean")) is not None:
            further["correction/ess"] = metrics["correction/weight_mean"] ** 2 / square if square else 0.0
        if kl.coef:
            further["kl/coef"] = self._kl_coef
        if kl.target is not None and "kl/reference" in metrics and self._sequences:
            scale = self._tokens / self._sequences if kl.unit == "sequence" else 1.0
            self._kl_coef = adapted_coefficient(
                self._kl_coef,
                metrics["kl/reference"] * scale,
                target=kl.target,
                horizon=kl.horizon,
                num_sequences=self._sequences,
            )
        return further

    def state(self) -> Mapping[str, Any]:
        """The coefficient of the KL, if it is steered."""
        return {} if self.config.kl.target is None else {"kl_coef": self._kl_coef}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._kl_coef = float(state["kl_coef"])

    def _count(self, masks: Sequence[BoolArray]) -> None:
        """Remember how many sequences and tokens the step's KL is a mean of."""
        lengths = [int(np.count_nonzero(mask)) for mask in masks]
        self._sequences, self._tokens = int(np.count_nonzero(lengths)), sum(lengths)


class GroupRelative(PolicyGradient):
    """Base of algorithms whose advantages are ``A_i = (R_i - mean(R)) / (std(R) + eps)`` over the prompt's rewards."""

    min_group_size = 2

    class Config(StdOptions, PolicyGradient.Config):
        """The options of these advantages."""

    config: Config

    def advantages(self, batch: Batch, rewards: FloatArray, kl: Sequence[FloatArray] | None) -> Credit:
        rewards = less_sequence_kl(rewards, kl)
        return Credit(group_advantages(rewards, batch.group_ids, batch.valid, **self.config.std))


def off_policy_warning(run: RunFacts, remedy: str) -> Sequence[str]:
    """A warning for surrogates without a ratio, where a rollout batch is used for several updates."""
    if run.updates_per_batch == 1:
        return ()
    return [f"{run.updates_per_batch} updates per rollout batch, and the loss has no ratio for it: {remedy}"]
