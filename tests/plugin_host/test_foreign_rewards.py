"""Reward functions as other projects write them, and rewards that answer several components."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, Union

import numpy as np
import pytest
from PIL import Image

from mmrl.commands.cli import main
from mmrl.commands.eval.estimates import estimates
from mmrl.commands.rewards.trial import reward_spec, try_reward
from mmrl.config.load import from_mapping
from mmrl.config.plugin_specs import RewardSpec
from mmrl.errors import ConfigError, PluginError
from mmrl.interfaces import RunFacts
from mmrl.ops.credit import shaped_rewards
from mmrl.ops.metrics import evaluation_metrics, reward_metrics
from mmrl.plugin_host.foreign_rewards import adapt
from mmrl.plugin_host.registry import create, given, options_class
from mmrl.rollout.batch import batch_of
from mmrl.rollout.records import group_records, read_groups
from mmrl.rollout.rewards.failures import RewardError
from mmrl.rollout.rewards.scorer import Scorer
from mmrl.rollout.rewards.worker import BadScores, call, check_scores
from mmrl.testing import check_reward, make_rollouts
from mmrl.types import Batch, ImageRef, Message, RolloutGroup, ScoredGroup
from mmrl_algorithms.dapo import DAPO

if TYPE_CHECKING:
    from nowhere import Unknown  # type: ignore[import-not-found]

TEXTS = ["<think>a</think>\\boxed{7}", "\\boxed{7}", "<think>b</think>8", ""]
COLUMNS = {"prompt": "What is 3 + 4?", "solution": "7", "level": 3}


def rollouts(*texts: str, **options: Any) -> list[Any]:
    return make_rollouts(list(texts or TEXTS), **{"answer": "7", "columns": COLUMNS, **options})


def scores(function: Any, style: Any = None, of: Any = None, **options: Any) -> list[Any]:
    """What the adapted function answers, as a worker reads it: numbers, or (number, components)."""
    cls = adapt(function, style)
    of = rollouts() if of is None else of
    checked = check_scores(call(cls(cls.Config(**options)), of), len(of), total=cls.total)
    return [(each.value, dict(each.parts)) if each.parts else each.value for each in checked]


def named(*parameters: str) -> Callable[..., Any]:
    """A function with these parameters."""
    found: dict[str, Any] = {}
    exec(f"def f({', '.join(parameters)}): ...", found)
    function: Callable[..., Any] = found["f"]
    return function


@pytest.mark.parametrize(
    ("parameters", "style"),
    [
        (["rollouts"], "mmrl"),
        (["rollouts", "factor=1.0"], "mmrl"),
        (["group", "*", "bonus"], "mmrl"),
        (["prompts", "completions", "**kwargs"], "trl"),
        (["completions", "solution", "**kwargs"], "trl"),
        (["completion_ids", "**kwargs"], "trl"),
        (["prompts", "completions", "completion_ids", "trainer_state", "log_extra=None"], "trl"),
        (["reward_inputs", "format_weight=0.1"], "easyr1"),
        (["reward_input"], "easyr1"),
        (["data_source", "solution_str", "ground_truth", "extra_info=None"], "verl"),
        (["solution_str", "ground_truth", "method='strict'"], "verl"),
        (["predict_str", "ground_truth"], "verl"),
        (["data_sources", "solution_strs", "ground_truths", "extra_infos"], "verl"),
    ],
)
def test_a_convention_is_recognised_by_the_parameters(parameters: list[str], style: str) -> None:
    assert adapt(named(*parameters)).style == style


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (["completions", "solution_str"], r"parameters of several conventions \(trl, verl\)"),
        (["rollouts", "completions=None"], r"parameters of several conventions \(mmrl, trl\)"),
        (["predicts", "ground_truths"], "takes predicts, ground_truths, which tells no convention"),
        (["prompt", "response"], "takes prompt, response, which tells no convention"),
    ],
)
def test_an_ambiguous_function_is_refused_until_its_style_is_named(parameters: list[str], message: str) -> None:
    with pytest.raises(PluginError, match=message) as caught:
        adapt(named(*parameters))
    assert "name the convention in the reward's entry: style: mmrl, trl, easyr1, verl" in str(caught.value)
    assert adapt(named(*parameters), "easyr1").style == "easyr1"


def test_a_function_of_trls_is_called_with_lists_of_texts_ids_and_columns() -> None:
    seen: dict[str, Any] = {}

    def fits(prompts: list[str], completions: list[str], completion_ids: Any, solution: Any, **others: Any) -> Any:
        seen.update(others, prompts=prompts, ids=completion_ids)
        return [float(reference in text) for text, reference in zip(completions, solution, strict=True)]

    given = [replace(each, weight_version=5) for each in rollouts()]
    direct = fits(["What is 3 + 4?"] * 4, TEXTS, [], ["7"] * 4)
    assert scores(fits, of=given) == direct == [1.0, 1.0, 0.0, 0.0]
    assert seen["prompts"] == ["What is 3 + 4?"] * 4 and seen["level"] == [3] * 4
    assert seen["ids"] == [each.token_ids.tolist() for each in given]
    assert seen["trainer_state"].global_step == 5 and seen["trainer_state"].epoch == 0.0
    assert not {"prompt", "conversational"} & seen.keys()


def test_completions_are_messages_where_the_row_is_a_conversation_or_the_function_says_so() -> None:
    def either(completions, **others):
        return [{"messages": float(isinstance(each, list)), "size": float(len(each))} for each in completions]

    def messages(completions: list[list[dict[str, str]]], **others: Any) -> list[float]:
        return [float("7" in each[0]["content"]) for each in completions]

    turns = [{"role": "user", "content": "What is 3 + 4?"}]
    conversation = rollouts(columns={"prompt": turns, "solution": "7"})
    several = []
    for each in rollouts():
        row = replace(each.prompt.prompt, messages=(Message("system", "Be short."), *each.messages))
        several.append(replace(each, prompt=replace(each.prompt, prompt=row)))
    is_list = [parts["messages"] for _, parts in scores(either, of=conversation)]
    assert is_list == [1.0] * 4
    assert [parts["messages"] for _, parts in scores(either, of=several)] == [1.0] * 4
    assert [parts["messages"] for _, parts in scores(either)] == [0.0] * 4
    assert [parts["messages"] for _, parts in scores(either, conversational=True)] == [1.0] * 4
    assert scores(messages) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("annotation", "as_messages"),
    [
        (list[str], False),
        (Optional[list[str]], False),  # noqa: UP045
        (list[str] | tuple[str, ...] | None, False),
        (Annotated[Sequence[str], "the answers"], False),
        (list[dict[str, str]], True),
        (list[list[dict[str, str]]] | None, True),
        (list[list], True),
        (list[str] | list[list[dict[str, str]]], None),
        (Union[list[str], list[Any]], None),  # noqa: UP007
        (list[str | list[dict[str, str]]], None),
        (list[list[str]], None),
        (list[Any], None),
        (list, None),
    ],
)
def test_an_annotation_declares_texts_or_messages_if_all_its_members_are_such(
    annotation: Any, as_messages: bool | None
) -> None:
    def typed(completions, **others):
        return [float(isinstance(each, list)) for each in completions]

    typed.__annotations__["completions"] = annotation
    assert adapt(typed).Config.model_fields["conversational"].default is as_messages
    assert scores(typed) == [float(as_messages or False)] * 4


def test_prompts_and_columns_with_images_have_the_pictures(tmp_path: Path) -> None:
    Image.new("RGB", (3, 2), "red").save(tmp_path / "a.png")
    seen: dict[str, Any] = {}

    def look(prompts, completions, image, images, **others):
        seen.update(prompts=prompts, images=images)
        return [each.size[0] for each in image]

    of = make_rollouts(
        ["7"], question="<image>What?", images=[ImageRef("h", 3, 2, str(tmp_path / "a.png"))], columns={}, answer="7"
    )
    assert scores(look, of=of) == [3.0]
    picture, text = seen["prompts"][0][0]["content"]
    assert picture["type"] == "image" and picture["image"].getpixel((0, 0)) == (255, 0, 0)
    assert text == {"type": "text", "text": "What?"} and len(seen["images"][0]) == 1


def test_not_applicable_stays_none_and_what_is_logged_is_a_component() -> None:
    def logs(completions, log_extra=None, log_metric=None, **others):
        log_extra("seen", list(completions))
        log_metric("share", 0.0)
        log_metric("share", 0.5)
        return [None, float("nan"), 1, np.float32(0.5)]

    assert scores(logs) == [None, None, (1.0, {"share": 0.25}), (0.5, {"share": 0.25})]

    def of_arrays(completions, log_metric, **others):
        log_metric("share", np.float32("nan"))
        log_metric("size", float("inf"))
        log_metric("size", 3)
        return np.array([1, np.nan, 0.5, np.nan], np.float32)

    assert scores(of_arrays) == [(1.0, {"size": 3.0}), None, (0.5, {"size": 3.0}), None]
    scalars = [np.float32("nan"), np.array(np.nan), np.array(0.5, np.float16), np.float64("nan")]
    assert scores(lambda completions: scalars) == [None, None, 0.5, None]
    with pytest.raises(BadScores, match="got dict"):
        scores(lambda completions: dict.fromkeys(range(4), 1.0))

    async def later(completions, solution, **others):
        return [
            None,
            *(float(reference in text) for text, reference in zip(completions[1:], solution[1:], strict=True)),
        ]

    assert scores(later) == [None, 1.0, 0.0, 0.0]


def test_a_parameter_with_a_default_is_an_option_unless_the_row_has_it() -> None:
    def sized(completions, level: int = 0, bonus: float = 0.25, **others):
        levels = level if isinstance(level, list) else [level] * len(completions)
        return [each + bonus for each in levels]

    assert sorted(adapt(sized).Config.model_fields) == ["bonus", "conversational", "level"]
    assert scores(sized) == [3.25] * 4
    assert scores(sized, bonus=1.0) == [4.0] * 4
    assert scores(sized, level=7) == [7.25] * 4
    assert scores(sized, of=rollouts(columns={})) == [0.25] * 4


def test_a_parameter_that_can_be_no_option_is_the_column_where_the_row_has_it() -> None:
    unset = object()
    seen: dict[str, Any] = {}

    def asks(completions, label=None, weight=1.0, level=unset, colour=unset):
        seen.update(label=label, weight=weight, level=level, colour=colour)
        return [0.0] * len(completions)

    assert set(adapt(asks).Config.model_fields) == {"conversational"}
    scores(asks, of=rollouts(columns={"prompt": "?", "label": "cat", "weight": 2, "level": 3}))
    assert seen == {"label": ["cat"] * 4, "weight": [2] * 4, "level": [3] * 4, "colour": unset}
    scores(asks, of=rollouts(columns={"prompt": "?"}))
    assert seen == {"label": None, "weight": 1.0, "level": unset, "colour": unset}


def test_a_column_that_is_missing_is_named_and_the_reference_takes_the_place_of_a_references() -> None:
    def asks(completions, colour, **others):
        return [0.0] * len(completions)

    with pytest.raises(PluginError, match="the column 'colour', which this row does not have") as caught:
        scores(asks)
    assert "prompt, solution, level" in str(caught.value)
    assert scores(lambda completions, ground_truth: [float(g) for g in ground_truth]) == [7.0] * 4
    with pytest.raises(PluginError, match="TRL's environments, and there are none"):
        adapt(named("completions", "environments"))


def graded(response: str, reference: str, format_weight: float = 0.1) -> dict[str, float]:
    fit, right = float(response.startswith("<think>")), float(f"\\boxed{{{reference}}}" in response)
    return {"overall": (1 - format_weight) * right + format_weight * fit, "format": fit, "accuracy": right}


def test_functions_of_easyr1_are_called_with_all_inputs_or_one() -> None:
    def batch(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
        assert [each["response_length"] for each in reward_inputs] == [len(text) + 1 for text in TEXTS]
        return [graded(each["response"], each["ground_truth"], format_weight) for each in reward_inputs]

    def sequential(reward_input: dict[str, Any]) -> dict[str, float]:
        return graded(reward_input["response"], reward_input["ground_truth"])

    direct = [graded(text, "7") for text in TEXTS]
    expected = [(each["overall"], {"format": each["format"], "accuracy": each["accuracy"]}) for each in direct]
    assert scores(batch) == scores(sequential) == expected
    assert [each[0] for each in scores(batch, format_weight=0.5)] == [1.0, 0.5, 0.5, 0.0]


@pytest.mark.parametrize(("line", "form"), [("", "score"), ('REWARD_TYPE = "sequential"', "score_one")])
def test_a_file_of_easyr1s_says_by_reward_type_how_it_is_called(tmp_path: Path, line: str, form: str) -> None:
    (tmp_path / "r.py").write_text(f"{line}\ndef f(inputs, *, least: int): ...\n")
    reward = create("reward", RewardSpec(name=f"{tmp_path / 'r.py'}:f", style="easyr1", least=1))
    assert form in {name for base in type(reward).__mro__[:2] for name in vars(base)}
    (tmp_path / "r.py").write_text("REWARD_TYPE = 'all'\ndef f(reward_inputs): ...\n")
    with pytest.raises(PluginError, match="its REWARD_TYPE is 'all'"):
        options_class("reward", f"{tmp_path / 'r.py'}:f")


def test_functions_of_verl_are_called_with_as_much_as_they_take() -> None:
    seen: list[Any] = []

    def whole(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
        seen.append((data_source, extra_info))
        right = ground_truth in solution_str
        return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str[-3:]}

    def short(solution_str, ground_truth, score=1.0):
        return score * (ground_truth in solution_str)

    def batched(data_sources, solution_strs, ground_truths, extra_infos):
        return [short(text, reference) for text, reference in zip(solution_strs, ground_truths, strict=True)]

    async def later(data_source, solution_str, ground_truth, extra_info):
        return short(solution_str, ground_truth)

    columns = {"data_source": "gsm", "extra_info": {"index": 4}, "reward_model": {"ground_truth": "7"}}
    of = rollouts(columns=columns, answer=None)
    assert scores(whole, of=of) == [
        (1.0, {"acc": 1.0}),
        (1.0, {"acc": 1.0}),
        (-1.0, {"acc": 0.0}),
        (-1.0, {"acc": 0.0}),
    ]
    assert seen[0] == ("gsm", {"index": 4, "num_turns": None, "rollout_reward_scores": {}})
    assert scores(short) == scores(batched) == scores(later) == [1.0, 1.0, 0.0, 0.0]
    assert scores(short, score=2.0) == [2.0, 2.0, 0.0, 0.0]
    assert scores(lambda predict_str, ground_truth: ground_truth in predict_str) == [1.0, 1.0, 0.0, 0.0]


def test_annotations_and_defaults_of_others_need_not_make_sense_here() -> None:
    def odd(
        completions: list[Unknown],
        log_extra: Callable[..., None] | None = None,
        size: float = None,  # type: ignore[assignment]  # noqa: RUF013
        parser: Any = BINARY,
        weight: float = 1.0,
        **others: Any,
    ) -> list[float]:
        return [float(parser("11"))] * len(completions)

    assert sorted(adapt(odd).Config.model_fields) == ["conversational", "size"]
    assert scores(odd) == [3.0] * 4


BINARY = functools.partial(int, base=2)


class Sized:
    """A function with settings, as ``get_...`` functions make them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, completion_ids: list[list[int]], **others: Any) -> list[float]:
        return [float(len(ids) <= self.limit) for ids in completion_ids]


