"""Reward functions written for TRL, EasyR1, verl and mmrl, each made a class of rewards; the functions stay unchanged.

    style    it is called as                                                            it answers
    mmrl     f(rollouts, **options)                                                     a score for each
    trl      f(prompts=, completions=, completion_ids=, **columns)                      a number or None for each
    easyr1   f(reward_inputs), or f(reward_input) where REWARD_TYPE is "sequential"     {overall, ...}
    verl     f(data_source=, solution_str=, ground_truth=, extra_info=)                 a number, or {score, ...}

All are called with one group at a time, or one rollout. Other parameters are options of the reward. For ``trl``, those
without a default are columns, and one with a default is a column where the row has it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import new_class
from typing import Any, ClassVar, cast

from pydantic import create_model

from mmrl.config.plugin_specs import RewardStyle
from mmrl.errors import PluginError
from mmrl.interfaces import PluginConfig, Reward
from mmrl.plugin_host.signatures import (
    check_takes_one,
    declares_messages,
    globals_of,
    named,
    options_class,
    taken,
    takes_all,
)
from mmrl.types import IMAGE_PLACEHOLDER, ImageRef, Message, Rollout

_MARKS: Mapping[RewardStyle, frozenset[str]] = {
    "mmrl": frozenset({"rollouts"}),
    "trl": frozenset({"prompts", "completions", "completion_ids"}),
    "easyr1": frozenset({"reward_inputs", "reward_input"}),
    "verl": frozenset({"solution_str", "solution_strs", "predict_str", "model_output"}),
}
"""Parameters by which a style is recognised."""
_FOREIGN = frozenset(
    {
        *("prompt", "completion", "response", "responses", "predict", "predicts", "solution", "ground_truth"),
        *("ground_truths", "data_source", "data_sources", "extra_info", "extra_infos", "trainer_state"),
    }
)
"""Parameters that mark a function of another framework without telling which one."""
_SOLUTION = frozenset({"solution_str", "predict_str", "model_output"})
"""Names of the completion in verl's own files, which verl calls by position."""
_TOTALS: Mapping[RewardStyle, str] = {"easyr1": "overall", "verl": "score"}
"""The component that is the score, in the styles that fix it."""
_GOLD = ("solution", "answer", "ground_truth")
"""Columns that get the reference answer if the row has no such column."""

Answers = Callable[[Any, Any], Any]
"""See ``FunctionReward.answers``."""


class FunctionReward(Reward):
    """A function as a reward.

    Attributes:
        style: The convention by which the function is called.
        total: The component that is the score, if answers have several and the style says which.
    """

    style: ClassVar[RewardStyle] = "mmrl"
    total: ClassVar[str | None] = None

    @staticmethod
    def answers(config: Any, given: Any) -> Any:
        """The score of a rollout, or those of a list of them, or an awaitable; ``config`` has the reward's options."""
        raise NotImplementedError


class _Together(FunctionReward):
    def score(self, rollouts: Sequence[Rollout]) -> Any:
        return self.answers(self.config, rollouts)


class _OneByOne(FunctionReward):
    def score_one(self, rollout: Rollout) -> Any:
        return self.answers(self.config, rollout)


class _SideBySide(FunctionReward):
    async def score_one(self, rollout: Rollout) -> Any:
        return await self.answers(self.config, rollout)


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The part of TRL's trainer state that a reward can get: the step of the sampling weights, and the epoch."""

    global_step: int
    epoch: float


def adapt(function: Callable[..., Any], style: RewardStyle | None = None) -> type[FunctionReward]:
    """A reward class around a function, sync or async, or any other object that can be called.

    Args:
        style: The convention by which it is called; None recognises it by the parameters.

    Raises:
        PluginError: Its parameters are those of several styles or of none, or cannot be options.
    """
    style = style or _recognised(function)
    signature = _signature(function, style)
    base, answers, options = _STYLES[style](function, signature)
    name = getattr(function, "__name__", type(function).__name__)
    members = {
        "__module__": getattr(function, "__module__", __name__),
        "__doc__": inspect.getdoc(function),
        "Config": options,
        "style": style,
        "total": _TOTALS.get(style),
        "answers": staticmethod(answers),
    }
    return cast(type[FunctionReward], new_class(name, (base,), {}, lambda namespace: namespace.update(members)))


