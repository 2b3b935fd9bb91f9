"""Rewards that look at rows before anything starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mmrl.config.plugin_specs import RewardSpec
from mmrl.errors import DataError, PluginError
from mmrl.plugin_host import registry
from mmrl.runs.scored_rows import FIRST, right_answer, row_warnings, writing
from mmrl.runs.setup import RunSetup
from mmrl.types import EncodedPrompt, ImageRef, Prompt

REWARDS = """
from mmrl.interfaces import Reward

class Plain(Reward):
    def __init__(self, config):
        raise RuntimeError("as large as a model, made in the driver")

    def score(self, rollouts): ...

class Looks(Reward):
    class Config(Reward.Config):
        says: str | list[str] | None = []

    def check_rows(self, prompts):
        sizes = {image.file_size for prompt in prompts for image in prompt.images}
        return self.config.says or [f"{len(prompts)} rows from {prompts[0].id} to {prompts[-1].id} of {sizes}"]

    def right_answer(self, prompt):
        return self.config.says or f"{prompt.prompt.answer} of {prompt.images[0].file_size}"

    def score(self, rollouts): ...
"""


ABOUT = {"data.train": {"answer": "bbox"}, "data.mix.0": {"prompt": "q"}, "data.eval": {"answer": "target"}}


@pytest.fixture
def setup(package: Any) -> Any:
    """A run with these rewards and forty rows, of which one has no image that can be read."""
    package(REWARDS, "plain = {module}:Plain\nlooks = {module}:Looks", name="rewards-kit")

    def measure(prompt: Prompt) -> EncodedPrompt:
        if prompt.id == "row 3":
            raise DataError("no image")
        images = (ImageRef("", 28, 28, "", (40, 30)),)
        return EncodedPrompt(prompt=prompt, text="", token_ids=np.zeros(0, np.int32), images=images)

    class Rows(list[Prompt]):
        name = "data.train"

    def build(*rewards: dict[str, Any], samples: bool = True, name: str = "data.train") -> Any:
        rows = Rows(Prompt(f"row {k}", (), answer=k, source="ab"[k % 2]) for k in range(40))
        rows.name = name
        made = SimpleNamespace(
            config=SimpleNamespace(rewards=[RewardSpec(**each) for each in rewards]),
            step_source=SimpleNamespace(samples=samples),
            encoder=SimpleNamespace(measure=measure),
            loaded={key: SimpleNamespace(about=about) for key, about in ABOUT.items()},
            loaded_for=lambda name: RunSetup.loaded_for(made, name),
        )
        return made, rows

    return build


def test_warnings_about_rows_name_dataset_column_and_reward(setup):
    run, rows = setup({"name": "plain"}, {"name": "looks"})
    at = "data.train, column bbox, rewards.1: looks:"
    assert row_warnings(run, rows) == [f"{at} {FIRST - 1} rows from row 0 to row {FIRST - 1} of {{(40, 30)}}"]
    assert row_warnings(run, rows, (1, 39, 77)) == [f"{at} 2 rows from row 1 to row 39 of {{(40, 30)}}"]
    run, rows = setup({"name": "looks", "sources": ["b"]}, name="data.eval")
    assert row_warnings(run, rows, range(3)) == [
        "data.eval, column target, rewards.0: looks: 1 rows from row 1 to row 1 of {(40, 30)}"
    ]


def test_rows_that_no_reward_scores_are_not_looked_at(setup):
    run, rows = setup({"name": "plain"})
    assert row_warnings(run, rows) == []
    assert row_warnings(*setup({"name": "looks"}, samples=False)) == []
    assert len(row_warnings(*setup({"name": "looks"}, samples=False, name="data.eval"))) == 1


@pytest.mark.parametrize("says", ["a text", [1], [None]])
def test_what_is_no_list_of_texts_is_a_plugin_error(says, setup, monkeypatch):
    run, rows = setup({"name": "looks"})
    monkeypatch.setattr(registry.resolve("reward", "looks"), "check_rows", lambda self, prompts: says)
    with pytest.raises(PluginError, match="expected a list of texts"):
        row_warnings(run, rows)


def test_a_right_answer_is_the_rewards_own_where_it_has_one(setup):
    run, rows = setup({"name": "plain"}, {"name": "looks"}, {"name": "looks", "says": ["no text"]})
    plain, looks, wrong = map(writing, run.config.rewards)
    assert plain is None
    seen = run.encoder.measure(rows[7])
    assert right_answer(looks, seen) == "7 of (40, 30)"
    with pytest.raises(PluginError, match="expected a text or None"):
        right_answer(wrong, seen)
