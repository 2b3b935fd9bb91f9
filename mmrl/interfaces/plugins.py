"""The interfaces of algorithms and trackers, and what all plugins have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict

from mmrl.errors import contract_error, plugin_errors
from mmrl.interfaces.needs import Needs
from mmrl.token_columns import POLICY
from mmrl.types import (
    Batch,
    Branch,
    Credit,
    Experience,
    PackedTokens,
    Prompt,
    Rollout,
    ScoredGroup,
    TokenLoss,
)

API_VERSION = 1
"""Version of the plugin interfaces; raised when a change breaks plugins."""

SourceName = Literal["rollouts", "demonstrations", "comparisons"]
"""Where a step's groups come from; see ``Algorithm.source``."""

NetworkName = Literal["policy", "reward"]
"""The network that is trained; see ``Algorithm.network``."""

AggregationMode = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean-token-mean"
]

KLEstimator = Literal["k1", "k2", "k3", "k3+", "k3_is", "abs", "mse", "low_var_kl"]
CorrectionMode = Literal[
    "token-truncate", "token-mask", "seq-truncate", "seq-mask", "seq-geo-truncate", "seq-geo-mask", "seq-geo-reject"
]

CORRECTION_BOUNDS: Mapping[CorrectionMode, tuple[float | None, float]] = {
    "token-truncate": (None, 2.0),
    "token-mask": (0.5, 5.0),
    "seq-truncate": (None, 2.0),
    "seq-mask": (None, 3.0),
    "seq-geo-truncate": (None, 2.0),
    "seq-geo-mask": (0.5, 2.0),
    "seq-geo-reject": (0.99, 1.01),
}
"""Default bounds, lower and upper, of the weights of each correction; None is no bound."""