def _recognised(function: Callable[..., Any]) -> RewardStyle:
    names = inspect.signature(function).parameters
    found = [style for style, marks in _MARKS.items() if marks & names.keys()]
    if len(found) > 1:
        raise _unclear(function, f"has parameters of several conventions ({', '.join(found)})")
    if found:
        return found[0]
    if foreign := [name for name in names if name in _FOREIGN]:
        raise _unclear(function, f"takes {', '.join(foreign)}, which tells no convention")
    return "mmrl"


def _unclear(function: Callable[..., Any], why: str) -> PluginError:
    marks = "; ".join(f"{style}: {', '.join(sorted(names))}" for style, names in _MARKS.items())
    return PluginError(
        f"function{inspect.signature(function)} {why}",
        possible=f"parameters of one of: {marks}",
        remedy=f"name the convention in the reward's entry: style: {', '.join(_MARKS)}",
    )


def _signature(function: Callable[..., Any], style: RewardStyle) -> inspect.Signature:
    """The signature with annotations as objects; other frameworks' annotations need not make sense here."""
    try:
        return inspect.signature(function, eval_str=True)
    except Exception:
        if style == "mmrl":
            raise
        return inspect.signature(function)


_Adapted = tuple[type[FunctionReward], Answers, type[PluginConfig]]


def _mmrl(function: Callable[..., Any], signature: inspect.Signature) -> _Adapted:
    check_takes_one(signature, "the rollouts", "def name(rollouts): ...")
    options = options_class(list(named(signature))[1:], lenient=False)

    def answers(config: PluginConfig, rollouts: Sequence[Rollout]) -> Any:
        return function(rollouts, **_values(config, options))

    return _Together, answers, options


def _easyr1(function: Callable[..., Any], signature: inspect.Signature) -> _Adapted:
    """A file's REWARD_TYPE says if its function gets all inputs or one; EasyR1's default is batch."""
    first = check_takes_one(signature, "reward_inputs", "def compute_score(reward_inputs): ...")
    options = options_class(list(named(signature))[1:])
    by_name = "sequential" if first == "reward_input" else "batch"
    kind = globals_of(function).get("REWARD_TYPE", by_name)
    if kind not in ("batch", "sequential"):
        raise PluginError(f"its REWARD_TYPE is {kind!r}", possible="batch, sequential", remedy="correct it")

    def inputs(rollout: Rollout) -> dict[str, Any]:
        length = len(rollout.token_ids)
        return {"response": rollout.text, "response_length": length, "ground_truth": rollout.answer}

    def one(config: PluginConfig, rollout: Rollout) -> Any:
        return function(inputs(rollout), **_values(config, options))

    def all_of(config: PluginConfig, rollouts: Sequence[Rollout]) -> Any:
        return function([inputs(rollout) for rollout in rollouts], **_values(config, options))

    return (_Together, all_of, options) if kind == "batch" else (_single(function), one, options)


