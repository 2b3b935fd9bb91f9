"""The checks of algorithms: each rule is broken once, and the error says which one, where, and what to do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mmrl.config.load import from_mapping
from mmrl.errors import ConfigError, PluginError
from mmrl.interfaces import Aggregation, Algorithm, Needs, PluginConfig, Refill
from mmrl.ops.credit import group_advantages
from mmrl.policy_gradient import GroupRelative, PolicyGradient
from mmrl.rollout.batch import batch_of
from mmrl.runs.setup import RunSetup
from mmrl.testing import check_algorithm, make_rollouts, replay
from mmrl.testing.rollouts import scored_groups
from mmrl.types import Candidate, Credit, Message, Prompt, TokenLoss


class Good(Algorithm):
    """A policy gradient that keeps every rule; each fault below is a subclass."""

    class Config(PluginConfig):
        scale: float = 1.0

    @property
    def aggregation(self):
        return Aggregation("token-mean")

    def credit(self, batch):
        return Credit(self.config.scale * group_advantages(batch.rewards, batch.group_ids, batch.valid))

    def loss(self, tokens):
        loss_T = -tokens.advantages_T * tokens.logprobs_T
        return TokenLoss(loss_T, {"policy": loss_T}, {"policy/surprise": -tokens.logprobs_T.detach()})


class LooksAtInvalidRewards(Good):
    def credit(self, batch):
        return Credit(np.where(batch.valid, batch.rewards - batch.rewards.mean(), 0.0))


class CreditsInvalidRows(Good):
    def credit(self, batch):
        return Credit(batch.rewards - 0.5)


class TakesNeighboursForGroups(Good):
    def credit(self, batch):
        return Credit(np.where(batch.valid, batch.rewards - 0.5 * (np.arange(len(batch.rewards)) % 2), 0.0))


class TakesIdsForPlaces(Good):
    def credit(self, batch):
        return Credit(np.where(batch.valid, batch.rewards * batch.group_ids, 0.0))


class CountsMaskedTokens(Good):
    def loss(self, tokens):
        import torch

        lengths = torch.bincount(tokens.sequence_T)[tokens.sequence_T]
        return TokenLoss(-tokens.advantages_T * tokens.logprobs_T / lengths)


class AveragesOverTheMicroBatch(Good):
    def loss(self, tokens):
        mean = tokens.logprobs_T[tokens.mask_T].mean()
        return TokenLoss(-tokens.advantages_T * (tokens.logprobs_T - mean))


class DrawsNumbers(Good):
    def credit(self, batch):
        return Credit(np.random.default_rng().normal(size=len(batch.rewards)))


class Remembers(Good):
    calls: list[int] = []  # noqa: RUF012 - the fault that is looked for

    def credit(self, batch):
        self.calls.append(1)
        return Credit(np.full(len(batch.rewards), float(len(self.calls))))


class SpoilsItsBatch(Good):
    def credit(self, batch):
        rewards = batch.rewards
        rewards -= 0.5
        return super().credit(batch)


class SpoilsAComponent(Good):
    def credit(self, batch):
        batch.components["reward"][:] = 0.0
        return super().credit(batch)


class UsesAReferenceThatItDidNotAskFor(Good):
    def loss(self, tokens):
        return TokenLoss(tokens.advantages_T * (tokens.logprobs_T - tokens.reference_logprobs_T))


class UsesOldLogprobsThatItDidNotAskFor(Good):
    def credit(self, batch):
        return Credit([old * mask for old, mask in zip(batch.old_logprobs, batch.masks, strict=True)])


class UsesGreedyRewardsThatItDidNotAskFor(Good):
    def credit(self, batch):
        return Credit(np.where(batch.valid, batch.rewards - batch.greedy_components["reward"], 0.0))


class Detaches(Good):
    def loss(self, tokens):
        return TokenLoss(-tokens.advantages_T * tokens.logprobs_T.detach())


class LearnsNothing(Good):
    def loss(self, tokens):
        return TokenLoss(0.0 * tokens.logprobs_T)


class Overflows(Good):
    def loss(self, tokens):
        return TokenLoss(-tokens.advantages_T * (tokens.logprobs_T - tokens.old_logprobs_T).exp())


class LogsTheMeanOfNothing(Good):
    def credit(self, batch):
        with np.errstate(invalid="ignore"):
            mean = float(batch.rewards[batch.valid].sum() / np.float64(np.count_nonzero(batch.valid)))
        return Credit(super().credit(batch).advantages, metrics={"reward/kept": mean})


class LogsText(Good):
    def observe(self, metrics):
        return {"verdict": "fine"}


class TakesTheBestOfNothing(Good):
    def credit(self, batch):
        return Credit(np.where(batch.valid, batch.rewards - batch.rewards[batch.valid].max(), 0.0))


class ReducesItsLoss(Good):
    def loss(self, tokens):
        return TokenLoss((-tokens.advantages_T * tokens.logprobs_T).mean())


class CreditsOneRowTooFew(Good):
    def credit(self, batch):
        return Credit(np.zeros(len(batch.rewards) - 1))


class LosesPerSequence(Good):
    def loss(self, tokens):
        return TokenLoss(-tokens.sequence_mean(tokens.advantages_T * tokens.logprobs_T))


class LosesATensor(Good):
    def loss(self, tokens):
        return -tokens.advantages_T * tokens.logprobs_T


class CreditsAnArray(Good):
    def credit(self, batch):
        return super().credit(batch).advantages


class KeepsPlaces(Good):
    def credit(self, batch):
        return Credit(super().credit(batch).advantages, keep=np.flatnonzero(batch.rewards > 0))


class SumsInFloats(Good):
    def loss(self, tokens):
        import torch

        totals = torch.zeros(tokens.num_sequences).index_add(0, tokens.sequence_T, tokens.logprobs_T)
        return TokenLoss(-tokens.advantages_T * totals[tokens.sequence_T])


class AssignsRewards(Good):
    def credit(self, batch):
        batch.rewards -= batch.rewards.mean()
        return super().credit(batch)


class DividesByTheDeviation(Good):
    def credit(self, batch):
        values = np.zeros(len(batch.rewards))
        for i in np.unique(batch.group_ids):
            rows = (batch.group_ids == i) & batch.valid
            with np.errstate(invalid="ignore"):
                values[rows] = (batch.rewards[rows] - batch.rewards[rows].mean()) / batch.rewards[rows].std()
        return Credit(values)


class RewardsEntropy(Good):
    def loss(self, tokens):
        return TokenLoss(super().loss(tokens).loss_T - 0.1 * tokens.entropy_T)


class KeepsATemperature(Good):
    tau = 1.0

    def credit(self, batch):
        self.tau = float(len(batch.rewards))
        return super().credit(batch)

    def loss(self, tokens):
        return TokenLoss(super().loss(tokens).loss_T / self.tau)


class MakesATemperature(KeepsATemperature):
    @property
    def tau(self):
        return self.made

    @tau.setter
    def tau(self, value):
        self.made = value


class ForgetsToReturn(Good):
    def observe(self, metrics):
        self.seen = metrics


class SelectsUnasked(Good):
    def select(self, groups):
        return [bool(group.rewards.any()) for group in groups]


class AdvantagesInAnArray(PolicyGradient):
    def advantages(self, batch, rewards, kl):
        return group_advantages(rewards, batch.group_ids, batch.valid)

    def surrogate(self, tokens):
        return TokenLoss(-tokens.advantages_T * tokens.logprobs_T)


class SurrogateInATensor(AdvantagesInAnArray):
    def advantages(self, batch, rewards, kl):
        return Credit(super().advantages(batch, rewards, kl))

    def surrogate(self, tokens):
        return -tokens.advantages_T * tokens.logprobs_T


class AggregatesByName(Good):
    aggregation = "token-mean"


class NeedsInWords(Good):
    def needs(self):
        return {"reference_logprobs": True}


class WarnsInOneText(Good):
    def check(self, run):
        return "group_size is small"


class ChecksWithABug(Good):
    def check(self, run):
        return [run.group_sizes]


class Selects(Good):
    def needs(self):
        return Needs(refill=Refill(), greedy_rollout=True, reference_logprobs=True, old_logprobs=True)

    def select(self, groups):
        return [bool(group.valid.any()) and group.greedy.rewards[0] >= 0 for group in groups]


class SelectsPlaces(Selects):
    def select(self, groups):
        return [index for index, group in enumerate(groups) if group.valid.all()]


class CountsInvalidRewardsAsZero(PolicyGradient):
    """The frame gives rewards that are 0 where invalid; this one takes them for rewards of 0."""

    def advantages(self, batch, rewards, kl):
        advantages = np.zeros(len(rewards))
        for i in np.unique(batch.group_ids):
            rows = batch.group_ids == i
            advantages[rows] = rewards[rows] - rewards[rows].mean()
        return Credit(np.where(batch.valid, advantages, 0.0))

    def surrogate(self, tokens):
        return TokenLoss(-tokens.advantages_T * tokens.logprobs_T)


class WhitensInvalidRows(CountsInvalidRewardsAsZero):
    def advantages(self, batch, rewards, kl):
        return Credit(np.where(batch.valid, (rewards - rewards.mean()) / (rewards.std() + 1e-6), 0.0))


class CountsInvalidRowsInItsScale(CountsInvalidRewardsAsZero):
    def advantages(self, batch, rewards, kl):
        return Credit(group_advantages(rewards, batch.group_ids, batch.valid) / len(rewards))


class LogsAMeanOverInvalidRows(CountsInvalidRewardsAsZero):
    def advantages(self, batch, rewards, kl):
        credit = Credit(group_advantages(rewards, batch.group_ids, batch.valid))
        return Credit(credit.advantages, metrics={"reward/shaped_mean": float(rewards.mean())})


class AveragesMaskedTokens(CountsInvalidRewardsAsZero):
    """Its normaliser counts tokens of the policy and of the environment alike."""

    def advantages(self, batch, rewards, kl):
        lengths = np.array([len(mask) for mask in batch.masks])
        return Credit(group_advantages(rewards, batch.group_ids, batch.valid) / lengths)


class CountsInvalidRowsWhereItIsPlain(Good):
    def credit(self, batch):
        rewards = np.where(batch.valid, batch.rewards, 0.0)
        return Credit(np.where(batch.valid, rewards - rewards.mean(), 0.0))


class SelectsByARangeOfNothing(Selects):
    def select(self, groups):
        return [np.ptp(group.rewards[group.valid]) > 0 for group in groups]


class SelectsByInvalidRewards(Selects):
    def select(self, groups):
        return [bool(np.ptp(group.rewards) > 0) for group in groups]


class SelectsByInvalidValues(Selects):
    def select(self, groups):
        return [bool((group.components["reward"] > 0.2).any()) for group in groups]


@pytest.mark.parametrize(
    ("algorithm", "rule", "remedy"),
    [
        (LooksAtInvalidRewards, "nan where the mask or the row's validity is False", "only where batch.valid"),
        (CreditsInvalidRows, "advantages is finite", "only where batch.valid"),
        (CountsInvalidRewardsAsZero, "leaving invalid rows out changes nothing", "rows where batch.valid alone"),
        (WhitensInvalidRows, "leaving invalid rows out changes nothing", "rows where batch.valid alone"),
        (CountsInvalidRowsInItsScale, "leaving invalid rows out changes nothing", "rows where batch.valid alone"),
        (LogsAMeanOverInvalidRows, "leaving invalid rows out changes nothing", "metric reward/shaped_mean"),
        (CountsInvalidRowsWhereItIsPlain, "leaving invalid rows out changes nothing", "rows where batch.valid alone"),
        (AveragesMaskedTokens, "masked tokens at the end of rows", "count tokens by the mask"),
        (TakesNeighboursForGroups, "another order of rows", "batch.group_ids"),
        (TakesIdsForPlaces, "other ids of groups", "batch.group_ids"),
        (CountsMaskedTokens, "masked tokens at the end of rows", "sequence_mean"),
        (AveragesOverTheMicroBatch, "a split into 1 ranks with 4 micro-batches each", "belong into credit"),
        (DrawsNumbers, "a repetition changes nothing", "no random numbers"),
        (Remembers, "a repetition changes nothing", "no state outside"),
        (SpoilsItsBatch, "credit leaves its batch as it is", "batch.rewards is another afterwards"),
        (SpoilsAComponent, "credit leaves its batch as it is", "batch.components is another afterwards"),
        (UsesAReferenceThatItDidNotAskFor, "there is a result", "Needs(reference_logprobs=True) asks for it"),
        (UsesOldLogprobsThatItDidNotAskFor, "one optimizer step", "Needs(old_logprobs=True) asks for it"),
        (UsesGreedyRewardsThatItDidNotAskFor, "there is a result", "fields that needs() does not ask for"),
        (Detaches, "gave a loss_T without a gradient", "without detaching it"),
        (LearnsNothing, "something is learned", "without detaching it"),
        (Overflows, "loss is finite (rewards of 0 and 1, several optimizer steps; all other", "bound exponents"),
        (LogsTheMeanOfNothing, "every metric is a finite number", "reward/kept: nan"),
        (LogsText, "every metric is a finite number", "verdict: 'fine'"),
        (TakesTheBestOfNothing, "no reward is valid", "zero-size array"),
        (ReducesItsLoss, "loss_T as torch.float64 of shape (), not one value per token", "reduce nothing"),
        (LosesPerSequence, "not one value per token", "of a value per sequence: x[tokens.sequence_T]"),
        (LosesATensor, "loss answered torch.float64 of shape", "return mmrl.types.TokenLoss(loss_T)"),
        (SurrogateInATensor, "there is a result", "return mmrl.types.TokenLoss(loss_T)"),
        (CreditsOneRowTooFew, "float64 of shape (13,), not one entry for each of 14 rows", "also for invalid ones"),
        (CreditsAnArray, "credit answered float64 of shape (14,)", "return mmrl.types.Credit(advantages)"),
        (AdvantagesInAnArray, "there is a result", "return mmrl.types.Credit(advantages)"),
        (KeepsPlaces, "gave keep as int64", "np.isin("),
        (SumsInFloats, "there is a result", "tokens.logprobs_T.new_zeros(n)"),
        (AssignsRewards, "FrozenInstanceError", "make a new array instead"),
        (DividesByTheDeviation, "an advantage that is not finite", "mmrl.ops.credit.group_advantages does not"),
        (RewardsEntropy, "only fields that needs() asks for are used", "Needs(entropy_gradient=True)"),
        (KeepsATemperature, "loss depends on credit only through its Credit", "pass it through Credit.constants"),
        (MakesATemperature, "has no attribute 'made'", "go through Credit.constants"),
        (ForgetsToReturn, "observe answered None", "return a dict of further metrics"),
        (SelectsUnasked, "select is asked", "Needs(refill=Refill(...))"),
        (AggregatesByName, "aggregation is an Aggregation", "'token-mean'"),
        (NeedsInWords, "needs() answers Needs", "mmrl.interfaces.Needs"),
        (WarnsInOneText, "check(run) answers a list of texts", "return a list"),
        (ChecksWithABug, "check raised AttributeError", "group_sizes"),
        (SelectsPlaces, "select answers one bool for each of 9 groups", "in order"),
        (SelectsByARangeOfNothing, "groups can be selected", "zero-size array"),
        (SelectsByInvalidRewards, "leaving invalid rollouts out changes nothing in select", "where group.valid alone"),
        (SelectsByInvalidValues, "whatever invalid rollouts have changes nothing in select", "where group.valid alone"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_rule_is_named_with_what_shows_it_and_what_to_do(algorithm, rule, remedy) -> None:
    with pytest.raises(PluginError) as caught:
        check_algorithm(algorithm)
    text = str(caught.value)
    assert rule in text and remedy in text
    assert algorithm.__name__ in text


class Dense(Good):
    """Learns what rewards say of parts of the text."""

    def needs(self):
        return Needs(token_rewards=True)

    def credit(self, batch):
        to_go = [
            np.cumsum(np.where(mask, values, 0.0)[::-1])[::-1]
            for values, mask in zip(batch.token_rewards, batch.masks, strict=True)
        ]
        return Credit([valid * values for valid, values in zip(batch.valid, to_go, strict=True)])


class Shown(Good):
    """Learns demonstrations, which are no part of the baseline."""

    def needs(self):
        return Needs(demonstration=True)

    def credit(self, batch):
        own = batch.valid & ~batch.given
        return Credit(np.where(batch.valid, batch.rewards - (batch.rewards[own].mean() if own.any() else 0.0), 0.0))

    def loss(self, tokens):
        given_T = tokens.given_N[tokens.sequence_T]
        loss_T = -tokens.advantages_T * (tokens.logprobs_T - tokens.sampler_logprobs_T).clamp(max=20.0).exp()
        return TokenLoss(loss_T.where(~given_T, -tokens.logprobs_T * tokens.advantages_T))


class Keeps(Good):
    def needs(self):
        return Needs(experience=2, refill=Refill())

    def select(self, groups):
        return [bool(group.valid.any()) for group in groups]

    def remember(self, group):
        return np.flatnonzero(group.valid)[:1].tolist()

    def recall(self, group, kept):
        return {0: len(kept) - 1}

    def retry(self, group):
        row = group.group.prompt.prompt
        return replace(row, messages=(*row.messages, Message("user", "again")))

    def credit(self, batch):
        return Credit(super().credit(batch).advantages * (1 - 0.5 * batch.recalled))


class KeepsInvalid(Keeps):
    def remember(self, group):
        return [len(group.rollouts) - 1]


class RecallsWhatIsNotThere(Keeps):
    def recall(self, group, kept):
        return {0: len(kept)}


class RetriesAnotherRow(Keeps):
    def retry(self, group):
        return replace(group.group.prompt.prompt, id="other")


class RetriesAtRandom(Keeps):
    def retry(self, group):
        row = group.group.prompt.prompt
        return replace(row, messages=(Message("user", str(np.random.default_rng().random())),))


class RetriesUnasked(Good):
    def retry(self, group):
        return None


@pytest.mark.parametrize(
    ("algorithm", "match"),
    [
        (KeepsInvalid, "remember named 3, and the valid members are 1"),
        (RecallsWhatIsNotThere, "recall named 1, and the kept rollouts are 0"),
        (RetriesAnotherRow, "retry answered row 'other' for row"),
        (RetriesAtRandom, "retry answers the same of the same group"),
        (RetriesUnasked, "breaks a rule: retry is asked"),
        (type("Forgets", (Keeps,), {"remember": Algorithm.remember}), "asks for experience and has no remember"),
        (type("Hoards", (Keeps,), {"recall": Algorithm.recall}), "asks for experience and has no recall"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_members_that_are_not_there_and_rows_that_are_others_are_refused(algorithm, match) -> None:
    with pytest.raises(PluginError, match=match):
        check_algorithm(algorithm)


@pytest.mark.parametrize("algorithm", [Good, Selects, Dense, Shown, Keeps])
def test_an_algorithm_that_keeps_the_rules_passes(algorithm) -> None:
    check_algorithm(algorithm)
    check_algorithm(algorithm, options={"scale": 2.0})


def test_values_of_parts_that_are_not_asked_for_or_of_what_is_masked_are_not_used() -> None:
    with pytest.raises(PluginError, match="there is a result") as caught:
        check_algorithm(type("Takes", (Dense,), {"needs": Good.needs}))
    assert "fields that needs() does not ask for" in str(caught.value)

    class Masked(Dense):
        def credit(self, batch):
            return Credit(
                [float(values.sum()) * valid for values, valid in zip(batch.token_rewards, batch.valid, strict=True)]
            )

    with pytest.raises(PluginError, match="where the mask or the row's validity is False"):
        check_algorithm(Masked)


def test_an_entropy_bonus_that_is_asked_for_and_a_constant_that_is_passed_on_pass() -> None:
    class Asks(RewardsEntropy):
        def needs(self):
            return Needs(entropy_gradient=True)

        def credit(self, batch):
            return Credit(super().credit(batch).advantages, constants={"tau": 2.0})

        def loss(self, tokens):
            return TokenLoss(super().loss(tokens).loss_T / tokens.constants["tau"])

    check_algorithm(Asks)


def test_components_have_the_names_that_are_given() -> None:
    class ByName(Selects):
        def credit(self, batch):
            right, brief = batch.components["right"], batch.components["brief"]
            np.testing.assert_allclose((batch.rewards - right - brief / 2)[batch.valid], 0.0, atol=1e-12)
            assert batch.penalties == {"brief"} and batch.weights == {"right": 1.0, "brief": 0.5}
            return Credit(np.where(batch.valid, right - batch.greedy_components["brief"], 0.0))

        def select(self, groups):
            return [bool(group.components["brief"][group.valid].any()) for group in groups]

        def check(self, run):
            if run.rewards != ("right", "brief"):
                raise ValueError("no such rewards")
            return ()

    check_algorithm(ByName, rewards=("right", "brief"))
    with pytest.raises(PluginError, match="KeyError: 'right'") as caught:
        check_algorithm(ByName)
    assert "name others with rewards=(...)" in str(caught.value)


def test_a_class_that_is_given_is_not_sent_for_to_its_authors() -> None:
    class Older(Good):
        api_version = 0

    class Fails(Good):
        def __init__(self, config):
            raise KeyError("tau")

    for faulty, remedy in ((Older, "leave out api_version"), (Fails, "repair it"), (dict, "correct the")):
        with pytest.raises(PluginError) as caught:
            check_algorithm(faulty)
        assert caught.value.remedy.startswith(remedy)


def test_the_options_of_a_frame_are_extended_not_replaced() -> None:
    with pytest.raises(TypeError, match=r"Narrow.Config does not extend PolicyGradient.Config"):
        type("Narrow", (AdvantagesInAnArray,), {"Config": PluginConfig})


def test_one_that_refuses_such_a_run_passes() -> None:
    class Refuses(Good):
        def check(self, run):
            raise ValueError("only one optimizer step on each batch")

    check_algorithm(Refuses)


def test_an_algorithm_may_be_given_itself_and_is_left_as_it_is() -> None:
    class Counts(Good):
        steps = 0

        def observe(self, metrics):
            self.steps += 1
            return {"steps": self.steps}

        def state(self):
            return {"steps": self.steps}

        def restore(self, state):
            self.steps = state["steps"]

    algorithm = Counts(Counts.Config(scale=3.0))
    check_algorithm(algorithm)
    assert algorithm.steps == 0
    with pytest.raises(ValueError, match="has its options"):
        check_algorithm(algorithm, options={"scale": 1.0})


class Decays(Good):
    """Changes from step to step; each fault below forgets a part of that."""

    rate = 1.0
    seen = 0

    def credit(self, batch):
        self.seen += 1
        return Credit(self.rate / self.seen * super().credit(batch).advantages)

    def observe(self, metrics):
        self.rate *= 0.9
        return {"rate": self.rate}

    def state(self):
        return {"rate": self.rate, "seen": self.seen}

    def restore(self, state):
        self.rate, self.seen = state["rate"], state["seen"]


class Stateless(Decays):
    def state(self):
        return {}


class HalfAState(Decays):
    def state(self):
        return {"rate": self.rate, "seen": 0}


class RestoresNothing(Decays):
    restore = Algorithm.restore


class RestoresWrong(Decays):
    def restore(self, state):
        self.rate, self.seen = state["rate"], state["steps"]


class KeepsAnArray(Decays):
    def state(self):
        return {"rate": np.float32(self.rate), "seen": self.seen}


class KeepsNumbersByNumber(Decays):
    def state(self):
        return {"values": {0: self.rate, 1: self.seen}}

    def restore(self, state):
        self.rate, self.seen = state["values"][0], state["values"][1]


def test_an_algorithm_with_a_state_that_comes_back_passes() -> None:
    check_algorithm(Decays)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Stateless, "a run that goes on from a checkpoint goes on the same"),
        (HalfAState, "a run that goes on from a checkpoint goes on the same"),
        (RestoresNothing, "RestoresNothing has a state and does not restore it"),
        (RestoresWrong, "restore takes the JSON that state answered"),
        (KeepsAnArray, "state answers a dict that JSON can hold"),
        (KeepsNumbersByNumber, "restore takes the JSON that state answered"),
    ],
)
def test_a_state_that_is_incomplete_is_found(fault: type[Algorithm], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        check_algorithm(fault)


def test_a_class_is_checked_against_its_interface_and_its_options_first() -> None:
    with pytest.raises(ConfigError, match="unknown key scael"):
        check_algorithm(Good, options={"scael": 1.0})
    with pytest.raises(PluginError, match=r"is no subclass of mmrl\.interfaces\.Algorithm"):
        check_algorithm(dict)
    with pytest.raises(PluginError, match=r"algorithm plugin 'Newer' of .* is written for interface version 99"):
        check_algorithm(type("Newer", (Good,), {"api_version": 99}))
    with pytest.raises(PluginError, match="no installed package has an algorithm plugin called 'none_such'"):
        check_algorithm("none_such")


@pytest.mark.parametrize(
    ("network", "source", "needs", "match"),
    [
        ("policy", "rollouts", Needs(values=True), "asks for values and has no value_loss"),
        ("policy", "demonstrations", Needs(values=True), "asks for values, and its source is demonstrations"),
        (
            "policy",
            "comparisons",
            Needs(demonstration=True, experience=2, token_rewards=True),
            "asks for demonstration, experience, token_rewards, and its source is comparisons",
        ),
        ("policy", "rollouts", Needs(last_state=True), "asks for last_state, and a policy has no score head"),
        ("critic", "rollouts", Needs(), "trains a network 'critic'"),
        ("reward", "rollouts", Needs(last_state=True), "trains a reward model on something else than whole"),
        ("reward", "comparisons", Needs(), "trains a reward model on something else than whole conversations"),
        (
            "reward",
            "comparisons",
            Needs(last_state=True, reference_logprobs=True, mismatched=True),
            "asks for reference_logprobs, mismatched, which a reward model has not",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(network, source, needs, match) -> None:
    made = {"network": network, "source": source, "needs": lambda self: needs}
    early = type("Early", (Good,), made)
    for run in (check_algorithm, lambda algorithm: replay(algorithm, {})):
        with pytest.raises(PluginError, match=f"Early.needs {match}"):
            run(early)


def test_a_run_of_an_algorithm_that_asks_for_what_is_not_served_does_not_start(package, tmp_path) -> None:
    code = "from mmrl.interfaces import Needs\nfrom mmrl_algorithms.grpo import GRPO\n\nclass Early(GRPO):\n"
    package(f"{code}    def needs(self): return Needs(values=True)\n", "early = {module}:Early", group="algorithms")
    config = from_mapping(
        {
            "model": {"path": "m"},
            "data": {"train": {"name": "table"}},
            "rewards": [{"name": "exact"}],
            "algorithm": {"name": "early"},
        }
    )
    with pytest.raises(PluginError, match=r"Early\.needs asks for values"):
        _ = RunSetup(config, tmp_path).algorithm


def test_what_later_versions_fill_is_optional_and_empty() -> None:
    rollout = make_rollouts(["7"])[0]
    assert rollout.segments[0].weight_version is None and Prompt("p", ()).candidates == ()
    assert Candidate("7").score is None and Credit(np.zeros(1)).returns is None
    batch = batch_of(scored_groups(with_greedy=False), {"reward": 1.0})
    assert batch.values is batch.final_values is batch.turns is batch.turn_rewards is None
    assert batch.given is batch.recalled is batch.token_rewards is None


class CountsItsTokens(GroupRelative):
    def surrogate(self, tokens):
        loss_T = -tokens.advantages_T * tokens.logprobs_T
        lengths_N = tokens.sequence_sum(tokens.mask_T.to(loss_T))
        return TokenLoss(loss_T, {"policy": loss_T}, sequence_metrics={"own/length": lengths_N})


def test_the_frame_keeps_the_metrics_of_sequences_that_a_surrogate_gives():
    tokens = {name: np.zeros((2, 3)) for name in ("log_probs", "rollout_log_probs")}
    batch = {"group_ids": [0, 0], "rewards": [1.0, 0.0], "response_mask": [[1, 1, 1], [1, 0, 0]], **tokens}
    assert replay(CountsItsTokens, batch).metrics["own/length"] == 2
