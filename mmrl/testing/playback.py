"""``replay``: an algorithm on recorded numbers, through a run's own code but without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.engine_api import Learner, Network, NetworkFiles, UpdateResult, Way
from mmrl.errors import contract_error, plugin_errors
from mmrl.interfaces import Algorithm, Needs, served_needs
from mmrl.plugin_host import registry
from mmrl.testing.recorded import read_batch
from mmrl.testing.trees import read_trees
from mmrl.token_columns import COLUMNS, CRITIC, POLICY, REWARD
from mmrl.types import (
    Batch,
    BoolArray,
    EncodedPrompt,
    FloatArray,
    IntArray,
    Prompt,
    Rollout,
    RolloutGroup,
    Sample,
    ScoredGroup,
    Segment,
    TrainingRow,
)

if TYPE_CHECKING:
    import torch


PROMPT = EncodedPrompt(prompt=Prompt("", ()), text="", token_ids=np.zeros(1, np.int32), images=())
"""The prompt of all rows."""


@dataclass(frozen=True, slots=True)
class Replay:
    """An algorithm's results on a batch.

    Attributes:
        advantages: (B,) or (B, T), as the algorithm gives them; 0 outside the mask.
        loss: The optimizer step's loss.
        grad_log_probs: (B, T) gradient of the loss with respect to the current log-probs.
        grad_entropy: (B, T) likewise for the entropy; a run has it only with ``Needs.entropy_gradient``.
        grad_scores: (B,) likewise for the scores of an algorithm whose network is a reward model; zeros for others.
        sequence_weights: (B,) weights; 0 for rows that are invalid, fully masked or not kept.
        metrics: Metrics of ``credit`` and ``loss``, reduced over the batch.
        grad_views: By view, (B, T) gradients with respect to its ``log_probs`` and its ``entropy``.
        returns: (B, T) that a critic learns, 0 outside the mask and in invalid rows; zeros without a critic.
        value_loss: The loss of the critic's optimizer step.
        grad_values: (B, T) gradient of that with respect to ``vpreds``; zeros without a critic.
    """

    advantages: FloatArray
    loss: float
    grad_log_probs: FloatArray
    grad_entropy: FloatArray
    sequence_weights: FloatArray
    metrics: Mapping[str, float]
    grad_views: Mapping[str, Mapping[str, FloatArray]] = field(default_factory=dict)
    grad_scores: FloatArray = field(default_factory=lambda: np.zeros(0))
    returns: FloatArray = field(default_factory=lambda: np.zeros(0))
    value_loss: float = 0.0
    grad_values: FloatArray = field(default_factory=lambda: np.zeros(0))


def replay(
    algorithm: str | type[Algorithm] | Algorithm,
    batch: Mapping[str, Any],
    *,
    options: Mapping[str, Any] | None = None,
    ranks: int = 1,
    microbatches: int = 1,
    dtype: str = "float64",
) -> Replay:
    """Run an algorithm on one batch through the real packing, weighting and loss code.

    ``select`` is not called; groups may be split to fill the micro-batches, unless they stay whole. Garbage in masked
    places, and in the rewards of invalid rows, changes nothing. ``observe`` is called with the metrics, as after a
    step. Another instance computes ``loss``, as other processes do in a run with several ranks: numbers that it needs
    from ``credit`` or ``observe`` go through ``Credit.constants``.

    Args:
        algorithm: A registered name, a class, or an algorithm.
        batch: Response-only arrays, right-padded: ``group_ids`` (B,), ``rewards`` (B,), ``response_mask``,
            ``log_probs`` and ``rollout_log_probs`` (B, T). Optional: ``reward_valid``, ``greedy_rewards`` and
            ``truncated`` (B,), ``old_log_probs`` and ``ref_log_probs`` (B, T; without them as in a run that does not
            compute them), ``entropy`` (B, T; zeros without it), ``max_len``, the default of the length constant.
            Several rewards: ``components``, from names to (B,), NaN for None; ``weights`` (from names to numbers, 1
            without it); ``penalties`` (names); ``greedy_components`` (from names to (B,)). ``rewards`` may then be
            left out, and is the weighted sum; without ``components`` it is the one called ``reward``. Episodes:
            ``turns`` (B, T), and for each row a sequence of its turns' ``turn_rewards`` and ``turn_states``; their
            trees: ``parents`` and ``shared_tokens`` (B,), as in ``BranchedRows``. ``token_rewards`` (B, T), what
            rewards say of parts of texts. ``given`` and ``recalled`` (B,), True for demonstrations and for rollouts of
            earlier steps. Views: ``views``, from names to ``log_probs`` and ``entropy`` (B, T), of the rows that
            ``has_images`` (B,), all without it; ``sampled_from``, the name of each row's view, empty for its prompt's
            own images. Comparisons: ``rewards`` are the dataset's scores, and rows of a pair have one of
            ``group_ids``. An algorithm whose network is a reward model takes ``scores`` (B,), the network's, in place
            of log-probs, and may do without ``response_mask``: each completion has then one token. A critic:
            ``values`` before the step and ``vpreds``, its current ones, (B, T); with ``Needs.last_state``
            ``final_values`` (B,); ``pretrains``, True where the critic alone learns. ``mismatched_log_probs`` and
            ``mismatched_ref_log_probs``, of each row's prompt with another row's completion: (B,) sums over its
            tokens, or (B, T') of them, where NaN is padding; NaN alone is a row without one. Other keys mean nothing,
            unless they are nearly one of these.
        options: The algorithm's options, if it is given by name or class.
        ranks: Simulated ranks.
        microbatches: Micro-batches of each rank.
        dtype: Precision of the loss: ``float64`` or ``float32``.

    Raises:
        ConfigError: The options do not fit.
        DataError: The batch lacks what the algorithm needs, or its arrays do not fit.
        PluginError: No such algorithm, or one of its hooks raised or broke its contract.
    """
    algorithm = registry.given("algorithm", algorithm, options)
    with plugin_errors(algorithm, "__init__"):
        learner = type(algorithm)(algorithm.config)
    return play(algorithm, learner, batch, ranks * microbatches, dtype)


def play(
    algorithm: Algorithm, learner: Algorithm, batch: Mapping[str, Any], parts: int = 1, dtype: str = "float64"
) -> Replay:
    """``replay`` with another instance for ``loss``, the learner."""
    from mmrl.step.learn import LearnSettings, finished, learn

    arrays = RecordedBatch(batch, served_needs(algorithm), algorithm.network)
    of_loss = _GivenLogprobs(learner, arrays, parts, dtype)
    settings = LearnSettings(max_tokens=batch.get("max_len"), pretrains=bool(batch.get("pretrains", False)))
    result = finished(learn([arrays.rows], algorithm, of_loss, settings, batch=arrays.batch))
    credit, (group,) = result.credit, result.groups
    critic = of_loss.critic
    per_row = np.ndim(credit.advantages[0]) == 0
    metrics = {**credit.metrics, **of_loss.metrics, **critic.metrics}
    with plugin_errors(algorithm, "observe"):
        observed = algorithm.observe(metrics)
        if not isinstance(observed, Mapping):
            remedy = "return a dict of further metrics, {} where there are none"
            raise contract_error(algorithm, "observe", f"answered {observed!r}", remedy)
    return Replay(
        advantages=np.asarray(credit.advantages, np.float64) if per_row else np.stack(group.advantages),
        loss=of_loss.loss,
        grad_log_probs=of_loss.gradient(of_loss.logprobs_BT),
        grad_entropy=of_loss.gradient(of_loss.entropy_BT),
        sequence_weights=of_loss.weights,
        metrics={**metrics, **observed},
        grad_views={
            view: {key: of_loss.gradient(leaf) for key, leaf in of_view.items()}
            for view, of_view in of_loss.views.items()
        },
        grad_scores=of_loss.gradient(of_loss.scores_B),
        returns=np.stack(group.returns) if group.returns else np.zeros(arrays.logprobs.shape),
        value_loss=critic.loss,
        grad_values=of_loss.gradient(critic.vpreds_BT),
    )


class _GivenLogprobs(Learner, Network):
    """Implements ``Learner`` and its policy: an optimizer step that stops at the gradients of given log-probs.

    Args:
        algorithm: Gives the loss.
        parts: Micro-batches.

    Attributes:
        logprobs_BT: Leaf, the current log-probs.
        entropy_BT: Leaf.
        scores_B: Leaf, the scores of a reward model; it matters to no other network.
        views: Such leaves, given each view, by its name.
        weights: (B,) weights of the rows; 0 for those in no loss.
        loss: The optimizer step's.
        metrics: Likewise.
        critic: The critic; nobody asks it where the algorithm has none.
    """

    def __init__(self, algorithm: Algorithm, arrays: RecordedBatch, parts: int, dtype: str) -> None:
        import torch

        self._algorithm, self._arrays, self._parts = algorithm, arrays, parts
        self.logprobs_BT, self.entropy_BT, self.scores_B = (
            torch.tensor(values, dtype=getattr(torch, dtype), requires_grad=True)
            for values in (arrays.logprobs, arrays.entropy, arrays.scores)
        )
        self.views = {
            name: {
                key: torch.tensor(values, dtype=getattr(torch, dtype), requires_grad=True)
                for key, values in given.items()
            }
            for name, given in arrays.views.items()
        }
        self.weights, self.loss = np.zeros(len(arrays.logprobs)), 0.0
        self.metrics: Mapping[str, float] = {}
        self.critic = _GivenValues(algorithm, arrays, parts, dtype)
        self.networks = {algorithm.network: self, CRITIC: self.critic}

    def score(self, samples: Sequence[Sample], *, way: Way = "packed") -> list[FloatArray]:
        return list(self._arrays.logprobs)

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        """The step's loss and metrics, and the leaves' gradients; no weight moves."""
        import torch

        from mmrl.ops.objective import partial_loss, reduce_partials, score_loss, weighed_loss

        places = {row.sample.key[-1]: row for row in rows}
        partials = []
        for part in _split(places, self._parts):
            seen = [(i, name) for i in part for name in places[i].own_views]
            leaves = (
                torch.cat([*(leaf[i] for i in part), *(self.views[name][key][i] for i, name in seen)])
                for leaf, key in ((self.logprobs_BT, "log_probs"), (self.entropy_BT, "entropy"))
            )
            own = [places[i] for i in part]
            if self._algorithm.network == REWARD:
                partial = weighed_loss(own, *score_loss(self._algorithm, own, self.scores_B[part]))
            else:
                partial = partial_loss(self._algorithm, own, *leaves)
            with plugin_errors(self._algorithm, "loss"):
                partial.loss.backward()
            partials.append(partial)
        for place, row in places.items():
            self.weights[place] = row.weight
        self.loss = float(sum(float(partial.loss.detach()) for partial in partials))
        self.metrics = reduce_partials(partials)
        if self._algorithm.network == REWARD:
            nothing = [np.zeros(0, np.float32) for _ in places]
            return UpdateResult(self.metrics, nothing, nothing, final_values=self._arrays.scores[list(places)])
        logprobs, entropies = ([array[i] for i in places] for array in (self._arrays.logprobs, self._arrays.entropy))
        return UpdateResult(self.metrics, logprobs, entropies)

    def save(self, folder: Path) -> Mapping[str, NetworkFiles]:
        raise AssertionError("there are no weights")

    def gradient(self, leaf: torch.Tensor) -> FloatArray:
        """(B, T) gradient of the loss with respect to a leaf."""
        gradient: FloatArray = np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
        return gradient


class _GivenValues(Network):
    """Implements the critic's ``Network``: an optimizer step that stops at the gradients of given values.

    Attributes:
        vpreds_BT: Leaf, the current values.
        loss: The optimizer step's.
        metrics: Likewise.
    """

    def __init__(self, algorithm: Algorithm, arrays: RecordedBatch, parts: int, dtype: str) -> None:
        import torch

        self._algorithm, self._arrays, self._parts = algorithm, arrays, parts
        self.vpreds_BT = torch.tensor(arrays.vpreds, dtype=getattr(torch, dtype), requires_grad=True)
        self.loss = 0.0
        self.metrics: Mapping[str, float] = {}

    def score(self, samples: Sequence[Sample], *, way: Way = "packed") -> list[FloatArray]:
        raise AssertionError("the batch has its values")

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        """The step's loss and metrics, and the leaf's gradient; no weight moves."""
        import torch

        from mmrl.ops.objective import reduce_partials, value_loss, weighed_loss

        places = {row.sample.key[-1]: row for row in rows}
        partials = []
        for part in _split(places, self._parts):
            own = [places[i] for i in part]
            values_T = torch.cat([self.vpreds_BT[i] for i in part])
            partial = weighed_loss(own, *value_loss(self._algorithm, own, values_T))
            with plugin_errors(self._algorithm, "value_loss"):
                partial.loss.backward()
            partials.append(partial)
        self.loss = float(sum(float(partial.loss.detach()) for partial in partials))
        self.metrics = reduce_partials(partials)
        nothing = [np.zeros(0, np.float32) for _ in places]
        return UpdateResult(self.metrics, nothing, nothing, vpreds=[self._arrays.vpreds[i] for i in places])


class RecordedBatch:
    """A padded batch as a run's records, with its padding, since masked tokens must not matter.

    It holds copies, which an algorithm may spoil.

    Attributes:
        logprobs: (B, T) the current log-probs.
        entropy: (B, T).
        scores: (B,) those of a reward model.
        vpreds: (B, T) the current values of a critic.
        rows: The rows in their order, as if they were one group.
        batch: The same as ``Algorithm.credit`` sees them, with the ids of their groups.
        views: By name, (B, T) ``log_probs`` and ``entropy`` given a view.
    """

    def __init__(self, batch: Mapping[str, Any], needs: Needs, network: str = POLICY) -> None:
        arrays = read_batch(batch, needs, network)
        masks = list(arrays["response_mask"])
        self.scores: FloatArray = arrays.get("scores", np.zeros(len(masks)))
        self.logprobs = arrays["log_probs"]
        self.entropy = arrays.get("entropy", np.zeros_like(self.logprobs))
        self.vpreds = arrays.get("vpreds", np.zeros_like(self.logprobs))
        columns: dict[str, Any] = {
            column.name: list(arrays[column.replayed]) if column.replayed in arrays else None
            for column in COLUMNS
            if column.known in ("sampled", "before the step")
        }
        self.views: Mapping[str, Mapping[str, FloatArray]] = arrays["views"]
        names = {*self.views, *filter(None, arrays["sampled_from"])}
        seen = replace(PROMPT, views=dict.fromkeys(names, PROMPT))
        prompts = [seen if has_images else PROMPT for has_images in arrays.get("has_images", [True] * len(masks))]
        sampled = zip(masks, arrays["rollout_log_probs"], strict=True)
        rollouts = [
            replace(_rollout(row, *each), prompt=prompt, view=view)
            for row, (each, prompt, view) in enumerate(zip(sampled, prompts, arrays["sampled_from"], strict=True))
        ]
        group = RolloutGroup(PROMPT, tuple(rollouts))
        truncated = arrays.get("truncated", np.zeros(len(masks), bool))
        self.rows = ScoredGroup(group, arrays["rewards"], arrays["reward_valid"], arrays["components"])
        self.batch = Batch(
            rewards=arrays["rewards"],
            valid=arrays["reward_valid"],
            group_ids=arrays["group_ids"],
            masks=masks,
            truncated=truncated,
            components=arrays["components"],
            **columns,
            weights=arrays["weights"],
            penalties=arrays["penalties"],
            greedy_components=arrays.get("greedy_components"),
            final_values=np.where(truncated, arrays["final_values"], 0.0) if "final_values" in arrays else None,
            turns=None if "turns" not in arrays else list(arrays["turns"]),
            turn_rewards=arrays.get("turn_rewards"),
            turn_states=arrays.get("turn_states"),
            sampled_from=arrays["sampled_from"] if any(arrays["sampled_from"]) else None,
            given=arrays.get("given"),
            recalled=arrays.get("recalled"),
            token_rewards=list(arrays["token_rewards"]) if "token_rewards" in arrays else None,
            branches=read_trees(arrays),
            **arrays["mismatched"],
        )


def _rollout(row: int, mask: BoolArray, logprobs: FloatArray) -> Rollout:
    """A completion whose segments alternate where the mask does."""
    segments, start = [], 0
    for by_policy, run in groupby(mask.tolist()):
        end = start + len(list(run))
        ids: IntArray = np.zeros(end - start, np.int32)
        segments.append(Segment(ids, by_policy, logprobs[start:end]))
        start = end
    return Rollout(PROMPT, tuple(segments), row, "", "stop", 0)


def _split(rows: Mapping[int, TrainingRow], parts: int) -> list[list[int]]:
    """Places of each micro-batch; groups that stay whole do."""
    bundles: dict[tuple[bool, int], list[int]] = {}
    for place, row in rows.items():
        bundles.setdefault((row.whole_group, row.group if row.whole_group else place), []).append(place)
    shares = (list(bundles.values())[i::parts] for i in range(parts))
    return [[place for bundle in share for place in bundle] for share in shares if share]
