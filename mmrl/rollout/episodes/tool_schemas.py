"""Schemas of tools, as chat templates take them: of functions by their type hints and docstrings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mmrl.errors import PluginError
from mmrl.rollout.worker_faults import excerpt

_REMEDY = "give each argument a type hint, and a line under Args: in the docstring"


def tool_schemas(tools: object) -> list[dict[str, Any]]:
    """The schema of each tool, ``{"type": "function", "function": {"name", "description", "parameters"}}``.

    Raises:
        PluginError: A tool has none, or two have one name.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise PluginError(
            f"the environment's tools() answers {type(tools).__name__} {excerpt(tools)}",
            possible="a list of functions or of JSON schemas",
            remedy="correct the environment",
        )
    schemas = [_checked(tool) if isinstance(tool, dict) else _of_function(tool) for tool in tools]
    names = [schema["function"]["name"] for schema in schemas]
    if len(set(names)) < len(names):
        raise PluginError(
            "two tools have the same name", possible=", ".join(sorted(set(names))), remedy="rename one of them"
        )
    return schemas


def _of_function(tool: object) -> dict[str, Any]:
    name = getattr(tool, "__name__", None)
    if not callable(tool) or name is None:
        raise PluginError(
            f"a tool is {type(tool).__name__} {excerpt(tool)}",
            possible="a function, a method, or a JSON schema",
            remedy="correct what tools() answers",
        )
    from transformers.utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:  # its parser raises many kinds, on what an author wrote
        code = getattr(tool, "__code__", None)
        raise PluginError(
            f"tool {name!r} cannot be described to the policy: {excerpt(error, str)}",
            where=f"{code.co_filename}:{code.co_firstlineno}" if code else "",
            possible="a function with type hints, and a docstring that describes it and each argument under Args:",
            remedy=_REMEDY,
        ) from error
    return _checked(schema)


def _checked(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        if fault := _fault(schema):
            raise TypeError(fault)
        plain: dict[str, Any] = json.loads(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise PluginError(
            f"a tool's schema cannot be used: {error}: {excerpt(schema)}",
            possible='{"type": "function", "function": {"name": ..., "description": ..., "parameters": {"type": '
            '"object", "properties": {...}, "required": [...]}}}',
            remedy="correct the schema",
        ) from error
    return plain


def _fault(schema: dict[str, Any]) -> str:
    """The reason why a schema is none; empty if it is one."""
    function = schema.get("function")
    if schema.get("type") != "function" or not isinstance(function, dict):
        return "it has no type: function, or no function"
    if not isinstance(function.get("name"), str) or not function["name"]:
        return "its function has no name"
    parameters = function.get("parameters", {})
    if not isinstance(parameters, dict) or (parameters and parameters.get("type") != "object"):
        return "its parameters are no object"
    return ""
