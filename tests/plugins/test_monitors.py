"""The first-party monitors: their numbers by hand, and histories at, below and above each threshold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from itertools import pairwise

import numpy as np
import pytest

from mmrl.interfaces import Alarm, Monitor, RunFacts, StepRecord
from mmrl.testing import alarms_of, check_monitor, make_rollouts
from mmrl.testing.monitors import FACTS
from mmrl.types import GIVEN, CreditedGroup, EncodedPrompt, Rollout, RolloutGroup, ScoredGroup, Segment
from mmrl_monitors.blind_policy import BlindPolicy
from mmrl_monitors.dead_groups import DeadGroups
from mmrl_monitors.falling_chosen import FallingChosen
from mmrl_monitors.gibberish import Gibberish, longest_run
from mmrl_monitors.idle_clip import IdleClip
from mmrl_monitors.idle_critic import IdleCritic
from mmrl_monitors.length_bias import LengthBias
from mmrl_monitors.length_hacking import LengthHacking
from mmrl_monitors.low_entropy import LowEntropy
from mmrl_monitors.proxy_gain import ProxyGain
from mmrl_monitors.reward_faults import RewardFaults
from mmrl_monitors.same_answers import SameAnswers
from mmrl_monitors.sampler_mismatch import SamplerMismatch
from mmrl_monitors.stale_data import StaleData
from mmrl_monitors.wild_gradient import WildGradient
from mmrl_monitors.within import correlation, rank_correlation

NAMES = sorted(entry.name for entry in entry_points(group="mmrl.monitors") if entry.value.startswith("mmrl_monitors"))
Metrics = dict[int, dict[str, float]]
Shape = Callable[[int], float | None]


def steps(count: int, **curves: Shape) -> Metrics:
    """Steps 1 to ``count``; ``a__b`` is the metric ``a/b``, and None leaves it out."""
    return {
        step: {name.replace("__", "/"): value for name, shape in curves.items() if (value := shape(step)) is not None}
        for step in range(1, count + 1)
    }


def from_step(change: int, before: float, after: float) -> Shape:
    return lambda step: after if step >= change else before


def always(value: float) -> Shape:
    return lambda step: value


def told(monitor: Monitor, metrics: Metrics, **options: object) -> list[tuple[int, str]]:
    """(step, cause) of each alarm."""
    return [(alarm.step, alarm.cause) for alarm in alarms_of(monitor, metrics, **options)]  # type: ignore[arg-type]


def made(monitor: type[Monitor], **options: object) -> Monitor:
    return monitor(monitor.Config(**options))


def group(
    rewards: Sequence[float],
    texts: Sequence[str] | None = None,
    *,
    name: str = "p",
    epoch: int = 0,
    trained: bool = True,
    **components: Sequence[float],
) -> CreditedGroup:
    """A group of completions; NaN as a reward is an invalid one."""
    rollouts = make_rollouts(texts or ["x"] * len(rewards), question=name)
    prompt = replace(rollouts[0].prompt, epoch=epoch)
    values = np.array(rewards, float)
    parts = {key: np.array(each, float) for key, each in {"reward": rewards, **components}.items()}
    scored = ScoredGroup(RolloutGroup(prompt, tuple(rollouts)), np.nan_to_num(values), ~np.isnan(values), parts)
    count = len(rewards)
    return CreditedGroup(scored, [np.zeros(1)] * count, [np.zeros(0, np.float32)] * count, trained)


def measured(monitor: Monitor, *groups: CreditedGroup, previous: Sequence[tuple[int, str]] = ()) -> Mapping[str, float]:
    return monitor.measure(StepRecord(3, FACTS, lambda: groups, read_previous=lambda: frozenset(previous)))


def drawn(logprobs: Sequence[float], ids: Sequence[int], mask: Sequence[bool] | None = None) -> Rollout:
    """A completion with these log-probs; what is not in the mask is an environment's."""
    prompt: EncodedPrompt = make_rollouts(["x"])[0].prompt
    flags = np.array([True] * len(ids) if mask is None else mask)
    ends = [0, *(np.flatnonzero(np.diff(flags)) + 1).tolist(), len(ids)]
    arrays = np.array(ids, np.int32), np.array(logprobs, np.float32)
    segments = [Segment(arrays[0][a:b], bool(flags[a]), arrays[1][a:b]) for a, b in pairwise(ends)]
    return Rollout(prompt, tuple(segments), 0, "x", "stop", 1)


def of_rollouts(*rollouts: Rollout, logprobs: Sequence[np.ndarray] | None = None) -> CreditedGroup:
    count = len(rollouts)
    members = tuple(replace(rollout, index=place) for place, rollout in enumerate(rollouts))
    scored = ScoredGroup(RolloutGroup(rollouts[0].prompt, members), np.zeros(count), np.ones(count, bool), {})
    nothing = [np.zeros(0, np.float32)] * count
    return CreditedGroup(scored, nothing, nothing if logprobs is None else logprobs, trained=True)


@pytest.mark.parametrize("name", NAMES)
def test_it_keeps_the_rules_of_monitors(name: str) -> None:
    check_monitor(name)


