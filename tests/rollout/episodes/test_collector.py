"""Episodes through the collector: scores, batches and metrics, each number by hand."""

from contextlib import ExitStack, nullcontext

import numpy as np
import pytest

from mmrl.config.load import from_mapping
from mmrl.data.order import request_seed
from mmrl.errors import ConfigError
from mmrl.interfaces import Algorithm, Needs
from mmrl.rollout.collector import Collector, step_metrics
from mmrl.rollout.episodes.failures import EpisodeError
from mmrl.rollout.episodes.player import EpisodePlayer
from mmrl.rollout.episodes.pool import EnvironmentPool
from mmrl.rollout.rewards.scorer import Scorer
from mmrl.runs.environment import checked_facts
from mmrl.system.clock import Clock
from mmrl.types import ENVIRONMENT, Message, Prompt
from tests.rollout.episodes.fakes import LetterEncoder, ScriptedSampler, media

REWARD = """
def ends(rollouts):
    assert not any(rollout.failure for rollout in rollouts)
    return [float(rollout.text == "end") for rollout in rollouts]
"""


@pytest.fixture(scope="module")
def pool(game):
    with EnvironmentPool(game(workers=2)) as found:
        yield found


class Greedy(Algorithm):
    source = "rollouts"
    aggregation = None

    def needs(self):
        return Needs(greedy_rollout=True)

    def credit(self, batch):
        raise AssertionError

    def loss(self, tokens):
        raise AssertionError


class Plain(Greedy):
    def needs(self):
        return Needs()


class Collecting:
    """A collector of real environments and rewards on a scripted sampler.

    Args:
        scripts: Turns of each episode, by prompt and member, ``greedy/`` and ``eval/`` before the prompt's name.
    """

    def __init__(self, stack, pool, folder, scripts, *, rewards=True, group_size=2, **environment):
        (folder / "rewards.py").write_text(REWARD)
        self.config = from_mapping(
            {
                "model": {"path": "m"},
                "data": {"train": {"name": "rows"}, "eval": {"name": "rows"}},
                "rewards": [{"name": f"{folder}/rewards.py:ends", "weight": 2.0}] if rewards else [],
                "algorithm": {"name": "any"},
                "environment": {"name": "game", **environment},
                "sampler": {"group_size": group_size, "max_new_tokens": 100},
                "trainer": {"steps": 1, "prompts_per_step": 2},
            }
        )
        self.turns = {
            request_seed(request_seed(self.config.trainer.seed, 0, name, 0), member, name.rpartition("/")[2], k): text
            for (name, member), texts in scripts.items()
            for k, text in enumerate(texts)
        }
        self.sampler = ScriptedSampler(lambda request: self.turns[request.seed])
        encoder = LetterEncoder(store := media(folder))
        player = EpisodePlayer(self.config.environment, 100, ("length",), pool, encoder, store)
        scorer, self.events = stack.enter_context(Scorer(self.config.rewards, workers=1)), []
        self.collector = Collector(
            self.config,
            self,
            scorer,
            lambda *news: None,
            event=lambda kind, **fields: self.events.append((kind, fields)),
            player=player,
        )
        self.prompts = [encoder.encode(Prompt(name, (Message("user", "go"),))) for name in ("p0", "p1")]
        self.clock = Clock()

    def sampling(self, version: int | None = None):
        return nullcontext(self.sampler)

    def train(self, algorithm=Plain):
        draw = lambda count: [(0, prompt) for prompt in self.prompts[:count]]  # noqa: E731
        return self.collector.training_groups(1, algorithm(None), draw, 2, self.clock)


@pytest.fixture
def collecting(pool, tmp_path):
    with ExitStack() as stack:
        yield lambda scripts, **options: Collecting(stack, pool, tmp_path, scripts, **options)


FOUR = {
    ("p0", 0): ["pay 2", "end"],
    ("p0", 1): ["use x", "pay 1"],
    ("p1", 0): ["pay 3", "raise_it"],
    ("p1", 1): ["abc", "end"],
}


