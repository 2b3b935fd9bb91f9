"""Every algorithm on the real learner: a tiny vision-language model, two steps of two updates each, in this process."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from mmrl.commands.cli import main
from mmrl.engine.rank import RankEngine
from mmrl_datasets.digits import write_digits
from tests.faults.runs import rollouts

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["mmrl.algorithms"]
PAIRS = ["dpo", "mpo", "orpo", "simpo"]
ALGORITHMS = sorted(PLUGINS.keys() - {"sft", "gigpo", "kto", "opd", "ppo", "bradley_terry", *PAIRS})
"""Those that learn from completions with rewards: ``gigpo`` needs episodes, ``kto`` labels, ``opd`` a teacher, ``ppo``
a critic, and ``bradley_terry`` a network with a score."""
OF_SEVERAL_NETWORKS = {"ppo", "vc_ppo", "vapo", "opd"}
"""What the comparison runs from files of its own."""
ENVIRONMENT = '''\
from mmrl import Environment, Observation

class Parity(Environment):
    """There are two states: the policy has just written an even number of characters, or an odd one."""

    def reset(self, prompt, seed):
        return

    def step(self, turn):
        odd = len(turn.text) % 2
        return Observation("odd" if odd else "even", float(odd) - 0.1 * turn.text.count("a"), role="user")
'''
OFTEN = {"cispo": [], "gspo": [pytest.mark.full], "reinforce_pp": [pytest.mark.full], "rloo": []}
"""One of each kind; the others are trained by the soak tier, and with the fake engine in ``tests.commands.replay``."""
REWARDS = '''\
"""Each completion is right or wrong by the parity of its first token, where that is not the same for all."""

def even(rollouts):
    return [float(rollout.token_ids[0] % 2 == 0) for rollout in rollouts]

def mostly_constant(rollouts):
    """Only the prompts with a digit from 0 to 2 have right and wrong completions."""
    digit = int(rollouts[0].answer)
    return even(rollouts) if digit < 3 else [float(digit > 6)] * len(rollouts)

def constant(rollouts):
    return [1.0] * len(rollouts)
'''


@dataclass
class Run:
    """A finished run."""

    path: Path

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """Metrics of the training steps."""
        return self._lines("metrics.jsonl")[1:]

    @property
    def events(self) -> list[dict[str, Any]]:
        return self._lines("events.jsonl") if (self.path / "events.jsonl").exists() else []

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        return rollouts(self.path, step)

    def weights(self) -> dict[str, Any]:
        return load_file(self.path / "checkpoints" / "step-000002" / "model" / "model.safetensors")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def train(models, start, tmp_path_factory) -> Callable[..., Run]:
    """Runs an algorithm with its own defaults; further words as on the command line.

    ``start`` leaves the process group at the end of all tests: DeepSpeed does not find its way into a second one.
    """
    folder = tmp_path_factory.mktemp("algorithms")
    write_digits(folder / "digits", train=64, test=1)
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "parity.py").write_text(ENVIRONMENT)
    config = {
        "model": {"path": str(models("qwen2_5_vl"))},
        "data": {"train": {"name": "table", "path": str(folder / "digits"), "split": "train"}, "max_prompt_tokens": 64},
        "algorithm": {"name": "named by each test"},
        "sampler": {"name": "hf", "group_size": 4, "max_new_tokens": 8},
        "learner": {"lr": 1e-3, "zero_stage": 0, "minibatches": 2},
        "trainer": {"steps": 2, "prompts_per_step": 4},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))

    def run(name: str, *words: str, reward: str = "even") -> Run:
        path, function = tmp_path_factory.mktemp(name), f"{folder / 'rewards.py'}:{reward}"
        words += (f"algorithm.name={name}", f"trainer.run_dir={path}", f"rewards=[{{name: {function}, label: exact}}]")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RankEngine, "close", lambda self: None)
            assert main(["train", str(folder / "config.yaml"), *words]) == 0
        return Run(path)

    run.folder = folder
    return run


@pytest.fixture(scope="module")
def documented() -> re.Pattern[str]:
    """Matches the metrics in the table of the plugins' page, and in that of episodes.

    In a cell a name without a section has that of the one before, and one that begins with ``_`` replaces its end.
    """
    tables = {"plugins": "### Every metric", "mmrl/runs": "## Metrics of episodes"}
    pages = ((ROOT / folder / "README.md").read_text().partition(title)[2] for folder, title in tables.items())
    names: list[str] = []
    for row in (row for page in pages for row in page.partition("\n## ")[0].splitlines()):
        for name in re.findall(r"`([^`]+)`", row.split("|")[1] if row.startswith("|") else ""):
            if name.startswith("_"):
                names.append(names[-1].rpartition("_")[0] + name)
            else:
                names.append(name if "/" in name or name == "lr" else f"{names[-1].partition('/')[0]}/{name}")
    assert {"lr", "perf/sync_s", "mismatch/logprob_abs_max", "reward/<name>_mean", "episode/turns_mean"} <= set(names)
    return re.compile("|".join(re.sub("<.+>", ".+", re.escape(name)).replace(r"/\*", "/.+") for name in names))


@pytest.mark.parametrize("name", [pytest.param(name, marks=OFTEN.get(name, [pytest.mark.slow])) for name in ALGORITHMS])
def test_an_algorithm_trains(name, train, models, compare, documented):
    run = train(name)
    before, after = load_file(models("qwen2_5_vl") / "model.safetensors"), run.weights()
    assert len(run.steps) == 2
    for step in run.steps:
        assert [key for key, value in step.items() if value is None or not math.isfinite(value)] == []
        assert {*compare.ALWAYS, *compare.METRICS.get(name, ())} - step.keys() == set()
        assert [key for key in step if not documented.fullmatch(key)] == ["step", "attempt", "time"]
        assert step["policy/grad_norm"] > 0 and step["advantage/abs_mean"] > 0
        assert step["policy/ppo_kl_k3"] > 0  # the second update is off-policy
    if "kl/coef" in run.steps[1]:
        assert abs(run.steps[1]["kl/reference"]) > 1e-4  # the policy has left the reference, which stays
    assert {key for key, weight in before.items() if np.array_equal(weight, after[key])} == set()
    assert all(np.isfinite(weight).all() for weight in after.values())


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.full) for each in PAIRS[:2]]
    + [pytest.param(each, marks=pytest.mark.slow) for each in PAIRS[2:]],
)
def test_sampled_pairs_train(name, train, models, documented, capsys):
    target = PLUGINS[name]
    run = train(f"import:{target}", "algorithm.data=sampled", "learner.minibatches=1")
    before, after = load_file(models("qwen2_5_vl") / "model.safetensors"), run.weights()
    for number, step in enumerate(run.steps, start=1):
        assert [key for key, value in step.items() if value is None or not math.isfinite(value)] == []
        assert [key for key in step if not documented.fullmatch(key)] == ["step", "attempt", "time"]
        assert step["policy/grad_norm"] > 0 and step["preference/length_chosen"] > 0
        groups: dict[str, list[Any]] = {}
        for record in run.rollouts(number):
            groups.setdefault(record["prompt_id"], []).append(record)
        of_pairs = [[e["reward"] for e in own if e["learner_logprobs"]] for own in groups.values()]
        assert {tuple(sorted(rewards)) for rewards in of_pairs} <= {(), (0.0, 1.0)}
        assert sum(not rewards for rewards in of_pairs) == step["preference/ties"] < 4
    assert {key for key, weight in before.items() if np.array_equal(weight, after[key])} == set()
    capsys.readouterr()
    assert main(["replay", str(run.path)]) == 0


@pytest.mark.full
def test_gigpo_trains_on_turns_that_acted_upon_the_same_state(train, models, documented, capsys):
    limits = "max_turns: 3, max_turn_tokens: 4, max_observation_tokens: 60, workers: 1"
    folder = train.folder
    run = train("gigpo", f"environment={{name: {folder / 'parity.py'}:Parity, {limits}}}", "sampler.max_new_tokens=16")
    before, after = load_file(models("qwen2_5_vl") / "model.safetensors"), run.weights()
    for number, step in enumerate(run.steps, start=1):
        assert [key for key, value in step.items() if value is None or not math.isfinite(value)] == []
        assert [key for key in step if not documented.fullmatch(key)] == ["step", "attempt", "time"]
        assert step["policy/grad_norm"] > 0 and step["policy/ppo_kl_k3"] > 0
        assert step["group/shared_states_fraction"] > 0.5 and step["advantage/turn_abs_mean"] > 0
        assert step["mismatch/logprob_abs_max"] < 1e-4
        for record in run.rollouts(number):
            own = np.array(record["mask"])
            of_turn = np.cumsum(np.diff(own, prepend=False) & own)
            by_turn = [set(np.array(record["advantage"])[own & (of_turn == turn)]) for turn in (1, 2, 3)]
            assert [len(values) for values in by_turn] == [1, 1, 1] and len(set.union(*by_turn)) > 1
    assert {key for key, weight in before.items() if np.array_equal(weight, after[key])} == set()
    capsys.readouterr()
    assert main(["replay", str(run.path)]) == 0


def test_the_comparison_runs_every_algorithm_and_no_other(compare):
    assert sorted({*compare.COMPARED, *compare.SMOKED} - OF_SEVERAL_NETWORKS) == ALGORITHMS
    assert compare.METRICS.keys() <= {*ALGORITHMS, *OF_SEVERAL_NETWORKS}


@pytest.mark.full
def test_ppo_trains_policy_and_critic_on_pictures(train, models, documented):
    """The critic alone in the first step, and both in the second; values are on record at each token."""
    words = ["critic.lr=1.0e-3", "critic.pretrain_steps=1", "algorithm.bootstrap=true", "learner.epochs=2"]
    run = train("ppo", *words, "trainer.save_every=1")
    assert main(["replay", str(run.path), "--step", "1-2"]) == 0
    of_critic = {"loss", "explained_variance", "clip_fraction", "grad_norm", "lr", "value_mean", "return_mean"}
    for number, step in enumerate(run.steps, 1):
        assert [key for key, value in step.items() if value is None or not math.isfinite(value)] == []
        assert [key for key in step if not documented.fullmatch(key)] == ["step", "attempt", "time"]
        assert {f"critic/{name}" for name in of_critic} <= step.keys()
        assert step["critic/grad_norm"] > 0 and step["critic/lr"] == pytest.approx(1e-3)
        assert ("policy/grad_norm" in step) is ("advantage/abs_mean" in step) is (number == 2)
        for record in run.rollouts(number):
            assert len(record["value"]) == len(record["return"]) == len(record["token_ids"])
            assert len(record["update_value"]) == 2
            assert len(record["update_entropy"]) == (2 if number == 2 else 0)
            assert record["finish_reason"] == "length" or record["final_value"] == 0
    first, second = (np.concatenate([record["value"] for record in run.rollouts(step)]) for step in (1, 2))
    assert not first.any() and second.any()  # a new head is zero
    assert run.steps[1]["policy/ppo_kl_k3"] > 0 and {event["kind"] for event in run.events} <= {"numerics"}
    start, after = load_file(models("qwen2_5_vl") / "model.safetensors"), run.weights()
    assert {key for key, weight in start.items() if np.array_equal(weight, after[key])} == set()
    folder = run.path / "checkpoints" / "step-000001"
    after = load_file(folder / "model" / "model.safetensors")
    assert all(np.array_equal(weight, after[key]) for key, weight in start.items())
    critic = load_file(folder / "critic" / "model" / "model.safetensors")
    assert critic["score.weight"].any() and not [key for key in critic if key.startswith("lm_head")]


def test_remax_compares_with_a_greedy_rollout_that_is_not_trained_on(train):
    run = train("remax", "algorithm.kl.coef=0")
    for step in (1, 2):
        records = run.rollouts(step)
        greedy = {record["prompt_id"]: record for record in records if record["greedy"]}
        sampled = [record for record in records if not record["greedy"]]
        assert len(greedy) == 4 and len(sampled) == 16
        assert all(record["learner_logprobs"] == [] for record in greedy.values())
        for record in sampled:
            expected = record["reward"] - greedy[record["prompt_id"]]["reward"]
            assert record["advantage"] == [pytest.approx(expected)] * len(record["token_ids"])
            assert len(record["learner_logprobs"]) == len(record["token_ids"])
        mean = np.mean([record["reward"] for record in greedy.values()])
        assert run.steps[step - 1]["reward/greedy_mean"] == pytest.approx(mean)


@pytest.mark.full
def test_dapo_fills_its_batch_where_most_groups_have_no_signal(train):
    run = train("dapo", reward="mostly_constant")
    seen = []
    for number, step in enumerate(run.steps, start=1):
        records = run.rollouts(number)
        kept = [record for record in records if record["kept"]]
        assert len(kept) == 4 * 4  # the batch is full
        assert {int(record["answer"]) for record in kept} <= {0, 1, 2}
        assert all(record["advantage"][0] != 0 and record["learner_logprobs"] for record in kept)
        rejected = [record for record in records if not record["kept"]]
        assert all(not any(record["advantage"]) for record in rejected)
        assert {record["rewards"]["exact"] for record in rejected if int(record["answer"]) > 2} == {0.0, 1.0}
        assert step["rollout/acceptance_rate"] == pytest.approx(len(kept) / len(records))
        assert step["rollout/acceptance_rate"] < 0.5
        assert step["rollout/sampled_groups"] == len(records) / 4 and step["rollout/rounds"] > 1
        assert step["group/zero_signal_fraction"] == pytest.approx(1 - step["rollout/acceptance_rate"])
        assert step["policy/grad_norm"] > 0
        seen += dict.fromkeys(record["prompt_id"] for record in records)
    assert len(set(seen)) == len(seen)  # each replacement is the next prompt of the order


@pytest.mark.full
def test_dapo_ends_normally_where_no_group_has_a_signal(train, models):
    run = train("dapo", "algorithm.dynamic_sampling.max_rounds=2", reward="constant")
    assert len(run.steps) == 2
    for number, step in enumerate(run.steps, start=1):
        assert step["rollout/acceptance_rate"] == 0 and step["rollout/rounds"] == 3
        assert not any(record["kept"] for record in run.rollouts(number))
        assert len(run.rollouts(number)) == 3 * 4 * 4
    assert [event["kind"] for event in run.events].count("starved") == 2
    before, after = load_file(models("qwen2_5_vl") / "model.safetensors"), run.weights()
    assert all(np.array_equal(weight, after[key]) for key, weight in before.items())
