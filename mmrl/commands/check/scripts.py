"""Scripted replies in place of a policy's, and a sampler that gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmrl.engine.network.folder import ModelFolder
from mmrl.engine_api import PromptEncoder, SamplingRequest
from mmrl.rollout.episodes.stand_in import StandInSampler
from mmrl.types import FinishReason, IntArray, Rollout, Segment, policy_turns

_BABBLE = " and so on"
_DEPTH = 5


@dataclass(frozen=True, slots=True)
class Script:
    """The replies of one episode.

    Attributes:
        turns: The texts; the last one is repeated. None is a text without end.
    """

    kind: str
    turns: tuple[str | None, ...]


def scripts(tools: Sequence[Mapping[str, Any]], acting: str, answer: str, encoder: PromptEncoder) -> list[Script]:
    """A right call, a wrong one, none, and a turn without end; a right action where there are no tools.

    Args:
        tools: JSON schemas of the environment's tools.
        acting: A turn that acts; empty if there is none.
        answer: A reply without a call.
    """
    endless = Script("endless", (None,))
    if not tools:
        right = [Script("right action", (acting, answer))] if acting else []
        return [*right, Script("answer", (answer,)), Script("nonsense", ("?",)), endless]
    function = tools[0].get("function", tools[0])
    name, arguments = function["name"], example(function.get("parameters", {}))
    return [
        Script("right call", (written(name, arguments, encoder), answer)),
        Script("wrong call", (written(name, {**arguments, "no_such_argument": 1}, encoder), answer)),
        Script("no call", (answer,)),
        endless,
    ]


def written(name: str, arguments: Mapping[str, Any], encoder: PromptEncoder) -> str:
    """A call in a form that the model's encoder reads."""
    bare = json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)
    if any(call.name == name and not call.error for call in encoder.calls(bare)):
        return bare
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def example(schema: Mapping[str, Any], depth: int = 0) -> Any:
    """A value that fits a JSON schema, as far as its types tell."""
    for key in ("const", "default"):
        if schema.get(key) is not None:
            return schema[key]
    if choices := schema.get("enum") or schema.get("examples"):
        return choices[0]
    kinds = schema.get("type", "object" if "properties" in schema else "string")
    kind = kinds if isinstance(kinds, str) else next((each for each in kinds if each != "null"), "null")
    match kind:
        case "object":
            properties = schema.get("properties", {}) if depth < _DEPTH else {}
            required = schema.get("required", list(properties))
            return {name: example(inner, depth + 1) for name, inner in properties.items() if name in required}
        case "array":
            items = schema.get("prefixItems") or [schema.get("items", {})] * max(int(schema.get("minItems", 1)), 1)
            return [example(item, depth + 1) for item in items] if depth < _DEPTH else []
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return "a text"


class ScriptedSampler(StandInSampler):
    """Answers the requests of episodes by scripts; the k-th request plays the k-th script.

    Args:
        end: The id that ends a turn.
    """

    def __init__(self, folder: ModelFolder, end: int, scripts: Sequence[Script]) -> None:
        super().__init__()
        self._folder, self._end, self._scripts = folder, end, scripts

    def turn(self, ticket: int, request: SamplingRequest) -> tuple[Rollout, int, int]:
        texts, number = self._scripts[ticket].turns, len(policy_turns(request.segments))
        return self._rollout(texts[min(number, len(texts) - 1)], request), number, number

    def _rollout(self, text: str | None, request: SamplingRequest) -> Rollout:
        ids = np.array(self._ids(text), np.int32)
        if text is None:
            ids = np.resize(ids, request.max_new_tokens)
        is_cut = text is None or len(ids) > request.max_new_tokens
        reason: FinishReason = "length" if is_cut else "stop"
        ids = ids[: request.max_new_tokens]
        segment = Segment(ids, True, np.zeros(len(ids), np.float32))
        shown = self._decoded(ids) if is_cut or text is None else text
        return Rollout(request.prompt, (*request.segments, segment), 0, shown, reason, 0)

    def _ids(self, text: str | None) -> list[int]:
        """Tokens of a turn with its end; without one if there is none."""
        ids: list[int] = self._folder.tokenizer(text or _BABBLE, add_special_tokens=False)["input_ids"]
        return ids if text is None else [*ids, self._end]

    def _decoded(self, ids: IntArray) -> str:
        text: str = self._folder.tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        return text