def test_any_object_that_can_be_called_is_a_reward() -> None:
    assert scores(Sized(5)) == [0.0, 0.0, 0.0, 1.0]
    assert scores(functools.partial(graded_by, weight=2.0)) == [2.0, 2.0, 0.0, 0.0]
    check_reward(functools.partial(graded_by, weight=2.0))
    assert type(given("reward", Sized(5))).__name__ == "Sized"


def graded_by(solution_str: str, ground_truth: Any, weight: float) -> float:
    return weight * (str(ground_truth) in solution_str)


# Several components.


@pytest.mark.parametrize(
    ("answer", "weights", "value", "parts"),
    [
        ({"overall": 0.9, "accuracy": 1, "format": 0}, None, 0.9, {"accuracy": 1.0, "format": 0.0}),
        ({"score": -1, "acc": False, "pred": "8"}, None, -1.0, {"acc": 0.0}),
        ({"score": 0.5, "overall": 0.25}, None, 0.25, {"score": 0.5}),
        ({"accuracy": 1.0, "format": 0.5}, None, 1.5, {"accuracy": 1.0, "format": 0.5}),
        ({"accuracy": 1.0, "format": None}, None, None, {"accuracy": 1.0, "format": None}),
        ({"overall": None, "accuracy": 1.0}, None, None, {"accuracy": 1.0}),
        ({"overall": 0.5, "accuracy": None}, None, 0.5, {"accuracy": None}),
        (
            {"accuracy": 1, "format": 1, "x": 9},
            {"accuracy": 0.9, "format": 0.1},
            1.0,
            {"accuracy": 1, "format": 1, "x": 9},
        ),
        ({"overall": 3, "accuracy": 1}, {"accuracy": 0.5}, 0.5, {"overall": 3.0, "accuracy": 1.0}),
        (None, {"accuracy": 0.5}, None, {}),
    ],
)
def test_of_several_components_one_is_the_score_or_their_weighted_sum(
    answer: Any, weights: Any, value: Any, parts: Any
) -> None:
    (checked,) = check_scores([answer], 1, weights)
    assert checked.value == (None if value is None else pytest.approx(value)) and checked.parts == parts