def test_all_of_them_are_tested_here() -> None:
    assert len(NAMES) == 15


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_learns_gives_no_alarm(name: str) -> None:
    """Reward and accuracy rise together, entropy falls by three quarters, all else has some noise."""
    rng = np.random.default_rng(5)

    def noisy(value: float) -> Shape:
        return lambda step: value * float(rng.uniform(0.7, 1.4))

    def rising(step: int) -> float:
        return 0.4 + 0.4 * (step / 200) ** 0.5

    metrics = steps(
        200,
        reward__mean=lambda step: rising(step) + float(rng.normal(0, 0.02)),
        policy__entropy=lambda step: 1.2 * 0.25 ** (step / 200),
        policy__grad_norm=noisy(0.5),
        group__zero_signal_fraction=noisy(0.35),
        group__all_correct_fraction=noisy(0.25),
        group__all_wrong_fraction=noisy(0.1),
        length__completion_mean=noisy(80),
        length__truncated_fraction=noisy(0.02),
        reward__unscored_fraction=always(0.0),
        policy__clip_fraction_high=noisy(0.01),
        policy__clip_fraction_low=noisy(0.01),
        policy__ppo_kl_k3=noisy(1e-3),
        mismatch__kl=noisy(1e-3),
        reward__std=noisy(0.4),
        advantage__abs_mean=noisy(0.4),
        critic__explained_variance=lambda step: 0.4 * (1 - 0.5 ** (step / 10)) + float(rng.normal(0, 0.1)),
        preference__logprob_chosen=lambda step: -noisy(80)(step) * (1 + step / 2000),
        preference__length_chosen=always(60),
        eval__accuracy=lambda step: rising(step) if step % 10 == 0 else None,
        eval_blank__accuracy=lambda step: 0.2 if step % 10 == 0 else None,
        eval_blank__accuracy_gap=lambda step: rising(step) - 0.2 if step % 10 == 0 else None,
    )
    (entry,) = entry_points(group="mmrl.monitors", name=name)
    assert told(made(entry.load()), metrics) == []


def blank(*pairs: tuple[float, float]) -> Metrics:
    """(gap, accuracy without images) at every tenth step, nothing at the others."""
    found: Metrics = {step: {} for step in range(10 * len(pairs))}
    for place, (gap, accuracy) in enumerate(pairs):
        found[10 * place] = {"eval_blank/accuracy_gap": gap, "eval_blank/accuracy": accuracy}
    return found


@pytest.mark.parametrize(
    ("pairs", "alarms"),
    [
        ([(0.4, 0.1), *[(0.1, 0.1)] * 4], [(40, "blind")]),  # means of three: 0.4, 0.25, 0.2, 0.1, 0.1
        ([(0.4, 0.1), *[(0.161, 0.1)] * 5], []),  # 0.4 of the largest is 0.16
        ([(0.4, 0.1), *[(0.159, 0.1)] * 5], [(40, "blind")]),
        ([(0.4, 0.1), *[(0.1, 0.1)] * 3, (0.5, 0.1), (0.1, 0.1)], []),
        ([(0.1, 0.1), (0.5, 0.1), (-0.1, 0.1), (0.0, 0.1), (0.0, 0.1), (0.0, 0.1)], [(50, "blind")]),
        ([(0.19, 0.1), *[(0.0, 0.1)] * 4], []),  # the images were never worth much
        ([(0.5, 0.1), *[(0.29, 0.31)] * 4], [(40, "guesses")]),
        ([(0.5, 0.1), *[(0.3, 0.29)] * 4], []),
        ([(0.5, 0.1), *[(0.31, 0.5)] * 4], []),
    ],
)
def test_blind_policy(pairs: list[tuple[float, float]], alarms: list[tuple[int, str]]) -> None:
    assert told(made(BlindPolicy), blank(*pairs)) == alarms