def test_a_step_has_scores_turns_and_metrics_of_its_episodes(collecting):
    step = collecting(FOUR, max_turns=2, weights={"length": 0.1})
    found = step.train()
    batch = step.collector.batch(found.groups)
    # environment: 2 + 1, 0 + 1, failed, 0 + 1; length: 5 + 3, 5 + 5, failed, 3 + 3; ends: 1, 0, -, 1, of weight 2
    assert batch.components[ENVIRONMENT].tolist()[:2] == [3.0, 1.0] and batch.components[ENVIRONMENT][3] == 1.0
    assert batch.components["length"][[0, 1, 3]].tolist() == [8.0, 10.0, 6.0]
    assert batch.components["ends"][[0, 1, 3]].tolist() == [1.0, 0.0, 1.0]
    assert all(np.isnan(values[2]) for values in batch.components.values())
    np.testing.assert_allclose(batch.rewards, [3 + 0.8 + 2, 1 + 1.0, 0, 1 + 0.6 + 2])
    assert batch.valid.tolist() == [True, True, False, True]
    assert batch.weights == {ENVIRONMENT: 1.0, "length": 0.1, "ends": 2.0}
    assert batch.truncated.tolist() == [False, True, False, False]
    assert batch.turn_rewards[0].tolist() == [2.0, 1.0] and batch.turn_rewards[1].tolist() == [0.0, 1.0]
    # "pay 2" and its end are 6 tokens, what is inserted ("paid>") is of that turn.
    assert batch.turns[0].tolist() == [0] * 11 + [1] * 4
    states = batch.turn_states
    assert [len(each) for each in states] == [2, 2, 2, 2]
    assert states[0][0] == states[1][0] != states[2][0] == states[3][0]  # the prompts
    assert states[0][1] == states[2][1] not in (states[1][1], states[3][1])  # what was paid
    assert [group.prompt.id for group in step.collector.generated] == ["p0", "p1"]

    values = step_metrics(found, batch, "ends", refills=False)
    assert {name: value for name, value in values.items() if name.startswith("episode/")} == {
        "episode/turns_mean": 2.0,
        "episode/calls_mean": 0.25,
        "episode/invalid_calls_fraction": 0.0,
        "episode/observation_tokens_mean": (5 + 6 + 5 + 4) / 4,  # paid> USE X> paid> ABC>
        "episode/finish_environment_fraction": 0.5,
        "episode/finish_turns_fraction": 0.25,
        "episode/finish_length_fraction": 0.0,
        "episode/finish_budget_fraction": 0.0,
        "episode/finish_failed_fraction": 0.25,
        "episode/failed_calls_fraction": 1 / 15,  # 4 resets, 8 turns, 3 scores
    }
    assert values["reward/unscored_fraction"] == 0.25
    perf = step.clock.metrics(1)
    assert perf["perf/environment_s"] > 0 and perf["perf/environment_wait_s"] > 0
    others = [value for name, value in perf.items() if name.endswith("_s") and "environment" not in name]
    rates = perf["perf/tokens_per_s"] + perf.get("perf/generate_tokens_per_s", 0.0)
    assert sum(others) - rates == pytest.approx(2 * perf["perf/step_s"])
    assert [kind for kind, _ in step.events] == ["environment_failed"]


def test_an_environment_alone_scores(collecting):
    step = collecting(FOUR, max_turns=2, rewards=False, weights={ENVIRONMENT: 10.0})
    assert step.config.accuracy == ENVIRONMENT
    batch = step.collector.batch(step.train().groups)
    assert batch.rewards.tolist() == [30.0 + 8, 10.0 + 10, 0.0, 10.0 + 6]
    assert [*batch.components] == [ENVIRONMENT, "length"]


def test_an_episode_whose_rewards_have_no_finite_sum_is_invalid(collecting):
    step = collecting({**FOUR, ("p0", 0): ["pay 1e308", "pay 1e308"]}, max_turns=2, weights={"length": 0.0})
    batch = step.collector.batch(step.train().groups)
    assert batch.valid.tolist() == [False, True, False, True]
    assert np.isfinite(batch.rewards).all()