def _verl(function: Callable[..., Any], signature: inspect.Signature) -> _Adapted:
    """Called by keyword, with the keywords that the function takes; its batches have plural names."""
    given = {"data_source", "solution_str", "ground_truth", "extra_info"}
    batched = "solution_strs" in signature.parameters
    known = {f"{name}s" for name in given} if batched else given
    takes = taken(signature, known) | (_SOLUTION & signature.parameters.keys())
    options = options_class([each for each in named(signature) if each.name not in takes])

    def inputs(rollout: Rollout) -> dict[str, Any]:
        columns = rollout.columns
        extra, model = columns.get("extra_info"), columns.get("reward_model")
        reference = (
            model.get("ground_truth") if rollout.answer is None and isinstance(model, Mapping) else rollout.answer
        )
        return {
            "data_source": columns.get("data_source", rollout.source),
            **dict.fromkeys(_SOLUTION, rollout.text),
            "ground_truth": reference,
            "extra_info": {
                **(extra if isinstance(extra, Mapping) else columns),
                "num_turns": None,
                "rollout_reward_scores": {},
            },
        }

    def one(config: PluginConfig, rollout: Rollout) -> Any:
        row = inputs(rollout)
        return function(**{name: row[name] for name in takes}, **_values(config, options))

    def all_of(config: PluginConfig, rollouts: Sequence[Rollout]) -> Any:
        rows = [inputs(rollout) for rollout in rollouts]
        lists = {name: [row[name.removesuffix("s")] for row in rows] for name in takes}
        return function(**lists, **_values(config, options))

    return (_Together, all_of, options) if batched else (_single(function), one, options)


def _trl(function: Callable[..., Any], signature: inspect.Signature) -> _Adapted:
    """Called by keyword with lists, an entry for each completion of a group.

    ``log_metric`` makes a component of that name; ``log_extra`` is taken and keeps nothing. A parameter with a default
    is given its column also where it can be no option, such as ``label``, which an entry of ``rewards`` has itself.
    """
    given = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
    others = [each for each in named(signature) if each.name not in given]
    names = {each.name for each in others}
    required = [each.name for each in others if each.default is each.empty]
    if "environments" in required:
        raise PluginError("it asks for TRL's environments, and there are none", remedy="give it a default")
    options = options_class([each for each in others if each.default is not each.empty])
    defaults = _values(options(), options)
    if not {"conversational"} & signature.parameters.keys():
        options = create_model("Config", __base__=options, conversational=(bool | None, declares_messages(signature)))
    takes, takes_rest = taken(signature, given), takes_all(signature)

    def arguments(config: PluginConfig, rollouts: Sequence[Rollout], metrics: _Metrics) -> dict[str, Any]:
        as_messages = getattr(config, "conversational", None)
        if as_messages is None:
            as_messages = _is_conversational(rollouts[0])
        found: dict[str, Any] = (
            {} if "prompts" not in takes else {"prompts": [_prompt(each, as_messages) for each in rollouts]}
        )
        texts = [each.text for each in rollouts]
        found |= {
            "completions": [[{"role": "assistant", "content": text}] for text in texts] if as_messages else texts,
            "completion_ids": [each.token_ids.tolist() for each in rollouts],
            "trainer_state": TrainerState(max(rollouts[0].weight_version, 0), float(rollouts[0].prompt.epoch)),
            "log_extra": _log_extra,
            "log_metric": metrics.log,
        }
        columns = set(rollouts[0].columns) - given - {"prompt", "completion"}
        wanted = {*required, *(columns if takes_rest else columns & names)}
        chosen = {name: getattr(config, name) for name in defaults}
        set_here = {name: value for name, value in chosen.items() if value != defaults[name]}
        lists = {name: _column(name, rollouts) for name in sorted(wanted - set_here.keys())}
        return {**chosen, **lists, **{name: value for name, value in found.items() if name in takes}}

    def answers(config: PluginConfig, rollouts: Sequence[Rollout]) -> Any:
        if not rollouts:
            return []
        metrics = _Metrics()
        scores = function(**arguments(config, rollouts, metrics))
        return _later(scores, metrics) if inspect.isawaitable(scores) else metrics.beside(scores)

    return _Together, answers, options


_STYLES: Mapping[RewardStyle, Callable[[Callable[..., Any], inspect.Signature], _Adapted]] = {
    "mmrl": _mmrl,
    "trl": _trl,
    "easyr1": _easyr1,
    "verl": _verl,
}


