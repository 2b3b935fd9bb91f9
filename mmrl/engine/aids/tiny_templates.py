"""Chat templates of tiny models: Qwen's format, and tools in the way of each family.

    qwen2_vl, qwen2_5_vl, internvl, gemma4   write no tools; a message of a tool has a header of its own
    qwen2, qwen3, qwen3_vl, ...         tools in the system turn; answers within a user turn; calls are JSON
    qwen3_5, ...                        likewise; calls are marked up argument by argument
    llama                               tools in the system turn; answers as JSON; a call is JSON and nothing else

A conversation without tools is written alike by all of them.

``published_template`` writes thoughts too, as the templates of three generations of one structure do:

    Qwen3.5    each turn begins with a thought; those before the last question of a user are removed
    Qwen3.6    likewise; ``preserve_thinking: true`` keeps them
    Qwen3.8    likewise, but they are kept, and ``preserve_thinking: false`` removes them; a thought is read from
               ``reasoning_content`` alone; ``reasoning_effort`` (low, medium, xhigh) is a sentence in the system turn

All have ``enable_thinking``: false begins each turn with an empty thought. What they do was read in the templates of
Qwen3.6 and Qwen3.8 that huggingface/trl keeps (``trl/chat_templates``); Qwen3.5's is the former without its option.
Their words, calls that a message has in keys of its own, and videos are left out.

``gemma_template`` is the format of Gemma 4, ``<|turn>user ... <turn|>``: texts are trimmed; a turn of the model loses
its thoughts, ``<|channel>thought ... <channel|>``; a message of a tool is written behind the call that it answers,
which mmrl's messages have not, and else not at all. ``enable_thinking: true`` opens the system turn with ``<|think|>``.
Without it the heads of 26B and 31B end with an empty thought, and those of E2B and E4B do not.
"""

from __future__ import annotations

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TILED_IMAGE = "<IMG_CONTEXT>\n"
BUDGETED_IMAGE = "<|image|>"

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