class PluginConfig(BaseModel):
    """Base of every plugin's options: frozen, and unknown options are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Plugin(ABC):  # noqa: B024 - the kinds of plugins add the abstract methods
    """Base of everything that an entry point can name.

    Attributes:
        api_version: The interface version that the plugin was written for.
    """

    api_version: ClassVar[int] = API_VERSION

    class Config(PluginConfig):
        """This plugin has no options."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def check(self, run: RunFacts) -> Sequence[str]:
        """Warnings about this plugin in such a run, shown before it starts.

        Raises:
            ValueError: The plugin's options do not go together with the run's.
        """
        return ()


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts that a plugin may need of its run.

    Attributes:
        group_size: Rollouts of each prompt.
        prompts_per_step: Prompts in a rollout batch.
        max_new_tokens: Longest completion.
        updates_per_batch: Optimizer steps on each rollout batch.
        rewards: Names of the rewards' components.
        accuracy: The component that tells right from wrong: ``trainer.eval_metric``, by default the first; None without
            rewards.
        evaluations: The same for each evaluation set that has a name; empty where there is only one, without a name.
        staleness: Steps by which the weights that sample are behind those that learn.
        partial: True if rollouts are sampled in parts, under the weights of several steps.
    """

    group_size: int
    prompts_per_step: int
    max_new_tokens: int
    updates_per_batch: int
    rewards: tuple[str, ...]
    accuracy: str | None = None
    evaluations: Mapping[str, str] = field(default_factory=dict)
    staleness: int = 0
    partial: bool = False

    @property
    def is_behind(self) -> bool:
        """True if older weights than those that learn have sampled some tokens."""
        return self.staleness > 0 or self.partial

    @property
    def judges(self) -> dict[str, str | None]:
        """``accuracy`` of each evaluation set, by the part of its metrics' names that stands before their own:
        ``NAME/`` in ``eval/NAME/accuracy``, and nothing in ``eval/accuracy``."""
        return {f"{name}/": judge for name, judge in self.evaluations.items()} or {"": self.accuracy}

    def has_component(self, name: str) -> bool:
        """True for a reward's component, and for a name that may be one of a reward's several: ``<reward>/<name>``."""
        return any(name == reward or name.startswith(f"{reward}/") for reward in self.rewards)


@dataclass(frozen=True, slots=True)
class Aggregation:
    """The rule that makes one number of per-token losses; see ``mmrl.ops.aggregation``.

    Attributes:
        mode: One of the five modes.
        constant: The length constant of ``seq-mean-token-sum-norm``; None is the run's ``sampler.max_new_tokens``.
    """

    mode: AggregationMode
    constant: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(AggregationMode):
            raise ValueError(f"no aggregation mode {self.mode!r}; there are {', '.join(get_args(AggregationMode))}")
        if self.constant is not None and (self.mode != "seq-mean-token-sum-norm" or self.constant <= 0):
            raise ValueError(f"only seq-mean-token-sum-norm has a length constant, above 0, not {self.constant}")

    def with_default(self, constant: float | None) -> Aggregation:
        """This aggregation, with this length constant if it needs one and has none."""
        missing = self.mode == "seq-mean-token-sum-norm" and self.constant is None
        return Aggregation(self.mode, constant) if missing else self


class Algorithm(Plugin):
    """A learning rule: the source of data, the credit, and the loss."""

    @property
    def source(self) -> SourceName:
        """The source of a step's groups; a class attribute or a property, constant for a run.

        ``rollouts`` samples completions from the policy and scores them. ``demonstrations`` takes the dataset's own
        completions, each a group of one with reward 0, to which ``credit`` gives an advantage. ``comparisons`` takes
        the dataset's candidates: groups that nobody sampled, whose rewards are the dataset's scores.
        """
        return "rollouts"

    @property
    def network(self) -> NetworkName:
        """The network that the algorithm trains; a class attribute or a property, constant for a run.

        ``policy`` is the model that samples. ``reward`` is a reward model: the model's body with a score in place of
        its head, trained alone, on ``comparisons`` and with ``Needs(last_state=True)``. ``PackedTokens.final_values_N``
        has its scores. It has neither log-probs nor entropies, which are 0.
        """
        return "policy"

    def needs(self) -> Needs:
        """The algorithm's needs; constant for a run."""
        return Needs()

    @property
    @abstractmethod
    def aggregation(self) -> Aggregation:
        """The weighing of the per-token loss."""

    def check_rows(self, rows: Iterable[Prompt]) -> Sequence[str]:
        """Warnings about the training rows, shown by `mmrl check` and at the start of a run.

        Not called in a run that reads its rows as it reaches them.

        Args:
            rows: All rows that can be used, each read when it is asked for.

        Raises:
            ValueError: The algorithm cannot learn from them.
        """
        return ()

    def select(self, groups: Sequence[ScoredGroup]) -> Sequence[bool]:
        """One bool for each group: True keeps it, False has it replaced. Called only with ``Needs.refill``.

        With ``trainer.staleness`` another thread calls it while a step learns: it must depend on the groups alone.
        """
        return [True] * len(groups)

    def retry(self, group: ScoredGroup) -> Prompt | None:
        """A prompt to sample once more in place of a group that ``select`` rejects; None takes the next row's.

        Called only with ``Needs.refill``, for each rejected group while there are rounds left. It must depend on the
        group alone, as ``select``.

        Args:
            group: The rejected one. ``group.group.prompt.prompt`` is its row; its ``retries`` counts the groups of this
                prompt that this step has rejected before.

        Returns:
            The row with other ``messages``, such as with a hint from its ``answer``: its id and the number of
            ``<image>`` stay. Its completions have seeds of their own.
        """
        return None

    def remember(self, group: ScoredGroup) -> Sequence[int]:
        """Members that the run keeps for the group's prompt; only with ``Needs.experience``.

        Called for each group as it was sampled and scored, before ``select``. Of one prompt the newest
        ``Needs.experience`` rollouts are kept.

        Returns:
            Their places in the group, the oldest first. Only valid ones can be kept.
        """
        return ()

    def recall(self, group: ScoredGroup, kept: Sequence[Experience]) -> Mapping[int, int]:
        """Members of a group whose places kept rollouts take; only with ``Needs.experience``.

        Called for each group that was sampled, before ``select``, if rollouts of its prompt are kept. The members
        leave the step, and ``select`` and ``credit`` see the others.

        Args:
            kept: The oldest first, of earlier groups, with the tokens and the log-probs of the weights that sampled
                them. A group whose prompt has other tokens (``retry``) has none of theirs.

        Returns:
            Places in ``kept`` by the member's place in the group; each at most once.
        """
        return {}

    def branch(self, group: Sequence[Rollout], number: int) -> Sequence[Branch]:
        """The places from which further episodes of a group go on. Called only with ``Needs.branches``, once in each
        round, and not where the environment has failed at every reset.

        A new episode has the turns, tokens and log-probs of its parent before the turn, the limits of whole episodes,
        and an environment that is played again up to there. One place may be named more than once.
        ``Branch(member, 0)`` begins anew.

        With ``trainer.staleness`` another thread calls it while a step learns: it must depend on the group alone. What
        is random follows from ``mmrl.ops.branching.generator(group)``; ``places(group)`` there has all answers.

        Args:
            group: The group's episodes so far, all over, in their order: those of earlier rounds too. Their rewards are
                not known yet, but for what the environment has scored (``Rollout.components``, and of each turn
                ``Rollout.episode``).
            number: How many are asked for.

        Returns:
            So many places. ``turn`` is that of a turn of the member, also of one that the environment failed to answer;
            or 0, whichever member.
        """
        raise NotImplementedError(f"{type(self).__name__} asks for no branches")

    @abstractmethod
    def credit(self, batch: Batch) -> Credit:
        """Assign advantages, with the whole rollout batch of all ranks in view (numpy, no gradient)."""

    @abstractmethod
    def loss(self, tokens: PackedTokens) -> TokenLoss:
        """The unreduced loss of each packed token, in float32; weights and sums are the framework's.

        Other processes compute it, with instances of their own: they lack all that ``credit`` or ``observe`` set on
        ``self``. Numbers that it needs from them go through ``Credit.constants``.
        """

    def value_loss(self, tokens: PackedTokens) -> TokenLoss:
        """The unreduced loss of the critic at each packed token, in float32; only with ``Needs.values``.

        ``values_T`` are the critic's, with gradient, ``old_values_T`` those before the step, and ``returns_T`` what
        ``Credit.returns`` says. Tokens in the loss are those that the policy wrote in valid rows, whatever
        ``Credit.keep`` leaves of them for the policy, and their loss is averaged whatever ``aggregation`` says. As
        ``loss``, other processes compute it.
        """
        raise NotImplementedError(f"{type(self).__name__} asks for no critic")

    def observe(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Look at a step's metrics when it is done, on the driver; returns further ones."""
        return {}

    def state(self) -> Mapping[str, Any]:
        """The state that steps have changed in this object, on the driver; each checkpoint keeps it.

        It must be JSON with finite numbers; texts that look like secrets are replaced.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the ``state`` of the run that goes on; called only if it is not empty."""
        raise NotImplementedError(f"{type(self).__name__} has a state and does not restore it")


def roles_of(algorithm: Algorithm) -> tuple[str, ...]:
    """The roles of the networks that a run of an algorithm has, the trained one first."""
    return algorithm.needs().roles if algorithm.network == POLICY else (algorithm.network,)


def served_needs(algorithm: Algorithm) -> Needs:
    """An algorithm's ``needs``.

    Raises:
        PluginError: It fails, or has needs that do not fit its network.
    """
    with plugin_errors(algorithm, "needs"):
        needs = algorithm.needs()
        if found := _misfit(algorithm, needs):
            raise contract_error(algorithm, "needs", *found)
    return needs


def _misfit(algorithm: Algorithm, needs: Needs) -> tuple[str, str] | None:
    """A clause on a need that the network of the algorithm does not serve, and its remedy; None if all fit."""
    if algorithm.network not in get_args(NetworkName):
        names = ", ".join(get_args(NetworkName))
        return f"trains a network {algorithm.network!r}", f"let its network be one of {names}"
    if algorithm.network == POLICY:
        return _misfit_of_policy(algorithm, needs)
    if algorithm.source != "comparisons" or not needs.last_state:
        return (
            "trains a reward model on something else than whole conversations to compare",
            "let its source be 'comparisons', and ask for Needs(last_state=True)",
        )
    if asked := needs.of_a_policy:
        return f"asks for {', '.join(asked)}, which a reward model has not", "do without, or train the policy"
    return None


def _misfit_of_policy(algorithm: Algorithm, needs: Needs) -> tuple[str, str] | None:
    """As ``_misfit``, of an algorithm that trains the policy."""
    if needs.last_state and not needs.values:
        remedy = "let its network be 'reward', ask for values too, or do without"
        return "asks for last_state, and a policy has no score head", remedy
    if algorithm.source != "rollouts" and (asked := needs.of_sampling):
        remedy = "let it learn from rollouts, or do without"
        return f"asks for {', '.join(asked)}, and its source is {algorithm.source}", remedy
    if needs.values and type(algorithm).value_loss is Algorithm.value_loss:
        what = "asks for values and has no value_loss, so its critic would learn nothing"
        return what, "write value_loss(self, tokens), or do without values"
    if needs.experience:
        return _misfit_of_experience(algorithm, needs)
    return _misfit_of_branches(algorithm, needs)


def _misfit_of_experience(algorithm: Algorithm, needs: Needs) -> tuple[str, str] | None:
    """As ``_misfit``, of an algorithm that has rollouts kept."""
    for name in ("remember", "recall"):
        if getattr(type(algorithm), name) is getattr(Algorithm, name):
            return f"asks for experience and has no {name}, so nothing would come of it", f"write {name}, or do without"
    if needs.branches is not None:
        return "asks for experience, whose places others may go on from, and for branches", "do without one of them"
    if any(view.sampled for view in needs.views):
        return "asks for experience, and samples from a view of one step alone", "do without one of them"
    return None


def _misfit_of_branches(algorithm: Algorithm, needs: Needs) -> tuple[str, str] | None:
    """As ``_misfit``, of an algorithm that trains the policy."""
    if needs.branches is None:
        return None
    if algorithm.source != "rollouts":
        return f"asks for branches, and its source is {algorithm.source}", "let it learn from rollouts, or do without"
    if needs.experience:
        what = "asks for branches and experience: others have gone on from a member whose place a kept rollout takes"
        return what, "do without one of them"
    if type(algorithm).branch is Algorithm.branch:
        return "asks for branches and does not say where they begin", "write branch(self, group, number), or do without"
    return None
