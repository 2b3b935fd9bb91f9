"""Chat templates of tiny models: Qwen's format, and tools in the way of each family.

    qwen2_vl, qwen2_5_vl, internvl      write no tools; a message of a tool has a header of its own
    qwen2, qwen3, qwen3_vl, ...         tools in the system turn; answers within a user turn; calls are JSON
    qwen3_5, ...                        likewise; calls are marked up argument by argument
    llama                               tools in the system turn; answers as JSON; a call is JSON and nothing else

A conversation without tools is written alike by all of them.
"""

from __future__ import annotations

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TILED_IMAGE = "<IMG_CONTEXT>\n"

_CONTENT = (
    "{% macro body(m) %}"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{{ IMAGE }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}"
)
_HEAD = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_MESSAGE = "<|im_start|>{{ m['role'] }}\n{{ body(m) }}<|im_end|>\n"

PLAIN = _CONTENT + "{% for m in messages %}" + _MESSAGE + "{% endfor %}" + _HEAD
"""Writes no tools."""

_SYSTEM = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0]['role'] == 'system' %}{{ body(messages[0]) + '\n\n' }}{% endif %}"
    "These tools can be called. Each is a JSON schema:\n"
    "{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}"
    "CALL<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if tools and loop.first and m['role'] == 'system' %}"
)
_ANSWER = (
    "{% elif m['role'] == 'tool' %}"
    "{% if loop.first or loop.previtem['role'] != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + body(m) + '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
_JSON_ANSWER = (
    "{% elif m['role'] in ('tool', 'ipython') %}{{ '<|im_start|>ipython\n' + (body(m) | tojson) + '<|im_end|>\n' }}"
)
_REST = "{% else %}" + _MESSAGE + "{% endif %}{% endfor %}" + _HEAD

JSON_CALL = 'A call is written as\n<tool_call>\n{"name": <its name>, "arguments": <a JSON object>}\n</tool_call>'
MARKED_CALL = (
    "A call is written as\n<tool_call>\n<function=its name>\n<parameter=an argument>\nits value\n</parameter>\n"
    "</function>\n</tool_call>"
)
BARE_CALL = 'A call is a whole turn, written as {"name": <its name>, "parameters": <a JSON object>}'


def chat_template(family: str) -> str:
    """A family's chat template."""
    image = TILED_IMAGE if family == "internvl" else IMAGE
    # An expression, as Jinja drops a line break after a block.
    return _of(family).replace("{{ IMAGE }}", "{{ " + repr(image) + " }}")


def _of(family: str) -> str:
    if family in ("qwen2_vl", "qwen2_5_vl", "internvl"):
        return PLAIN
    call = MARKED_CALL if family.startswith("qwen3_5") else BARE_CALL if family == "llama" else JSON_CALL
    answer = _JSON_ANSWER if family == "llama" else _ANSWER
    return _CONTENT + _SYSTEM.replace("CALL", call) + answer + _REST
