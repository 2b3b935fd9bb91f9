"""Proof that turns and turn suffixes, appended one by one, are what a chat template makes of the whole conversation.

A template is compared on conversations of several turns whose texts would show that something is dropped, escaped,
moved or rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmrl.data.chat_messages import Filled
from mmrl.engine.text.chat_template import ChatTemplate

Suffix = Callable[[Sequence[Filled]], str]
"""The text between two turns, with these messages in between."""
IMAGE = object()
"""Stands for an image."""
ASKED = "Find the answer."
SAID = (
    'I look closer.\n<tool_call>\n{"name": "look", "arguments": {"x": [1, 2], "why": "a\\nb"}}\n</tool_call>',
    "I try \\frac{1}{2} & <b>once</b> more.",
    "So 7.",
)
"""Turns of the policy; calls in it are text."""
THOUGHT = "It may be 7.\n\nOr 8."
SEEN = 'It\'s "7" & <b>8</b>: a\\b\n\n\t{{ x }} \u00e9\u4e2d.', '{"found": [1, 2.5, null]}', "Nothing else."
"""Texts of observations."""
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Carrier:
    """The way in which an observation reaches the policy.

    Attributes:
        role: Role of its message.
        as_text: True if a vision-language model's template reads the message as one string.
        deviation: A clause on the template that says how the whole conversation differs, where that is accepted.
    """

    role: str
    as_text: bool = False
    deviation: str = ""

    def message(self, template: ChatTemplate, content: Sequence[object]) -> Filled:
        """An observation's message."""
        return template.message(self.role, content, as_text=self.as_text)


@dataclass(frozen=True, slots=True)
class Deviation:
    """The reason why turns that are appended are not the template's whole conversation.

    Attributes:
        what: A clause for messages.
        thoughts: True if all that differs are thoughts, which the template removes from earlier turns.
    """

    what: str
    thoughts: bool = False


def deviation_of(template: ChatTemplate, suffix: Suffix, carrier: Carrier, *, images: bool) -> Deviation | None:
    """The first deviation that a carrier of observations has; None if it has none.

    Args:
        images: True for observations that hold images.
    """
    contents: list[tuple[object, ...]] = [(text,) for text in SEEN]
    if images:
        contents = [(IMAGE,), (SEEN[0], IMAGE, SEEN[2]), (IMAGE, IMAGE)]
    try:
        found = _lost(template, suffix, carrier, contents)
        if found is not None:
            return found
        head, marks = prefill(template), template.thoughts
        opened, closed = _opens_thought(template, head), marks.closing in head
        # A thought begins where the template has begun it.
        thoughtful = tuple(marks.around(THOUGHT, text, opened=opened) for text in SAID)
        for texts in (() if opened else SAID, () if closed else thoughtful):
            if texts and (found := _rewritten(template, suffix, carrier, contents, texts, head)) is not None:
                return found
    except Exception as error:  # the template is the model's: any exception is its own
        return Deviation(f"the template fails: {error}")
    return None


def said_after(template: ChatTemplate, head: str) -> str:
    """A turn of the policy that goes on from a head, of which the template may have begun the thought."""
    opened = _opens_thought(template, head)
    return template.thoughts.around(THOUGHT, SAID[0], opened=True) if opened else SAID[0]


def conversation(template: ChatTemplate, said: str, observation: Filled) -> list[Filled]:
    """A question, a turn of the policy and an observation."""
    asked = template.message("user", (ASKED,))
    return [asked, template.said(prefill(template) + said), observation]


def _opens_thought(template: ChatTemplate, head: str) -> bool:
    """True if a turn's head leaves a thought open."""
    return template.thoughts.opening in head and template.thoughts.closing not in head


def _lost(
    template: ChatTemplate, suffix: Suffix, carrier: Carrier, contents: Sequence[Sequence[object]]
) -> Deviation | None:
    """A deviation in what single observations become."""
    image_id = template.folder.image_token_id
    for content in contents:
        text = suffix([carrier.message(template, content)])
        at = 0
        for part in content:
            if not isinstance(part, str):
                continue
            if part not in text:
                return Deviation(f"it drops or rewrites the text {part[:_SHOWN]!r}")
            if (at := text.find(part, at)) < 0:
                return Deviation("it moves texts")
            at += len(part)
        expected = sum(not isinstance(part, str) for part in content)
        found = template.tokenize(text, carrier.role).count(image_id) if expected else 0
        if found != expected:
            return Deviation(f"it makes {found} of {expected} image{'s' * (expected > 1)}")
    return None


def _rewritten(
    template: ChatTemplate,
    suffix: Suffix,
    carrier: Carrier,
    contents: Sequence[Sequence[object]],
    said: Sequence[str],
    prefill: str,
) -> Deviation | None:
    """A deviation between a whole conversation and its turns in a row, in text or tokens."""
    asked, marks = template.message("user", (ASKED,)), template.thoughts
    messages, begin = [asked], template.fill([asked])
    ours, thoughtless = begin, begin.removesuffix(prefill)
    ids = template.tokenize(begin, carrier.role)
    for text, content in zip(said, contents, strict=True):
        observation = carrier.message(template, content)
        messages += [template.said(prefill + text), observation]
        after = suffix([observation])
        ours += text + after
        thoughtless += (text.partition(f"{marks.closing}{marks.gap}")[2] or text) + after.removesuffix(prefill)
        ids += template.tokenize(text, carrier.role) + template.tokenize(after, carrier.role)
    theirs = template.fill(messages)
    if theirs == ours:
        whole = template.tokenize(theirs, carrier.role)
        return None if whole == ids else Deviation("the tokens of a part are not those that it has in the whole")
    if theirs.removesuffix(prefill) == thoughtless:
        return Deviation("it removes thoughts from earlier turns", thoughts=True)
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    shown = [repr(text[same : same + _SHOWN]) for text in (theirs, ours)]
    return Deviation(f"it rewrites earlier turns: after more turns they have {shown[0]} where they had {shown[1]}")


def prefill(template: ChatTemplate) -> str:
    """The end of a turn's head: the opening of a thought that the template writes itself, or an empty thought."""
    head = template.fill([template.message("user", (ASKED,))])
    at = head.rfind(template.thoughts.opening)
    return "" if at < 0 else head[at:]
