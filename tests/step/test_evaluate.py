"""Evaluations, and those with blank images: which prompts they ask, and the gap by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest

from mmrl.config.evaluations import EvaluationSet
from mmrl.config.load import from_mapping
from mmrl.config.sections import Config, TrainerConfig
from mmrl.errors import ConfigError
from mmrl.rollout.collector import Evaluation
from mmrl.step.evaluate import ComparisonEvaluator, Evaluator
from mmrl.step.forward import Judged
from mmrl.step.gather import not_trained_on
from mmrl.testing.rollouts import make_rollouts
from mmrl.types import CreditedGroup, EncodedPrompt, ImageRef, RolloutGroup, ScoredGroup

PICTURE, GREY = ImageRef("a", 56, 28, ""), ImageRef("grey", 56, 28, "")


def prompts(count: int, *, pictured: Callable[[int], bool]) -> list[EncodedPrompt]:
    images = [[PICTURE] if pictured(place) else [] for place in range(count)]
    return [make_rollouts([""], question=f"p{i}", images=images[i])[0].prompt for i in range(count)]


@dataclass
class Parts:
    """A source, an encoder, a collector and a recorder: a prompt is right with its picture, or if it has none."""

    prompts: Sequence[EncodedPrompt]
    unscored: frozenset[str] = frozenset()
    asked: list[list[str]] = field(default_factory=list)
    recorded: list[tuple[int, bool, list[CreditedGroup]]] = field(default_factory=list)
    ways: list[EvaluationSet] = field(default_factory=list)

    def each(self, encode: Any) -> Sequence[EncodedPrompt]:
        return self.prompts

    def encode(self, prompt: Any) -> Any:
        raise AssertionError("prompts are encoded already")

    def blanked(self, prompt: EncodedPrompt) -> EncodedPrompt:
        return replace(prompt, images=tuple(GREY for _ in prompt.images))

    def evaluate(self, found: Sequence[EncodedPrompt], how: EvaluationSet) -> Evaluation:
        self.ways.append(how)
        self.asked.append([prompt.id for prompt in found])
        groups = [self._group(prompt) for prompt in found]
        right = np.nanmean([group.component("right")[0] for group in groups])
        return Evaluation(groups, (), {"eval/accuracy": float(right), "eval/length/completion_mean": 7.0})

    def _group(self, prompt: EncodedPrompt) -> ScoredGroup:
        is_right = GREY not in prompt.images or prompt.id == "p1"
        value = np.array([np.nan if prompt.id in self.unscored else float(is_right)])
        group = RolloutGroup(prompt, tuple(make_rollouts([""])))
        return ScoredGroup(group, np.nan_to_num(value), ~np.isnan(value), {"right": value})

    def evaluation(self, step: int, groups: Sequence[CreditedGroup], *, name: str, blank: bool) -> None:
        self.recorded.append((step, blank, list(groups)))


def config(**trainer: Any) -> Config:
    base = {"model": {"path": "m"}, "data": {"train": {"name": "t"}, "eval": {"name": "t"}}}
    rest = {"rewards": [{"name": "right"}], "algorithm": {"name": "a"}}
    return from_mapping({**base, **rest, "trainer": {"steps": 50, "eval_every": 5, **trainer}})


def evaluator(parts: Parts, **trainer: Any) -> Evaluator:
    any_parts = cast(Any, parts)
    return Evaluator(config(**trainer), {"": any_parts}, any_parts, any_parts, parts)


def test_64_prompts_with_images_are_answered_again_with_blank_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmrl.step.evaluate.NUM_BLANK", 3)
    parts = Parts(prompts(9, pictured=lambda place: place % 3 != 0))  # p1 p2 p4 p5 p7 p8
    values = evaluator(parts, blank_every=2).evaluate(10)
    assert parts.asked == [[f"p{i}" for i in range(9)], ["p1", "p4", "p7"]]
    assert values["eval/accuracy"] == 1.0
    assert values["eval_blank/accuracy"] == pytest.approx(1 / 3)  # p1 is right without its picture
    assert values["eval_blank/accuracy_gap"] == values["eval_blank/mean_gap"] == pytest.approx(2 / 3)
    assert values["eval_blank/length/completion_mean"] == 7.0
    assert [(step, blank, len(groups)) for step, blank, groups in parts.recorded] == [(10, False, 9), (10, True, 3)]
    blank = parts.recorded[1][2]
    assert [group.scored.group.prompt.images for group in blank] == [(GREY,)] * 3
    assert not any(group.trained for group in blank)


def test_the_gap_of_a_graded_reward_is_that_of_its_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Parts._group

    def graded(parts: Parts, prompt: EncodedPrompt) -> ScoredGroup:
        group = whole(parts, prompt)
        return replace(group, components={"right": np.where(group.components["right"] == 1, 0.8, 0.1)})

    monkeypatch.setattr(Parts, "_group", graded)
    parts = Parts(prompts(3, pictured=lambda place: True))  # p1 needs no picture
    values = evaluator(parts, blank_every=1).evaluate(5)
    assert values["eval_blank/mean_gap"] == pytest.approx(0.7 * 2 / 3)


def test_prompts_without_images_or_scores_are_not_asked_again() -> None:
    parts = Parts(prompts(4, pictured=lambda place: place < 2), unscored=frozenset({"p0"}))
    values = evaluator(parts, blank_every=1).evaluate(5)
    assert parts.asked[1] == ["p1"] and values["eval_blank/accuracy_gap"] == values["eval_blank/mean_gap"] == 0.0
    text = Parts(prompts(4, pictured=lambda place: False))
    assert set(evaluator(text, blank_every=1).evaluate(5)) == {"eval/accuracy", "eval/length/completion_mean"}
    assert len(text.asked) == len(text.recorded) == 1


@pytest.mark.parametrize(
    ("every", "due"), [(0, []), (1, [0, 5, 10, 15, 20, 22]), (2, [0, 10, 20, 22]), (3, [0, 15, 22])]
)
def test_blank_images_are_due_at_every_so_many_evaluations_and_at_the_last(every: int, due: list[int]) -> None:
    trainer = TrainerConfig(steps=22, eval_every=5, blank_every=every)
    assert [step for step in range(23) if trainer.evaluates(step) and trainer.blanks(step)] == due


def test_blank_images_without_an_evaluation_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer.blank_every counts evaluations"):
        config(eval_every=0, blank_every=1)
    with pytest.raises(ConfigError, match=r"trainer.blank_every is set, but data.eval is null"):
        from_mapping({"model": {"path": "m"}, "data": {"train": {"name": "t"}}, "rewards": [{"name": "right"}],
                      "algorithm": {"name": "a"}, "trainer": {"blank_every": 1}})  # fmt: skip


def test_each_set_is_asked_in_its_own_way_and_has_metrics_of_its_own() -> None:
    first, second = Parts(prompts(2, pictured=lambda place: True)), Parts(prompts(3, pictured=lambda place: True))
    data = {"train": {"name": "t"}, "eval": {"a": {"name": "t"}, "b": {"name": "t", "samples": 4, "temperature": 0.3}}}
    base = {"model": {"path": "m"}, "rewards": [{"name": "right"}], "algorithm": {"name": "a"}, "data": data}
    both = from_mapping({**base, "trainer": {"steps": 50, "eval_every": 5, "blank_every": 1}})
    all_parts, sources = cast(Any, first), cast(Any, {"a": first, "b": second})
    found = Evaluator(both, sources, all_parts, all_parts, first)
    assert found.reads
    values = found.evaluate(5)
    assert not found.reads and first.asked == [["p0", "p1"], ["p0", "p1"], ["p0", "p1", "p2"], ["p0", "p1", "p2"]]
    assert [(how.name, how.num_samples, how.temperature) for how in first.ways] == [("a", 1, 0.0)] * 2 + [
        ("b", 4, 0.3)
    ] * 2
    assert values["eval/a/accuracy"] == values["eval/b/accuracy"] == 1.0
    assert values["eval_blank/a/accuracy_gap"] == pytest.approx(1 / 2)  # p1 is right without its picture
    assert values["eval_blank/b/accuracy_gap"] == values["eval_blank/b/mean_gap"] == pytest.approx(2 / 3)
    assert {name.split("/")[1] for name in values} == {"a", "b"}


def in_category(prompt: EncodedPrompt, category: str) -> EncodedPrompt:
    return replace(prompt, prompt=replace(prompt.prompt, category=category))


def test_accuracies_by_category_stand_beside_those_of_the_set() -> None:
    """p1 is right without its picture, p0 and p2 are not; p3 has no category."""
    asked = [replace(each, images=(GREY,)) for each in prompts(4, pictured=lambda place: True)]
    found = [in_category(prompt, name) for prompt, name in zip(asked, ("a", "b", "b", ""), strict=True)]
    values = evaluator(Parts(found), blank_every=1).evaluate(5)
    assert values["eval/accuracy"] == 0.25
    by_category = {name: value for name, value in values.items() if name.count("/") == 2 and "accuracy" in name}
    assert by_category == {"eval/accuracy/a": 0.0, "eval/accuracy/b": 0.5}
    assert values["eval/macro_accuracy"] == 0.25 and values["eval/uncategorised_fraction"] == 0.25
    data = {"train": {"name": "t"}, "eval": {"one": {"name": "t"}}}
    base = {"model": {"path": "m"}, "rewards": [{"name": "right"}], "algorithm": {"name": "a"}, "data": data}
    named, parts = from_mapping({**base, "trainer": {"steps": 5, "eval_every": 5}}), Parts(found)
    sources = cast(Any, {"one": parts})
    values = Evaluator(named, sources, cast(Any, parts), cast(Any, parts), parts).evaluate(5)
    assert (values["eval/one/accuracy/b"], values["eval/one/macro_accuracy"]) == (0.5, 0.25)


def test_pairs_are_judged_once_with_their_pictures_and_the_chosen_ones_once_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three of six pairs with pictures are judged again, without them. A margin of nothing is half right."""
    monkeypatch.setattr("mmrl.step.evaluate.NUM_BLANK", 3)
    names = ["a", "b", "a", "b", "a", "a"]
    found = [in_category(each, name) for each, name in zip(prompts(6, pictured=lambda place: True), names, strict=True)]
    pictured = {"p0": 1.0, "p1": 0.0, "p2": 0.5, "p3": 1.0, "p4": 1.0, "p5": 0.0}
    judged = list[list[str]]()

    def group(prompt: EncodedPrompt) -> ScoredGroup:
        pair = RolloutGroup(prompt, tuple(make_rollouts(["yes", "no"])))
        return ScoredGroup(pair, np.array([1.0, 0.0]), np.ones(2, bool), {})

    def judge(groups: Sequence[ScoredGroup]) -> Judged:
        judged.append([each.group.prompt.id for each in groups])
        right = [0.0 if GREY in each.group.prompt.images else pictured[each.group.prompt.id] for each in groups]
        values = {"accuracy": [np.array([value, np.nan]) for value in right]}
        metrics = {"accuracy": float(np.mean(right)), "margin": 0.5}
        return Judged([not_trained_on(each) for each in groups], metrics, values)

    parts, run = Parts(found), config(blank_every=1).model_copy(update={"rewards": ()})
    all_parts = cast(Any, parts)
    values = ComparisonEvaluator(run, {"": all_parts}, all_parts, all_parts, parts, judge, group).evaluate(5)
    assert judged == [["p0", "p1", "p2", "p3", "p4", "p5"], ["p0", "p2", "p4"]]
    assert values["eval/accuracy"] == pytest.approx(3.5 / 6) and values["eval_blank/accuracy"] == 0.0
    assert values["eval_blank/accuracy_gap"] == pytest.approx(2.5 / 3)
    assert values["eval/accuracy/a"] == pytest.approx(2.5 / 4) and values["eval/accuracy/b"] == 0.5
    assert values["eval/macro_accuracy"] == pytest.approx((2.5 / 4 + 0.5) / 2)
    assert [(blank, len(groups)) for _, blank, groups in parts.recorded] == [(False, 6), (True, 3)]