class _Metrics:
    """The values that a function of TRL's logs in one call."""

    def __init__(self) -> None:
        self._logged: dict[str, list[float]] = {}

    def log(self, name: str, value: float) -> None:
        """Keep a value unless it is NaN or infinite: no component may be, and in TRL such a value changes no score."""
        if math.isfinite(number := float(value)):
            self._logged.setdefault(name, []).append(number)

    def beside(self, scores: Any) -> Any:
        """The scores, with None for TRL's NaN, and the metrics' means as further components."""
        scores = plain(scores)
        if not isinstance(scores, Iterable) or isinstance(scores, str | bytes | Mapping):
            return scores
        told = [None if isinstance(each, float) and math.isnan(each) else each for each in map(plain, scores)]
        means = {name: sum(values) / len(values) for name, values in self._logged.items()}
        return told if not means else [_with(each, means) for each in told]


def plain(value: Any) -> Any:
    """A number for an array or a tensor without dimensions; other values unchanged."""
    return value.tolist() if getattr(value, "ndim", None) == 0 and hasattr(value, "tolist") else value


def _with(score: Any, means: Mapping[str, float]) -> Any:
    if score is None:
        return None
    return {**means, **(score if isinstance(score, Mapping) else {"overall": score})}


async def _later(scores: Awaitable[Any], metrics: _Metrics) -> Any:
    return metrics.beside(await scores)


def _log_extra(column: str, values: Sequence[Any]) -> None:
    return None


def _prompt(rollout: Rollout, as_messages: bool) -> Any:
    """TRL's form of a prompt: a text, or messages, which are lists of parts if there are images."""
    if not as_messages:
        return rollout.messages[-1].content if rollout.messages else rollout.prompt.text
    images = iter(rollout.images)
    is_multimodal = bool(rollout.images)
    return [
        {"role": each.role, "content": list(_parts(each, images)) if is_multimodal else each.content}
        for each in rollout.messages
    ]


def _parts(message: Message, images: Iterator[ImageRef]) -> Iterator[dict[str, Any]]:
    for place, text in enumerate(message.content.split(IMAGE_PLACEHOLDER)):
        if place and (image := next(images, None)) is not None:
            yield {"type": "image", "image": _picture(image)}
        if text.strip():
            yield {"type": "text", "text": text}


def _picture(image: ImageRef) -> Any:
    from PIL import Image

    return Image.open(image.path)


def _is_conversational(rollout: Rollout) -> bool:
    """True if TRL would take the row for a conversation: it has messages, or images, which need them."""
    columns = rollout.columns.values()
    return bool(rollout.images) or len(rollout.messages) > 1 or any(map(_is_conversation, columns))


def _is_conversation(value: Any) -> bool:
    value = value.tolist() if hasattr(value, "tolist") else value
    first = value[0] if isinstance(value, list | tuple) and value else None
    return isinstance(first, Mapping) and "role" in first and "content" in first


def _column(name: str, rollouts: Sequence[Rollout]) -> list[Any]:
    """A column that the function asks for, or gets with all others."""
    if name in rollouts[0].columns:
        return [each.columns.get(name) for each in rollouts]
    if name in _GOLD and rollouts[0].answer is not None:
        return [each.answer for each in rollouts]
    if name == "images" and rollouts[0].images:
        return [list(map(_picture, each.images)) for each in rollouts]
    if name == "image" and len(rollouts[0].images) == 1:
        return [_picture(each.images[0]) for each in rollouts]
    raise PluginError(
        f"it asks for the column {name!r}, which this row does not have",
        possible=", ".join(rollouts[0].columns) or "no columns at all",
        remedy="rename a column of the data, give the parameter a default, or name another style, "
        "such as style: mmrl for a function of rollouts",
    )


def _single(function: Callable[..., Any]) -> type[FunctionReward]:
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
    return _SideBySide if is_async else _OneByOne


def _values(config: PluginConfig, options: type[PluginConfig]) -> dict[str, Any]:
    return {name: getattr(config, name) for name in options.model_fields}