@pytest.mark.parametrize(
    ("answer", "weights", "message"),
    [
        ({}, None, "expected at least one component"),
        ({"accuracy": "1.0"}, None, "got str '1.0' under 'accuracy'"),
        ({"overall": "good", "accuracy": 1.0}, None, "got str 'good' under 'overall'"),
        ({"overall": 1.0, "accuracy": float("nan")}, None, "got nan under 'accuracy'"),
        (
            {"accuracy": 1.0},
            {"acuracy": 1.0},
            "expected components acuracy, which weights names, got components accuracy",
        ),
        (1.0, {"accuracy": 1.0}, "expected the components that weights names: accuracy, got float 1.0"),
    ],
)
def test_components_that_cannot_be_counted_are_an_error(answer: Any, weights: Any, message: str) -> None:
    with pytest.raises(BadScores, match=re.escape(message)):
        check_scores([answer], 1, weights)


@pytest.mark.parametrize(
    ("answers", "index", "expected", "got"),
    [
        ([{"overall": 1, "length": 100}, {"length": 900}, {"overall": 0}], 1, "'overall'", "components length"),
        ([{"length": 900}, None, {"score": 1}], 0, "'score'", "components length"),
        ([1.0, {"score": 1}, {"overall": 0}], 1, "'overall'", "components score"),
        ([{"overall": 1}, {}, 0.0], 1, "'overall'", "components (none)"),
    ],
)
def test_the_component_that_is_the_score_is_the_same_for_all_rollouts(
    answers: list[Any], index: int, expected: str, got: str
) -> None:
    with pytest.raises(BadScores) as caught:
        check_scores(answers, 3)
    assert (caught.value.index, caught.value.got) == (index, got) and expected in caught.value.expected
    weighed = check_scores([{"overall": 1, "length": 100}, {"length": 900}, None], 3, {"length": 0.5})
    assert [each.value for each in weighed] == [50.0, 450.0, None]