_THINKS = (
    "{% set ns = namespace(asked=-1, head='') %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set text = body(m) | trim %}"
    "{% if not (text.startswith('<tool_response>') and text.endswith('</tool_response>')) %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endif %}{% endfor %}"
    "{% if ns.asked < 0 %}{{ raise_exception('A user must ask something.') }}{% endif %}"
    "EFFORT"
    "{% if tools %}{% set ns.head = ns.head ~ 'These tools can be called. Each is a JSON schema:\n' %}"
    "{% for tool in tools %}{% set ns.head = ns.head ~ (tool | tojson) ~ '\n' %}{% endfor %}"
    "{% set ns.head = ns.head ~ 'CALL\n\n' %}{% endif %}"
    "{% if messages[0]['role'] == 'system' %}{% set ns.head = ns.head ~ body(messages[0]) %}{% endif %}"
    "{% if ns.head | trim %}{{ '<|im_start|>system\n' ~ (ns.head | trim) ~ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% set text = body(m) | trim %}"
    "{% if m['role'] == 'system' %}"
    "{% if not loop.first %}{{ raise_exception('A system message comes first.') }}{% endif %}"
    "{% elif m['role'] == 'assistant' %}"
    "{% set thought = m['reasoning_content'] if m['reasoning_content'] is string else '' %}"
    "PART"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if KEEPS or loop.index0 > ns.asked %}{{ '<think>\n' ~ (thought | trim) ~ '\n</think>\n\n' }}{% endif %}"
    "{{ text ~ '<|im_end|>\n' }}"
) + _ANSWER.replace("body(m)", "text").replace("' + ", "' ~ ").replace(" + '", " ~ '")
_THINKS += (
    "{% else %}{{ '<|im_start|>' ~ m['role'] ~ '\n' ~ text ~ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)
_PART = (
    "{% if not thought and '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1] %}"
    "{% set text = text.split('</think>')[-1] | trim %}{% endif %}"
)
_EFFORT = (
    "{% if enable_thinking is undefined or enable_thinking is true %}"
    "{% set effort = reasoning_effort | default('xhigh') %}"
    "{% if effort not in ('low', 'medium', 'xhigh') %}"
    "{{ raise_exception('No reasoning effort is called ' ~ effort ~ '.') }}{% endif %}"
    "{% if effort != 'medium' %}{% set ns.head = 'Think with an effort of ' ~ effort ~ '.\n\n' %}{% endif %}{% endif %}"
)
PUBLISHED = {
    "Qwen3.5": ("", _PART, "false"),
    "Qwen3.6": ("", _PART, "(preserve_thinking is defined and preserve_thinking is true)"),
    "Qwen3.8": (_EFFORT, "", "(preserve_thinking is undefined or preserve_thinking is true)"),
}
"""For each generation: its effort, the way it finds a thought in a turn's content, and when it keeps earlier ones."""


_GEMMA = (
    "{% macro answer(text) %}{% set kept = namespace(text='') %}{% for piece in text.split('<channel|>') %}"
    "{% set kept.text = kept.text ~ piece.split('<|channel>')[0] %}{% endfor %}{{ kept.text | trim }}{% endmacro %}"
    "{% macro piece(m, text) %}{{ answer(text) if m['role'] == 'assistant' else text | trim }}{% endmacro %}"
    "{% macro body(m) %}{% if m['content'] is string %}{{ piece(m, m['content']) }}"
    "{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{{ IMAGE }}"
    "{% elif part['type'] == 'text' %}{{ piece(m, part['text']) }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}"
    "{% set thinks = enable_thinking is defined and enable_thinking is true %}"
    "{% set led = messages[0]['role'] == 'system' %}"
    "{{ bos_token }}"
    "{% if thinks or tools or led %}{{ '<|turn>system\n' }}{% if thinks %}{{ '<|think|>\n' }}{% endif %}"
    "{% if led %}{{ body(messages[0]) }}{% endif %}"
    "{% for tool in tools or () %}{{ '<|tool>' ~ (tool | tojson) ~ '<tool|>' }}{% endfor %}{{ '<turn|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m['role'] != 'tool' and not (led and loop.first) %}"
    "{{ '<|turn>' ~ ('model' if m['role'] == 'assistant' else m['role']) ~ '\n' }}"
    "{% for call in m['tool_calls'] or () %}"
    "{{ '<|tool_call>call:' ~ call['function']['name'] ~ (call['function']['arguments'] | tojson) ~ '<tool_call|>' }}"
    "{% endfor %}{{ body(m) ~ '<turn|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}QUIET{% endif %}"
)
GEMMA = {"E2B": "", "31B": "{% if not thinks %}{{ '<|channel>thought\n<channel|>' }}{% endif %}"}
"""For each kind of Gemma 4, what its heads end with where it shall not think."""


def gemma_template(models: str) -> str:
    """The chat template of Gemma 4, of a kind in ``GEMMA``."""
    return _with_image(_GEMMA.replace("QUIET", GEMMA[models]), BUDGETED_IMAGE)


def chat_template(family: str) -> str:
    """A family's chat template."""
    image = {"internvl": TILED_IMAGE, "gemma4": BUDGETED_IMAGE}.get(family, IMAGE)
    return _with_image(_of(family), image)


def published_template(models: str) -> str:
    """The chat template of a generation in ``PUBLISHED``, which all of its sizes have."""
    effort, part, keeps = PUBLISHED[models]
    template = _CONTENT + _THINKS.replace("EFFORT", effort).replace("PART", part).replace("KEEPS", keeps)
    return _with_image(template.replace("CALL", MARKED_CALL), IMAGE)


def _with_image(template: str, image: str) -> str:
    # An expression, as Jinja drops a line break after a block.
    return template.replace("{{ IMAGE }}", "{{ " + repr(image) + " }}")


def _of(family: str) -> str:
    if family in ("qwen2_vl", "qwen2_5_vl", "internvl", "gemma4"):
        return PLAIN
    call = MARKED_CALL if family.startswith("qwen3_5") else BARE_CALL if family == "llama" else JSON_CALL
    answer = _JSON_ANSWER if family == "llama" else _ANSWER
    return _CONTENT + _SYSTEM.replace("CALL", call) + answer + _REST