def test_a_greedy_episode_shares_its_groups_environment(collecting):
    scripts = {**FOUR, ("p1", 0): ["dice", "end"], ("p1", 1): ["dice", "end"]}
    scripts |= {("greedy/p0", 0): ["pay 5", "end"], ("greedy/p1", 0): ["dice", "end"]}
    step = collecting(scripts, max_turns=2)
    groups = step.train(Greedy).groups
    assert [group.greedy.rollouts[0].greedy for group in groups] == [True, True]
    assert groups[0].greedy.components[ENVIRONMENT].tolist() == [6.0]
    sampled, greedy = groups[1].rollouts[0], groups[1].greedy.rollouts[0]
    assert sampled.episode[0].content == greedy.episode[0].content
    temperatures = [request.temperature for request in step.sampler.requests if not request.segments]
    assert temperatures == [1.0] * 4 + [0.0] * 2
    assert step.collector.batch(groups).greedy_components[ENVIRONMENT].tolist() == [6.0, 6.0, 1.0, 1.0]


def test_an_evaluation_plays_episodes_of_its_own_seeds(collecting):
    scripts = {
        **FOUR,
        ("p1", 0): ["dice", "end"],
        ("p0", 1): ["end"],
        ("eval/p0", 0): ["end"],
        ("eval/p1", 0): ["dice", "use x", "end"],
    }
    step = collecting(scripts, max_turns=3)
    found = step.collector.evaluate(step.prompts, step.config.evaluations[""])
    assert found.metrics["eval/accuracy"] == 1.0
    assert found.metrics[f"eval/{ENVIRONMENT}_mean"] == 1.0
    assert found.metrics["eval/episode/turns_mean"] == 2.0
    assert found.metrics["eval/episode/calls_mean"] == 0.5
    assert found.metrics["eval/episode/failed_calls_fraction"] == 0.0
    ((dice,),) = [found.groups[1].rollouts[0].episode[0].content]
    trained = step.train().groups[1].rollouts[0]
    assert trained.episode[0].content != (dice,)


def test_too_many_failures_stop_the_step_and_leave_nothing_open(collecting, pool):
    step = collecting({**FOUR, ("p0", 1): ["crash"], ("p1", 1): ["raise_it"]}, max_turns=2)
    with pytest.raises(EpisodeError, match="environment 'game' failed in 2 of the step's"):
        step.train()
    assert sum(lane.num_sessions for lane in pool._lanes) == 0
    assert step.sampler.dropped == 1


def test_early_failures_count_at_the_end_where_others_might_have_gone_on(collecting):
    """Two of 12 calls are too many; of the 128 that four episodes of 30 turns might have made they were not."""
    step = collecting({**FOUR, ("p0", 1): ["raise_it"], ("p1", 0): ["raise_it"]}, max_turns=30)
    with pytest.raises(EpisodeError, match="environment 'game' failed in 2 of the step's 12 calls; the last time"):
        step.train()
    assert [kind for kind, _ in step.events] == ["environment_failed"] * 2


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"rewards": [{"name": "r", "label": "length"}]},
            "a reward and the environment both answer a component 'length'",
        ),
        ({"rewards": [{"name": "r", "label": ENVIRONMENT}]}, "both answer a component 'environment'"),
        ({"weights": {"lenght": 1.0}}, "the environment scores no lenght"),
        ({"trainer": {"steps": 1, "eval_metric": "accuracy"}}, "trainer.eval_metric is 'accuracy', which neither"),
    ],
)
def test_components_must_go_together_before_anything_starts(game, monkeypatch, sections, message):
    monkeypatch.setattr("mmrl.runs.environment.environment_facts", lambda spec: facts_of(("length",)))
    weights = sections.pop("weights", {})
    base = {
        "model": {"path": "m"},
        "data": {"train": {"name": "rows"}, "eval": {"name": "rows"}},
        "algorithm": {"name": "any"},
        "rewards": [],
        "trainer": {"steps": 1},
        "environment": {"name": "game", "weights": weights},
    }
    with pytest.raises(ConfigError, match=message):
        checked_facts(from_mapping(base | sections))
    good = from_mapping(base | {"trainer": {"steps": 1, "eval_metric": "length"}, "environment": {"name": "game"}})
    assert checked_facts(good).components == ("length",)


def facts_of(components):
    from mmrl.rollout.episodes.process import EnvironmentFacts

    return EnvironmentFacts((), components, 1.0)