def test_functions_of_easyr1_and_verl_have_their_own_component_in_every_answer() -> None:
    def one(reward_input):
        return {"overall": 0.5, "accuracy": 1.0} if reward_input["response"] else {"accuracy": 0.0, "score": 9.0}

    def batch(reward_inputs):
        return [{"accuracy": 1.0} for _ in reward_inputs]

    def judged(solution_str, ground_truth):
        return {"score": 0.25, "overall": 9.0} if solution_str else {"acc": False}

    for function, expected in ((one, "'overall'"), (batch, "'overall'"), (judged, "'score'")):
        with pytest.raises(BadScores, match=expected):
            scores(function)
        with pytest.raises(PluginError, match=expected):
            check_reward(function)
    assert scores(one, of=rollouts("7")) == [(0.5, {"accuracy": 1.0})]
    assert scores(judged, of=rollouts("7")) == [(0.25, {"overall": 9.0})]


FILE = """
REWARD_TYPE = "sequential"

def compute_score(reward_input, bonus: float = 0.0):
    response = reward_input["response"]
    if response == "":
        return None
    fit, right = float(response.startswith("<think>")), float("7" in response)
    return {"overall": 0.9 * right + 0.1 * fit + bonus, "format": fit, "accuracy": right}

def lacks(reward_input):
    return {"accuracy": 1.0} if reward_input["response"] == "" else {"overall": 1.0, "accuracy": 1.0}

def clash(rollouts):
    return [{"overall": 1.0, "accuracy": 1.0} for rollout in rollouts]
"""


