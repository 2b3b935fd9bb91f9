"""Text between think tags is no answer, for every reward that reads answers."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from mmrl.plugin_host import registry
from mmrl.testing.rollouts import make_rollouts
from mmrl.types import Rollout
from mmrl_rewards.thinking import GAP, reply, reply_of

OPENED = "user: x\nassistant: <think>\n"
PROGRAM, DRAFT = "```python\ndef f(x): return x + 1\n```", "```python\ndef f(x): return 0\n```"
ANSWERS: list[tuple[str, Any, str, str]] = [
    ("math", "7", r"\boxed{7}", r"\boxed{8}"),
    ("math", "7", "The answer is 7.", "The answer is 8."),
    ("numeric", "7", "so 7", "so 8"),
    ("choice", "B", "Answer: B", "Answer: C"),
    ("count", "7", "seven", "eight"),
    ("exact", "dog", "dog", r"\boxed{cat}"),
    ("relaxed", "12", "<answer>12</answer>", "<answer>30</answer>"),
    ("anls", "world", "world", r"\boxed{tree}"),
    ("iou", [10, 20, 110, 220], "[10, 20, 110, 220]", "[0, 0, 1, 1]"),
    ("code", "assert f(1) == 2", PROGRAM, DRAFT),
]
"""A reward, a reference, a right and a wrong answer."""
MARKS = [
    ("<think>", "</think>"), ("<THINK>", "</Think>"), ('<think type="deep">', "</think >"),
    ("<thinking>", "</thinking>"), ("<thought>", "</thought>"), ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"), ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<think>", "</thinking>"),
]  # fmt: skip


def completion(text: str, reference: Any = None, prompt: str = "user: x\nassistant: ") -> Rollout:
    (rollout,) = make_rollouts([text], answer=reference)
    return dataclasses.replace(rollout, prompt=dataclasses.replace(rollout.prompt, text=prompt))


def score(name: str, text: str, reference: Any, prompt: str = "user: x\nassistant: ", **options: Any) -> Any:
    options |= {"i_know_local_is_no_security_boundary": True} if name == "code" else {}
    return registry.given("reward", name, options or None).score_one(completion(text, reference, prompt))


@pytest.mark.parametrize(("name", "reference", "right", "wrong"), ANSWERS, ids=lambda value: str(value)[:9])
def test_no_reward_reads_an_answer_in_thinking(name, reference, right, wrong):
    assert score(name, f"<think>{wrong}</think>\n{right}", reference) == 1
    assert score(name, f"{wrong}</think>\n{right}", reference, OPENED) == 1
    assert score(name, f"<think>\n{right}\n</think>\nI do not know.", reference) == 0
    assert score(name, f"<think>\n{right}", reference) == 0
    assert score(name, right, reference, OPENED) == 0
    if name != "code":
        assert score(name, f"<think>\n{right}\n</think>\n{wrong}", reference) == 0


@pytest.mark.parametrize(("opening", "closing"), MARKS)
def test_models_mark_their_thinking_in_many_ways(opening, closing):
    assert reply(f"{opening}a{closing}b") == "b"
    assert reply(f"{opening}a") == ""
    assert reply_of(completion(f"a{closing}b", prompt=f"user: x\nassistant: {opening}\n\n")) == "b"
    assert reply_of(completion("a", prompt=f"user: x\nassistant: {opening}")) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no tags", "no tags"),
        ("<think>a</think>b<think>c</think>d", f"b{GAP}d"),
        ("b<think>c", "b"),
        ("<think>a<think>b</think>c</think>d", "d"),
        ("<think>a <think> is a tag</think>d", "d"),
        ("<think>a<reasoning>b</reasoning>c", ""),
        ("<reasoning>a<think>b</think>c</reasoning>d", "d"),
        ("a</think>b", "b"),
        ("<think>a</think>b</think>", "b"),
        ("<think></think>b", "b"),
        ("<think>a `</think>` b</think>c", "c"),
        ("Use `<think>` and `</think>`.", "Use `<think>` and `</think>`."),
        ('print("<think>x</think>")', 'print("<think>x</think>")'),
        ("<think>`a`</think>`b`", "`b`"),
        ("```\ns.split(</think>)\n```", "```\ns.split(</think>)\n```"),
        ("<think>```\na\n</think>\n```\nb\n```", "\n```\nb\n```"),
        ("x <reason and y> z", "x <reason and y> z"),
        ("see [think](a)", "see [think](a)"),
    ],
)
def test_thinking_ends_where_a_reader_would_say_so(text, expected):
    assert reply(text) == expected


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (OPENED, "a</think>b", "b"),
        (OPENED, "<think>a</think>b", "b"),
        (OPENED, "<reasoning>a</reasoning>b", ""),
        ("user: x\nassistant: <think>\n\n</think>\n\n", "b", "b"),
        ("user: write <think> first\nassistant: ", "b", "b"),
    ],
)
def test_the_prompt_may_have_opened_the_tag(prompt, text, expected):
    assert reply_of(completion(text, prompt=prompt)) == expected


def test_every_extraction_leaves_thinking_out():
    assert score("exact", "<think>9</think> 7", "7", extract="whole") == 1
    assert score("exact", "<think>9</think> 7 <think>8", "7", extract="last_number") == 1
    assert score("exact", "<think>7</think> none", "7", extract="last_number") == 0
    assert score("exact", r"<think>\boxed{7}</think> 7", "7", extract="boxed") == 0
    assert score("math", r"\boxed{4}<think>no</think>\boxed{5}", "5") == 1


def test_a_reference_is_what_stands_after_its_thinking():
    assert score("math", r"\boxed{3}", r"<think>\boxed{2}</think> 3") == 1


ANSWER, BOXED = "think_then_answer", "think_then_boxed"


@pytest.mark.parametrize(
    ("pattern", "text", "prompt", "expected"),
    [
        (ANSWER, "a</think>\n<answer>7</answer>", OPENED, 1),
        (ANSWER, "a</think>\n<answer>7</answer>", "", 0),
        (ANSWER, "<think>a</think>\n<answer>7</answer>", "", 1),
        (ANSWER, "<think>a</think>\n<answer>7</answer>", OPENED, 0),
        (ANSWER, "<think>a</think>\n<answer>7</answer>", "<think>\n\n</think>\n\n", 1),
        (ANSWER, "a\n<answer>7</answer>", OPENED, 0),
        (ANSWER, "</think><answer>7</answer>", "<think>", 0),
        (ANSWER, "</think><answer>7</answer>", OPENED, 0),
        (ANSWER, "a</think><answer> \n</answer>", OPENED, 0),
        (BOXED, "\n</think> \\boxed{7}", OPENED, 0),
        (BOXED, "a</think> It is \\boxed{7}.", OPENED, 1),
        (BOXED, "a</think> It is \\boxed{7}.", "", 0),
        (BOXED, "a \\boxed{7}</think> It is 7.", OPENED, 0),
        ("boxed", "a</think> \\boxed{7}", OPENED, 1),
        ("boxed", "a \\boxed{7}", OPENED, 0),
        ("boxed", "\\boxed{7} <think>sure</think>", "", 0),
        ("answer", "<think>a <answer>7</answer>", "", 0),
        ("answer", "<think>a</think> <answer>7</answer>", "", 1),
        (r"<think>\n[^<]+</think>.*", "a</think> b", OPENED, 1),
        (r"[^<]+</think>.*", "a</think> b", OPENED, 1),
        (r"<think>[^<]+</think>.*", "a</think> b", "", 0),
    ],
)
def test_prompt_and_completion_together_have_the_form(pattern, text, prompt, expected):
    assert score("format", text, None, prompt, pattern=pattern) == expected


@pytest.mark.parametrize("text", ["<think>", "</think>", "<think>a</think>", "<think><reason>", "</reason>`</think>"])
def test_tags_are_read_in_linear_time(text):
    start = time.process_time()
    reply(text * 20_000)
    reply(text * 20_000 + "</think>" * 20_000, "<think>")
    assert time.process_time() - start < 30