def held_out(*accuracies: float, rise: float, noise: float = 0.01) -> Metrics:
    """An evaluation every tenth step from step 0 on; the reward rises by ``rise`` over three of them."""
    last = 10 * (len(accuracies) - 1)
    found: Metrics = {0: {"eval/accuracy": accuracies[0]}}
    for step in range(1, last + 1):
        found[step] = {"reward/mean": rise * step / 30 + noise * (-1) ** step}
        found[step] |= {"eval/accuracy": accuracies[step // 10]} if step % 10 == 0 else {}
    return found


@pytest.mark.parametrize(
    ("accuracies", "rise", "alarms"),
    [
        ((0.5, 0.5, 0.5, 0.5, 0.5), 0.3, [(40, "held_out")]),
        ((0.5, 0.4, 0.3, 0.2, 0.1), 0.3, [(40, "held_out")]),
        ((0.5, 0.5, 0.5, 0.51, 0.51), 0.3, [(40, "held_out")]),
        ((0.5, 0.5, 0.5, 0.52, 0.52), 0.3, []),
        ((0.5, 0.6, 0.5, 0.5, 0.7), 0.3, []),
        ((0.5, 0.5, 0.5, 0.5, 0.5), 0.0, []),
        ((0.5, 0.5, 0.5, 0.5, 0.5), 0.01, []),  # less than a step's noise
        ((0.5, 0.5, 0.5), 0.3, []),
    ],
)
def test_proxy_gain(accuracies: Sequence[float], rise: float, alarms: list[tuple[int, str]]) -> None:
    assert told(made(ProxyGain), held_out(*accuracies, rise=rise)) == alarms


def of_set(name: str, metrics: Metrics) -> Metrics:
    """The same metrics of an evaluation set with a name."""
    sections = ("eval/", "eval_blank/")
    return {
        step: {
            f"{key.replace('/', f'/{name}/', 1) if key.startswith(sections) else key}": v for key, v in values.items()
        }
        for step, values in metrics.items()
    }


def test_each_evaluation_set_has_alarms_of_its_own() -> None:
    facts = replace(FACTS, evaluations={"a": "reward", "b": "reward"})
    flat = (0.5, 0.5, 0.5, 0.5, 0.5)
    for monitor, bad, good in (
        (BlindPolicy, blank((0.4, 0.1), *[(0.1, 0.1)] * 4), blank(*[(0.4, 0.1)] * 5)),
        (ProxyGain, held_out(*flat, rise=0.3), held_out(0.5, 0.6, 0.7, 0.8, 0.9, rise=0.3)),
    ):
        both = {step: {**of_set("a", good)[step], **of_set("b", bad)[step]} for step in bad}
        (alarm,) = alarms_of(made(monitor), both, run=facts, num_steps=200)
        assert alarm.cause in ("b/blind", "b/held_out") and " on b" in alarm.message


def test_components_that_disagree_more_than_they_agreed() -> None:
    def agreement(after: float) -> Metrics:
        return steps(40, monitor__mine__agreement=from_step(21, 0.4, after))

    assert told(made(ProxyGain), agreement(-0.11)) == [(27, "components")]  # five are smoothed, then three in a row
    assert told(made(ProxyGain), agreement(-0.09)) == []
    never = steps(40, monitor__mine__agreement=from_step(21, -0.1, -0.9))
    assert told(made(ProxyGain), never) == []


def test_agreement_is_the_lowest_rank_correlation_with_the_right_answer() -> None:
    monitor = made(ProxyGain)
    form = group([1, 0, 1, 0], form=[5, 1, 5, 1], length=[1, 2, 3, 4], **{"form/part": [-9, 9, -9, 9]})
    assert measured(monitor, form) == {"agreement": pytest.approx(-0.447, abs=1e-3)}
    invalid = group([1, np.nan, 0, 0], form=[2, 9, 1, 1])
    assert measured(monitor, invalid) == {"agreement": pytest.approx(1.0)}
    assert measured(monitor, group([1, 1, 1, 1], form=[1, 2, 3, 4])) == {} == measured(monitor, group([1, 0, 1]))


def test_rank_correlation_with_equal_values_is_scipys() -> None:
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 4, 30).astype(float), rng.integers(0, 3, 30).astype(float)
    assert rank_correlation(one, other) == pytest.approx(spearmanr(one, other).statistic)
    assert correlation(one, 2 * one) == pytest.approx(1) and correlation(one, np.ones(30)) is None
    assert correlation(one[:2], other[:2]) is None


@pytest.mark.parametrize(
    ("found", "length", "alarms"),
    [(0.5, 60, [(12, "reward")]), (0.49, 80, []), (0.9, 59.9, []), (-0.9, 80, [])],
)
def test_length_hacking(found: float, length: float, alarms: list[tuple[int, str]]) -> None:
    metrics = steps(
        20, monitor__mine__correlation=from_step(10, 0.1, found), length__completion_mean=from_step(10, 40, length)
    )
    assert told(made(LengthHacking), metrics) == alarms


@pytest.mark.parametrize(
    ("start", "later", "alarms"),
    [(0.0, 0.1, [(12, "truncated")]), (0.0, 0.09, []), (0.2, 0.31, [(12, "truncated")]), (0.2, 0.29, [])],
)
def test_truncation_that_grows(start: float, later: float, alarms: list[tuple[int, str]]) -> None:
    metrics = steps(20, reward__mean=always(0.5), length__truncated_fraction=from_step(10, start, later))
    assert told(made(LengthHacking), metrics) == alarms


def test_the_correlation_of_reward_and_length_is_within_groups() -> None:
    long_pays = group([0, 1, 2], ["a", "ab", "abc"])
    short_pays = group([0, 1, 2], ["abc", "ab", "a"])
    expected = {"correlation": pytest.approx(1.0)}
    assert measured(made(LengthHacking), long_pays, long_pays, group([1, 1, 1], ["a", "ab", "abc"])) == expected
    assert measured(made(LengthHacking), long_pays, short_pays) == {"correlation": pytest.approx(0.0)}
    unscored = group([0, 1, 2, np.nan], ["a", "ab", "abc", ""])
    assert measured(made(LengthHacking), unscored) == expected
    assert measured(made(LengthHacking), group([1, 1, 1])) == {}


@pytest.mark.parametrize(
    ("start", "later", "change", "alarms"),
    [
        (1.0, 0.2, 10, [(12, "early")]),
        (1.0, 0.201, 10, []),
        (1.0, 0.1, 48, []),  # two looks before half of the steps
        (1.0, 0.1, 47, [(49, "early")]),
        (1.0, 0.02, 60, [(62, "none")]),
        (1.0, 0.0201, 60, []),
        (0.03, 0.016, 60, []),  # it never had any
        (0.03, 0.015, 60, [(62, "none")]),
    ],
)
def test_low_entropy(start: float, later: float, change: int, alarms: list[tuple[int, str]]) -> None:
    metrics = steps(100, reward__mean=always(0.5), policy__entropy=from_step(change, start, later))
    assert told(made(LowEntropy), metrics) == alarms


def test_entropy_may_fall_where_all_is_solved_and_in_supervised_learning() -> None:
    low = from_step(10, 1.0, 0.001)
    solved = steps(100, reward__mean=always(1), policy__entropy=low, group__all_correct_fraction=always(0.91))
    assert told(made(LowEntropy), solved) == []
    assert told(made(LowEntropy), steps(100, policy__entropy=low)) == []
    nearly = steps(100, reward__mean=always(1), policy__entropy=low, group__all_correct_fraction=always(0.9))
    assert told(made(LowEntropy), nearly) == [(12, "none"), (12, "early")]


@pytest.mark.parametrize(
    ("distinct", "wrong", "alarms"), [(0.08, 0.3, [(3, "")]), (0.081, 0.9, []), (0.0, 0.29, []), (None, 0.0, [])]
)
def test_same_answers(distinct: float | None, wrong: float, alarms: list[tuple[int, str]]) -> None:
    metrics = steps(9, monitor__mine__distinct=lambda step: distinct, monitor__mine__wrong=always(wrong))
    assert told(made(SameAnswers), metrics) == alarms


def test_answers_are_counted_in_prompts_that_are_wrong_throughout() -> None:
    monitor = made(SameAnswers)
    wrong, right = group([0, 0, 0, 0], ["a", "a ", "b", "a"]), group([0, 0, 0, 1], ["a", "b", "c", "d"])
    assert measured(monitor, wrong, right) == {"wrong": 0.5, "distinct": 1 / 3}
    read = replace(wrong, scored=replace(wrong.scored, answers={"reward": ["1", "1", "1", None]}))
    assert measured(monitor, read) == {"wrong": 1.0, "distinct": 1 / 3}  # 1, and the text of the one that was not read
    assert measured(monitor, right) == {"wrong": 0.0} and measured(monitor, group([0, 0])) == {}
    assert measured(monitor, group([np.nan, 0, 0, 0, 0], ["z", "a", "a", "a", "a"]))["distinct"] == 0


@pytest.mark.parametrize(
    ("equal", "right", "wrong", "alarms"),
    [
        (0.6, 0.29, 0.31, [14]),
        (0.59, 0.1, 0.49, []),
        (0.6, 0.3, 0.3, []),  # half of them are right throughout
        (0.84, 0.8, 0.04, []),
        (0.85, 0.8, 0.05, [14]),
        (0.6, 0.0, 0.0, [14]),
    ],
)
def test_dead_groups(equal: float, right: float, wrong: float, alarms: list[int]) -> None:
    metrics = steps(
        30,
        group__zero_signal_fraction=from_step(5, 0.3, equal),
        group__all_correct_fraction=from_step(5, 0.2, right),
        group__all_wrong_fraction=from_step(5, 0.1, wrong),
    )
    assert [step for step, _ in told(made(DeadGroups), metrics)] == alarms
    replaced = {step: {**each, "rollout/acceptance_rate": 0.4} for step, each in metrics.items()}
    assert told(made(DeadGroups), replaced) == []
    assert told(made(DeadGroups), metrics, run=replace(FACTS, group_size=1)) == []


def dead(equal: float, right: float, wrong: float) -> Alarm:
    metrics = steps(
        12,
        group__zero_signal_fraction=always(equal),
        group__all_correct_fraction=always(right),
        group__all_wrong_fraction=always(wrong),
    )
    (alarm,) = alarms_of(made(DeadGroups), metrics)
    return alarm


def test_dead_groups_say_what_they_are_and_what_to_do() -> None:
    assert "most prompts are wrong" in dead(0.9, 0.1, 0.8).message and "easier prompts" in dead(0.9, 0.1, 0.8).message
    assert "most prompts are right" in dead(0.9, 0.8, 0.1).message and "harder prompts" in dead(0.9, 0.8, 0.1).message
    assert "most prompts earn the same" in dead(0.9, 0.45, 0.44).message
    assert dead(0.9, 0.8, 0.1).values == {"no_signal": 0.9, "all_right": 0.8, "all_wrong": 0.1}
    nothing_right = steps(
        30,
        group__zero_signal_fraction=always(1),
        group__all_correct_fraction=always(0),
        group__all_wrong_fraction=always(1),
    )
    assert told(made(DeadGroups), nothing_right) == []


@pytest.mark.parametrize("cause", ["repeats", "rare_tokens"])
def test_gibberish(cause: str) -> None:
    def shares(before: float, after: float) -> list[tuple[int, str]]:
        return told(made(Gibberish), steps(30, **{f"monitor__mine__{cause}": from_step(22, before, after)}))

    assert shares(0.0, 0.05) == [(24, cause)] and shares(0.0, 0.049) == []
    assert shares(0.02, 0.06) == [(24, cause)] and shares(0.02, 0.059) == []


def test_loops_and_rare_tokens_are_counted_where_the_policy_wrote() -> None:
    sure, unsure = np.log(0.991), np.log(0.5)
    monitor = made(Gibberish, run_tokens=4, rare_id=100, rare_logprob=-14)
    loop = drawn([unsure, sure, sure, sure, sure], [1] * 5)
    broken_loop = drawn([sure, sure, unsure, sure, sure, sure], [1] * 6)
    inserted = drawn([sure] * 6, [1] * 6, [True, True, False, False, True, True])
    rare, common = drawn([-14.1], [100]), drawn([-14.1, -13.9], [99, 100])
    assert measured(monitor, of_rollouts(loop, broken_loop, inserted, common)) == {"repeats": 0.25, "rare_tokens": 0.0}
    assert measured(monitor, of_rollouts(rare, common)) == {"repeats": 0.0, "rare_tokens": 0.5}
    assert longest_run(np.array([], bool)) == 0 and longest_run(np.array([1, 1, 0, 1], bool)) == 2
    assert longest_run(np.ones(3, bool)) == 3


@pytest.mark.parametrize(
    ("baseline", "later", "alarms"),
    [(0.01, 0.1, [(24, "")]), (0.01, 0.099, []), (1e-6, 0.019, []), (1e-6, 0.02, [(24, "")])],
)
def test_sampler_mismatch(baseline: float, later: float, alarms: list[tuple[int, str]]) -> None:
    metrics = steps(30, monitor__mine__gap_p99=from_step(22, baseline, later))
    assert told(made(SamplerMismatch), metrics) == alarms


def test_the_gap_is_that_of_tokens_that_were_learned_from() -> None:
    one, other = drawn([-1.0] * 3, [1] * 3, [True, False, True]), drawn([-1.0], [1])
    learned = [np.array([-1.5, 9.0, -1.25], np.float32), np.zeros(0, np.float32)]
    found = measured(made(SamplerMismatch), of_rollouts(one, other, logprobs=learned))
    assert found == {"gap_p99": pytest.approx(0.25 + 0.99 * 0.25)}
    assert measured(made(SamplerMismatch), of_rollouts(one)) == {}


def test_the_gap_is_that_of_the_newest_weights_tokens() -> None:
    """The others' log-probs have moved since, in sound engines too."""
    old = Segment(np.array([1, 2], np.int32), True, np.array([-1.0, -1.0], np.float32), weight_version=3)
    new = Segment(np.array([3], np.int32), True, np.array([-1.0], np.float32), weight_version=4, continues=True)
    prompt = make_rollouts(["x"])[0].prompt
    parts, stale = Rollout(prompt, (old, new), 0, "x", "stop", 4), Rollout(prompt, (old,), 1, "x", "stop", 3)
    learned = [np.array([9.0, 9.0, -1.25], np.float32), np.array([9.0, 9.0], np.float32)]
    groups = of_rollouts(parts, stale, logprobs=learned)
    assert measured(made(SamplerMismatch), groups) == {"gap_p99": 0.25}
    behind = StepRecord(3, replace(FACTS, staleness=1), lambda: [groups])
    assert made(SamplerMismatch).measure(behind) == {}


SEVERAL, ONE = replace(FACTS, updates_per_batch=4), replace(FACTS, updates_per_batch=1)


@pytest.mark.parametrize(
    ("run", "clipped", "later", "alarms"),
    [
        (SEVERAL, 0.0, 0.1, [(24, "")]),
        (SEVERAL, 0.0, 0.099, []),
        (SEVERAL, 0.001, 0.1, []),
        (ONE, 0.0, 0.1, []),
    ],
)
def test_idle_clip(run: RunFacts, clipped: float, later: float, alarms: list[tuple[int, str]]) -> None:
    metrics = steps(
        30,
        policy__clip_fraction_high=always(clipped),
        policy__clip_fraction_low=always(0.0),
        policy__ppo_kl_k3=from_step(22, 1e-3, later),
    )
    assert told(made(IdleClip), metrics, run=run) == alarms


def critic_of(later: float, *, pretrained: int = 0, change: int = 1, spread: float = 0.5) -> Metrics:
    """Fifty steps, in the first ``pretrained`` of which the critic alone learns; ``spread`` is of the last half."""
    return steps(
        50,
        critic__explained_variance=from_step(change, 0.0, later),
        advantage__abs_mean=lambda step: 0.4 if step > pretrained else None,
        reward__std=from_step(26, 0.5, spread),
    )


@pytest.mark.parametrize(
    ("metrics", "alarms"),
    [
        (critic_of(0.02), [22]),  # twenty steps, and two looks more
        (critic_of(0.021), []),
        (critic_of(-3.0), [22]),
        (critic_of(0.0, pretrained=15), [37]),  # steps of the critic alone do not count
        (critic_of(0.5, change=16, pretrained=15), []),
        (critic_of(0.5, change=13), []),  # it learns after twelve steps: the median of twenty is above in time
        (critic_of(0.5, change=14), [22]),
        (critic_of(0.0, pretrained=20, spread=0.19), []),  # all answers are right by now
        (critic_of(0.0, pretrained=20, spread=0.21), [42]),
        (steps(50, critic__explained_variance=always(0.0)), []),  # the policy has not learned yet
        (steps(50, advantage__abs_mean=always(0.4)), []),  # no critic
    ],
)
def test_idle_critic(metrics: Metrics, alarms: list[int]) -> None:
    assert [step for step, _ in told(made(IdleCritic), metrics)] == alarms


def test_a_critic_that_is_worse_than_one_number_is_told_so() -> None:
    (idle,), (wrong,) = (alarms_of(made(IdleCritic), critic_of(value)) for value in (0.0, -0.5))
    assert "the critic predicts nothing, since step 20" in idle.message and "critic.pretrain_steps" in idle.message
    assert "worse than one number would" in wrong.message and wrong.values == {"explained_variance": -0.5}
    assert told(made(IdleCritic, least=-0.6), critic_of(-0.5)) == []


@pytest.mark.parametrize(
    ("norm", "length", "alarms"), [(10.0, 5, [(34, "")]), (10.0, 4, []), (9.99, 9, []), (1000.0, 9, [(34, "")])]
)
def test_wild_gradient(norm: float, length: int, alarms: list[tuple[int, str]]) -> None:
    metrics = steps(60, policy__grad_norm=lambda step: norm if 30 <= step < 30 + length else 1.0)
    assert told(made(WildGradient), metrics) == alarms
    early = steps(14, policy__grad_norm=from_step(9, 1.0, norm))
    assert told(made(WildGradient), early) == []


def test_stale_prompts() -> None:
    monitor = made(StaleData)
    assert told(monitor, steps(9, monitor__mine__repeated=from_step(4, 0.0, 0.5))) == [(6, "prompts")]
    assert told(monitor, steps(9, monitor__mine__repeated=from_step(4, 0.0, 0.49))) == []
    groups = [group([1, 0], name="a"), group([1, 0], name="b", epoch=1), group([1, 0], name="c", trained=False)]
    assert measured(monitor, *groups) == {"repeated": 0.0, "weights": 1.0}
    assert measured(monitor, *groups, previous=[(0, "a"), (0, "b"), (0, "c")])["repeated"] == 0.5


def test_stale_weights() -> None:
    def frozen(at: int, norms: Shape) -> list[tuple[int, str]]:
        metrics = steps(12, monitor__mine__weights=lambda step: float(min(step, at)), policy__grad_norm=norms)
        return told(made(StaleData), metrics)

    updated = always(1.0)
    assert frozen(5, updated) == [(8, "weights")] and frozen(12, updated) == []
    assert frozen(10, updated) == []  # two steps of the same
    assert frozen(5, lambda step: None) == []  # no step has updated anything


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_weights_that_are_behind_by_the_runs_lag_are_not_stale(lag: int) -> None:
    def sampled(by: int, frozen: int = 99) -> list[tuple[int, str]]:
        def weights(step: int) -> float:
            return float(min(max(step - 1 - by, 0), frozen))

        metrics = steps(16, monitor__mine__weights=weights, policy__grad_norm=always(1.0))
        return told(made(StaleData), metrics, run=replace(FACTS, staleness=lag))

    assert sampled(by=lag) == []
    assert sampled(by=lag, frozen=3) == [(3 + 1 + lag + 3, "weights")]
    assert sampled(by=8)[0] == (2 + lag + 2, "weights"), "further behind than the config says"


@pytest.mark.parametrize(
    ("metric", "limit", "cause"),
    [("reward/unscored_fraction", 0.1, "unscored"), ("reward/math_failed_fraction", 0.01, "failed/math")],
)
def test_rewards_that_do_not_score(metric: str, limit: float, cause: str) -> None:
    def share(value: float) -> Metrics:
        return {step: {metric: value if step > 3 else 0.0} for step in range(1, 9)}

    assert told(made(RewardFaults), share(limit)) == [(6, cause)]
    assert told(made(RewardFaults), share(limit * 0.99)) == []


def test_reference_answers_that_nothing_matches() -> None:
    never = steps(30, group__all_wrong_fraction=always(1.0))
    assert told(made(RewardFaults), never) == [(10, "never_right")]
    assert told(made(RewardFaults), steps(30, group__all_wrong_fraction=lambda step: 0.99 if step == 9 else 1.0)) == []


@pytest.mark.parametrize(
    ("best", "alarms"),
    [(0.0, True), (0.1, True), (0.45, True), (0.5, False), (0.95, False)],
)
def test_a_graded_reward_that_is_never_1_is_no_reference_that_nothing_matches(best: float, alarms: bool) -> None:
    never = steps(30, group__all_wrong_fraction=always(1.0), monitor__mine__best=always(best))
    assert told(made(RewardFaults), never) == ([(10, "never_right")] if alarms else [])
    equal = steps(
        30,
        group__zero_signal_fraction=always(0.9),
        group__all_correct_fraction=always(0.0),
        group__all_wrong_fraction=always(1.0),
        monitor__mine__best=always(best),
    )
    assert bool(told(made(DeadGroups), equal)) != alarms  # one of the two tells
    assert measured(made(DeadGroups), group([best, 0.0, np.nan])) == {"best": best}


def test_the_mean_of_a_graded_reward_counts_where_its_accuracy_says_nothing() -> None:
    rising, flat = (lambda step: step / 100 if step % 10 == 0 else None), (lambda step: 0.0 if step % 10 == 0 else None)
    graded = steps(60, reward__mean=lambda step: step / 100, eval__accuracy=flat, eval__reward_mean=rising)
    assert told(made(ProxyGain), graded) == []
    blank = lambda step: 0.5 if step < 30 else 0.05  # noqa: E731
    gaps = {step: {"eval_blank/reward_mean": 0.2, "eval_blank/mean_gap": blank(step)} for step in range(0, 90, 10)}
    for each in gaps.values():
        each |= {"eval_blank/accuracy": 0.0, "eval_blank/accuracy_gap": 0.0}
    assert [cause for _, cause in told(made(BlindPolicy), gaps)] == ["blind"]


def test_components_that_never_change() -> None:
    def constant(value: float, change: int = 99) -> list[tuple[int, str]]:
        metrics = steps(30, monitor__mine__range__form=from_step(change, 0.0, 1.0), reward__form_mean=always(value))
        return told(made(RewardFaults), metrics)

    assert constant(0.5) == [(21, "constant/form")] and constant(0.5, change=20) == []
    assert constant(0.0) == constant(1.0) == []
    groups = [group([1, np.nan], form=[2, 99]), group([1, 1], form=[5, np.nan])]
    assert measured(made(RewardFaults), *groups) == {"range/reward": 0.0, "range/form": 3.0, "best": 1.0}


STAYS, TWENTY = always(-1.0), always(20.0)


def pairs_of(chosen: Shape, rejected: Shape = STAYS, length: Shape = TWENTY) -> Metrics:
    """Steps whose chosen and rejected answers have these log-probs of a token."""
    return steps(
        30,
        preference__logprob_chosen=lambda step: (chosen(step) or 0.0) * (length(step) or 0.0),
        preference__logprob_rejected=lambda step: (rejected(step) or 0.0) * (length(step) or 0.0),
        preference__length_chosen=length,
        preference__length_rejected=length,
    )


@pytest.mark.parametrize(
    ("metrics", "alarms"),
    [
        (pairs_of(always(-1.0)), []),
        (pairs_of(from_step(16, -1.0, -1.19)), []),
        (pairs_of(from_step(16, -1.0, -1.21)), [22]),  # the fifth step is the first whose mean is under, then two more
        (pairs_of(from_step(16, -1.0, -0.5), from_step(16, -1.0, -3.0)), []),  # the rejected's alone
        (pairs_of(from_step(16, -1.0, -1.0), length=from_step(16, 20.0, 90.0)), []),  # longer answers
        (pairs_of(from_step(16, -0.01, -0.09)), []),  # too little in nats
        (pairs_of(from_step(3, -1.0, -9.0)), [14]),  # within the start: ten steps and three hits
        (pairs_of(lambda step: -1.0 - 1.5 * (step % 2)), []),  # the draw of the rows
    ],
)
def test_a_fall_of_the_chosens_logprob_is_told_from_a_fifth_of_the_start_on(
    metrics: Metrics, alarms: list[int]
) -> None:
    assert told(made(FallingChosen), metrics) == [(step, "") for step in alarms]


def test_options_of_a_fall_and_what_is_told_of_both_sides() -> None:
    metrics = pairs_of(from_step(16, -1.0, -1.1), from_step(16, -1.0, -2.0))
    assert told(made(FallingChosen), metrics) == [] != told(made(FallingChosen, share=0.05, least=0.05), metrics)
    (alarm,) = alarms_of(made(FallingChosen, share=0.05, least=0.05), metrics)
    assert alarm.values["chosen_at_the_start"] == -1 and alarm.values["rejected"] < alarm.values["chosen"] < -1
    assert "nll of dpo" in alarm.message and "beta" in alarm.message


def compared(
    *members: tuple[int, float], signs: Sequence[float] = (1, -1), reference: float | None = -1.0, trained: bool = True
) -> CreditedGroup:
    """A group of candidates, (tokens, log-prob of a token) each, the chosen first; 0 as a sign is in no loss."""
    rollouts = [
        replace(drawn([0.0] * tokens, [5] * tokens), weight_version=GIVEN, index=place)
        for place, (tokens, _) in enumerate(members)
    ]
    rewards = np.array([float(sign > 0) for sign in signs])
    scored = ScoredGroup(RolloutGroup(rollouts[0].prompt, tuple(rollouts)), rewards, np.ones(len(members), bool), {})
    logprobs = [
        np.full(tokens if sign else 0, value, np.float32) for (tokens, value), sign in zip(members, signs, strict=True)
    ]
    given = [] if reference is None else [np.full(tokens, reference, np.float32) for tokens, _ in members]
    return CreditedGroup(
        scored,
        [np.full(tokens, float(sign)) for (tokens, _), sign in zip(members, signs, strict=True)],
        logprobs,
        trained,
        given,
    )


def of_given(*groups: CreditedGroup) -> Mapping[str, float]:
    return made(LengthBias).measure(StepRecord(3, FACTS, read_given=lambda: groups))


def test_pairs_are_counted_by_the_longer_side_and_decided_by_the_log_ratio() -> None:
    """Log-ratios: 4 x 0.5 against 2 x 0.25; 1 x 0 against 3 x 0, a tie; 2 x -1 against 5 x -0.2; equal lengths."""
    groups = [
        compared((4, -0.5), (2, -0.75)),
        compared((1, -1.0), (3, -1.0)),
        compared((2, -2.0), (5, -1.2)),
        compared((3, -0.5), (3, -1.0)),
        compared((9, -0.5), (1, -1.0), trained=False),
    ]
    found = of_given(*groups)
    assert (found["pairs_longer"], found["pairs_shorter"]) == (1, 2)
    assert (found["accuracy_longer"], found["accuracy_shorter"]) == (1.0, 0.25)
    assert found["correlation"] == pytest.approx(np.corrcoef([1.5, 0, -1, 1.5], [2, -2, -3, 0])[0, 1], rel=1e-6)
    middle = compared((4, -0.5), (7, -3.0), (2, -0.75), signs=(1, 0, -1))
    assert of_given(middle) == {"pairs_longer": 1, "accuracy_longer": 1, "pairs_shorter": 0}


def test_without_a_reference_the_mean_logprob_decides_and_what_is_no_pair_is_not_measured() -> None:
    found = of_given(compared((4, -0.5), (2, -0.25), reference=None))
    assert found["accuracy_longer"] == 0
    assert of_given(compared((4, -0.5), signs=(1,))) == {} == of_given()
    assert of_given(compared((4, -0.5), (2, -0.5), signs=(1, 1))) == {}


def test_the_first_step_where_policy_and_reference_are_equal_has_ties_and_no_relation() -> None:
    found = of_given(*(compared((tokens, -1.0), (2, -1.0)) for tokens in (1, 3, 4, 5)))
    assert found["accuracy_longer"] == found["accuracy_shorter"] == 0.5 and "correlation" not in found


def decided(longer: float, shorter: float, *, pairs: tuple[float, float] = (6, 4), related: float = 0.2) -> Metrics:
    """Thirty steps of pairs with these accuracies, where the longer or the shorter answer is the better one."""
    numbers = {"pairs_longer": pairs[0], "pairs_shorter": pairs[1], "correlation": related}
    numbers |= ({"accuracy_longer": longer} if pairs[0] else {}) | ({"accuracy_shorter": shorter} if pairs[1] else {})
    return {step: {f"monitor/mine/{name}": value for name, value in numbers.items()} for step in range(1, 31)}


@pytest.mark.parametrize(
    ("metrics", "alarms"),
    [
        (decided(0.85, 0.3), [(24, "order")]),  # twenty shorter pairs are there at step 5, then nineteen steps more
        (decided(0.85, 0.32), []),
        (decided(0.78, 0.3), []),
        (decided(0.25, 0.8, pairs=(4, 6)), [(24, "order")]),
        (decided(0.9, 0.1, pairs=(5, 5)), []),  # lengths are preferred, and tell nothing of the data
        (decided(0.5, 0.5), []),
        (decided(0.9, 0.1, pairs=(9, 0.5)), []),  # too few pairs are shorter
        (decided(0.9, 0.0, pairs=(9, 0), related=0.5), [(19, "data")]),
        (decided(0.9, 0.0, pairs=(9, 0), related=0.45), []),
        (decided(0.9, 0.6, pairs=(8, 2), related=0.9), []),
    ],
)
def test_length_bias_is_told_from_its_thresholds_on(metrics: Metrics, alarms: list[tuple[int, str]]) -> None:
    assert told(made(LengthBias), metrics) == alarms


def test_a_bias_towards_shorter_answers_has_words_of_its_own() -> None:
    (alarm,) = alarms_of(made(LengthBias), decided(0.2, 0.9, pairs=(4, 6)))
    assert "the shorter answer is preferred, also where the longer one is better" in alarm.message
    (alarm,) = alarms_of(made(LengthBias), decided(0.9, 0.2))
    assert "the longer answer is preferred, also where the shorter one is better" in alarm.message