@pytest.fixture(scope="module")
def name(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("easyr1") / "easy.py"
    path.write_text(FILE)
    return f"{path}:compute_score"


def scored(*specs: RewardSpec, of: Any = None) -> ScoredGroup:
    of = rollouts() if of is None else of
    with Scorer(specs, workers=1) as scorer:
        return scorer.submit(RolloutGroup(of[0].prompt, tuple(of))).result(60)


@pytest.fixture(scope="module")
def group(name: str) -> ScoredGroup:
    return scored(RewardSpec(name=name, label="easy", weight=2.0), RewardSpec(name="exact"))


def as_batch(*groups: ScoredGroup) -> Batch:
    return batch_of(groups, {"easy": 2.0, "exact": 1.0})


def test_components_are_curves_of_their_own_and_in_no_sum(group: ScoredGroup) -> None:
    assert list(group.components) == ["easy", "exact", "easy/format", "easy/accuracy"]
    assert group.components["easy"][:3].tolist() == [1.0, 0.9, 0.1]
    assert group.components["easy/accuracy"][:3].tolist() == [1.0, 1.0, 0.0]
    assert group.valid.tolist() == [True, True, True, False]
    batch = as_batch(group)
    assert batch.weights == {"easy": 2.0, "exact": 1.0, "easy/format": 0.0, "easy/accuracy": 0.0}
    summed = sum(batch.weights[each] * np.nan_to_num(values) for each, values in batch.components.items())
    assert np.where(batch.valid, summed, 0.0) == pytest.approx(batch.rewards)
    assert shaped_rewards(batch, clip=(-9, 9)) == pytest.approx(batch.rewards)
    assert np.isfinite(shaped_rewards(batch, normalise=True)).all()
    found = reward_metrics(batch, "easy/accuracy")
    assert found["reward/easy/accuracy_mean"] == pytest.approx(2 / 3) and found["reward/easy/format_mean"] > 0
    assert found["group/all_correct_fraction"] == 0.0
    values = evaluation_metrics(batch.rewards, batch.valid, batch.components, "easy/accuracy")
    assert values["eval/accuracy"] == values["eval/easy/accuracy_mean"] == pytest.approx(2 / 3)
    intervals = estimates([group], batch, values, "easy/accuracy")
    assert intervals["eval/easy/accuracy_mean"].value == pytest.approx(2 / 3)
    assert intervals["eval/easy/accuracy_pass@2"].value == pytest.approx(1.0)


def test_groups_with_and_without_components_are_one_batch(name: str, group: ScoredGroup) -> None:
    empty = scored(RewardSpec(name=name, label="easy"), RewardSpec(name="exact"), of=rollouts("", ""))
    assert list(empty.components) == ["easy", "exact"] and not empty.valid.any()
    for batch in (as_batch(group, empty), as_batch(empty, group)):
        assert batch.components["easy/accuracy"].shape == (6,)
        assert reward_metrics(batch, "easy/accuracy")["reward/easy/accuracy_mean"] == pytest.approx(2 / 3)
    assert reward_metrics(as_batch(empty), "easy/accuracy")["group/all_correct_fraction"] == 0.0
    assert estimates([empty, group], as_batch(empty, group), {}, "easy/accuracy")["eval/easy/accuracy_pass@1"].value > 0


def test_components_are_recorded_and_read_again(group: ScoredGroup, tmp_path: Path) -> None:
    records = json.loads(json.dumps(group_records([group])).replace("NaN", "null"))
    assert records[0]["rewards"] == {"easy": 1.0, "exact": 1.0, "easy/format": 1.0, "easy/accuracy": 1.0}
    (again,) = read_groups(records, tmp_path)
    for each, values in group.components.items():
        np.testing.assert_array_equal(again.components[each], values)


def test_weights_of_an_entry_weigh_the_components(name: str) -> None:
    found = scored(RewardSpec(name=name, weights={"accuracy": 0.5, "format": 0.25}, bonus=9.0))
    assert found.rewards.tolist() == [0.75, 0.5, 0.25, 0.0]
    with pytest.raises(RewardError, match="answered components overall, format, accuracy") as caught:
        scored(RewardSpec(name=name, weights={"accurcy": 1.0}))
    assert "components accurcy, which weights names" in str(caught.value)


def test_a_rollout_without_the_component_that_is_the_score_is_named(name: str) -> None:
    with pytest.raises(RewardError, match="answered components accuracy") as caught:
        scored(RewardSpec(name=name.replace("compute_score", "lacks")))
    assert "rollout 3" in caught.value.where and "'overall', which is the score" in caught.value.possible


def test_a_component_and_a_reward_of_one_name_are_refused(name: str) -> None:
    file = name.rpartition(":")[0]
    with pytest.raises(ConfigError, match="'x/accuracy', and a reward is called so too"):
        scored(RewardSpec(name=f"{file}:clash", label="x"), RewardSpec(name="exact", label="x/accuracy"))


def test_a_component_may_select_groups_and_tell_right_from_wrong(name: str, group: ScoredGroup) -> None:
    config = {
        "model": {"path": "m"},
        "data": {"train": {"name": "table"}, "eval": {"name": "table"}},
        "rewards": [{"name": name}],
        "algorithm": {"name": "grpo"},
    }
    trainer = {"eval_metric": "compute_score/accuracy"}
    assert from_mapping({**config, "trainer": trainer}).accuracy == "compute_score/accuracy"
    with pytest.raises(ConfigError, match="'accuracy', which is no reward"):
        from_mapping({**config, "trainer": {"eval_metric": "accuracy"}})
    facts = RunFacts(4, 1, 8, 1, ("easy", "exact"), "easy/accuracy")
    dapo = DAPO(DAPO.Config(dynamic_sampling={"metric": "easy/accuracy"}))
    assert dapo.check(facts) == ()
    with pytest.raises(ValueError, match="'hard/accuracy', and the rewards are easy, exact"):
        DAPO(DAPO.Config(dynamic_sampling={"metric": "hard/accuracy"})).check(facts)
    alike = replace(group, components={**group.components, "easy/accuracy": np.ones(4)})
    assert dapo.select([group, alike]) == [True, False]


def test_rewards_test_shows_components_and_compares_them_with_the_record(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rewards", "test", name, "--limit", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["prompt", "rollout", "value", "format", "accuracy", "recorded", "time", "completion"]
    assert re.search(r"3 rollouts: 3 scored, mean 0.6333 \(format 0.3333, accuracy 0.6667\)", "\n".join(lines))
    assert main(["rewards", "test", name, "--limit", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["components"]) == {"format", "accuracy"} == set(report["samples"][0]["components"])


def test_components_that_differ_from_the_record_are_disagreements(
    name: str, group: ScoredGroup, tmp_path: Path
) -> None:
    def trial(*groups: ScoredGroup) -> Any:
        (tmp_path / "step.jsonl").write_text(
            "\n".join(json.dumps(each).replace("NaN", "null") for each in group_records(groups))
        )
        return try_reward(reward_spec(name, ["label=easy"]), [str(tmp_path / "step.jsonl")])

    assert trial(group).totals()["disagreements"] == 0
    swapped = {**group.components, "easy/format": group.components["easy/format"][::-1].copy()}
    assert trial(replace(group, components=swapped)).totals()["disagreements"] == 4


def test_the_style_of_a_files_function_is_named_in_its_entry(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def f(predicts, ground_truths=None): return [1.0 for _ in predicts]\n")
    path = f"{tmp_path / 'r.py'}:f"
    with pytest.raises(PluginError, match="which tells no convention") as caught:
        create("reward", RewardSpec(name=path))
    assert str(tmp_path) in str(caught.value)
    assert scored(RewardSpec(name=path, style="mmrl")).rewards.tolist() == [1.0] * 4
    with pytest.raises(PluginError, match="has style: trl, which says how a file's function is called"):
        create("reward", RewardSpec(name="exact", style="trl"))
    with pytest.raises(ConfigError, match="style"):
        from_mapping({"rewards": [{"name": path, "style": "openrlhf"}]})


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("def f(completions): return [len(each.text) for each in completions]", "given completions, not rollouts"),
        ("def f(completions, factor): return [factor for each in completions]", "the column 'factor'"),
    ],
)
def test_a_function_of_rollouts_that_is_taken_for_trls_is_told_of_the_style(
    tmp_path: Path, code: str, what: str
) -> None:
    (tmp_path / "r.py").write_text(f"{code}\n")
    with pytest.raises(RewardError, match=what) as caught:
        scored(RewardSpec(name=f"{tmp_path / 'r.py'}:f"))
    assert "style: mmrl" in caught.value.remedy
    (tmp_path / "s.py").write_text("def f(completions): return [each.size for each in completions]\n")
    with pytest.raises(RewardError, match="no attribute 'size'") as caught:
        scored(RewardSpec(name=f"{tmp_path / 's.py'}:f"))
    assert caught.value.remedy == "correct the reward"


def test_a_function_of_trls_that_takes_messages_for_texts_is_told_how_to_get_them(tmp_path: Path) -> None:
    bodies = {"a": "def f(completions): return [float(each.isdigit()) for each in completions]"}
    bodies["b"] = "import re\ndef f(completions): return [float(bool(re.match('a', each))) for each in completions]"
    for name, code in bodies.items():
        (tmp_path / f"{name}.py").write_text(f"{code}\n")
        with pytest.raises(RewardError, match="completions are lists of messages") as caught:
            scored(RewardSpec(name=f"{tmp_path / name}.py:f"), of=rollouts(images=(ImageRef("ab", 8, 8, "none.png"),)))
        assert "declare completions: list[str]" in caught.value.remedy
