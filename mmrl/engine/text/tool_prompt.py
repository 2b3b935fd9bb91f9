"""The way in which the policy learns of tools: by its chat template, or by a text in the system turn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.text.chat_template import ChatTemplate
from mmrl.errors import ConfigError
from mmrl.types import Message, Prompt

ToolPromptMode = Literal["auto", "template", "text", "none"]
SENTINEL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_of_tools",
        "description": "Shows that the template writes descriptions.",
        "parameters": {
            "type": "object",
            "properties": {"depth": {"type": "integer", "description": "Argument of the probe."}},
            "required": ["depth"],
        },
    },
}
UNREAD = "<|tool_call>"
"""Opens a call in a form of Gemma 4 that is not read: told of tools by such a template, a policy would call none."""
TEXT = """\
You can use tools. Each line below describes one as a JSON schema:
{schemas}

To use a tool, write its name and its arguments as JSON between these tags, and end your turn:
<tool_call>
{{"name": "the tool", "arguments": {{"an argument": "its value"}}}}
</tool_call>
You may write several such blocks in a turn. The answers come in the next message."""


class ToolPrompt:
    """Shows tools to the policy.

    Args:
        folder: The model's.
        tools: JSON schemas of OpenAI's form.
        mode: ``auto`` is the template if it writes tools.

    Attributes:
        template: The model's chat template, which writes the tools if it is to.
        text: The text in the system turn; empty if there is none.
        way: The way that was taken; ``none`` also without tools.
        bare: True if the template asks for calls that are JSON and nothing else, without tags.

    Raises:
        ConfigError: The template does not write a tool, or a schema is none.
    """

    def __init__(self, folder: ModelFolder, tools: Sequence[Mapping[str, Any]], mode: ToolPromptMode) -> None:
        self.template, self.text, self.bare = ChatTemplate(folder), "", False
        self.way: Literal["template", "text", "none"] = "none"
        plain = [_schema(tool) for tool in tools]
        names = [tool["function"]["name"] for tool in plain]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"two tools are called {min(twice)!r}", where="environment", remedy="rename one of them")
        if not tools or mode == "none":
            return
        self._folder = folder
        shown = [_spelled(self.template, tool) for tool in plain]
        unread = UNREAD in self.template.source
        if mode == "text" or (mode == "auto" and (unread or not self._writes([SENTINEL]))):
            lines = [json.dumps(tool, ensure_ascii=False) for tool in shown]
            self.text, self.way = TEXT.format(schemas="\n".join(lines)), "text"
            return
        if unread:
            raise _unread()
        for tool in shown:
            if not self._writes([tool]):
                raise self._refusal(tool["function"]["name"])
        self.template, self.way = ChatTemplate(folder, shown), "template"
        # The tags stand in the template's own explanation of calls.
        self.bare = "<tool_call>" not in self.template.fill([self.template.message("user", ("?",))])

    def added_to(self, prompt: Prompt) -> tuple[Message, ...]:
        """The prompt's messages with the text in their system turn."""
        messages = prompt.messages
        if not self.text:
            return messages
        if messages and messages[0].role == "system":
            return (Message("system", f"{self.text}\n\n{messages[0].content}"), *messages[1:])
        return (Message("system", self.text), *messages)

    def _writes(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """True if the template writes names and descriptions."""
        template = ChatTemplate(self._folder, tools)
        try:
            text = template.fill([template.message("user", ("?",))])
        except Exception:  # the template is the model's: any exception is its own
            return False
        words = [word for tool in tools for word in (tool["function"]["name"], tool["function"]["description"])]
        # Templates write schemas as JSON, which escapes quotes and line breaks of a description.
        return all(word in text or json.dumps(word, ensure_ascii=False)[1:-1] in text for word in words)

    def _refusal(self, name: str) -> ConfigError:
        if self._writes([SENTINEL]):
            return ConfigError(
                f"the model's chat template cannot write the schema of the tool {name!r}",
                where="environment.tool_prompt",
                remedy="set it to text, or correct the schema",
            )
        return ConfigError(
            "the model's chat template writes no tools",
            where="environment.tool_prompt: template",
            possible="auto, text, none",
            remedy="set it to auto, which describes the tools in the system turn",
        )


def _unread() -> ConfigError:
    return ConfigError(
        f"the model's chat template has calls that begin with {UNREAD}, which are not read",
        where="environment.tool_prompt: template",
        possible="auto, text, none",
        remedy="set it to auto, which describes the tools and the form of calls in the system turn",
    )


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's schema in OpenAI's form; that of the function alone is one too."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise ConfigError(
            f"this is no schema of a tool: {tool!r:.200}",
            where="environment",
            possible='{"type": "function", "function": {"name", "description", "parameters"}}',
            remedy="give the tool a name, or name a function with type hints",
        )
    empty = {"type": "object", "properties": {}}
    whole = {"name": name, "description": function.get("description") or "", "parameters": empty}
    return {"type": "function", "function": whole | {key: value for key, value in function.items() if value}}


def _spelled(template: ChatTemplate, value: Any) -> Any:
    """A schema whose texts are no special tokens."""
    if isinstance(value, str):
        return template.spelled(value)
    if isinstance(value, Mapping):
        return {_spelled(template, key): _spelled(template, inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(template, inner) for inner in value]
    return value
