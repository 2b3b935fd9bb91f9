"""Actions that a policy writes as text: found fast in whatever it writes, and written for `mmrl check`."""

from __future__ import annotations

import re
import time

import pytest

from mmrl_environments.actions import SEARCHED, last_action, text_of

DOCUMENTED = [
    "<answer>(.*?)</answer>",
    "<zoom>(.*?)</zoom>",
    "<a>(.*?)</a>",
    "```python\n(.*?)```",
    r"\\boxed\{(.*?)\}",
]


@pytest.mark.parametrize("pattern", DOCUMENTED)
@pytest.mark.parametrize("flood", ["begin", "begin after an end", "end", "both"])
def test_a_flood_of_marks_is_searched_in_little_time(pattern, flood):
    begin, end = text_of(pattern, "x").split("x")[:2]
    text = {"begin": begin, "begin after an end": begin, "end": end, "both": begin + end}[flood] * 40_000
    start = time.process_time()
    last_action(pattern, end + text if flood == "begin after an end" else text)
    assert time.process_time() - start < 4


@pytest.mark.parametrize(
    "pattern",
    [*DOCUMENTED, r"<a>\s*(\w+)\s*</a>", "Action: (.*)", r"(?:<a>|<b>)(.*?)(?:</a>|</b>)", "(?i)<A>(.*?)</a>"],
)
def test_the_last_of_several_actions_counts(pattern):
    for text in (
        "<a>up</a> <b>left</b> <A> down </a> <a>right</a> <a>never",
        "<answer>1</answer></answer><answer>2</answer> so </answer",
        "Action: up\nAction: left",
        "```python\nprint(1)```\n```python\n\nprint(2)\n``` end",
        r"\boxed{1} or \boxed{2} or {3} \boxed",
        "<zoom>3</zoom>",
        "nothing",
    ):
        found = [match[1].strip() for match in re.finditer(pattern, text, re.DOTALL)]
        assert last_action(pattern, text) == (found[-1] if found else None)


def test_the_end_of_a_long_turn_is_searched():
    assert last_action("<a>(.*?)</a>", "<a>up</a>" + " " * SEARCHED) is None
    assert last_action("<a>(.*?)</a>", " " * SEARCHED + "<a>up</a>") == "up"


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("<answer>(.*?)</answer>", "<answer>up</answer>"),
        ("```python\n(.*?)```", "```python\nup```"),
        (r"\\boxed\{(.*?)\}", r"\boxed{up}"),
        (r"\(\(([a-z]+)\)\)", "((up))"),
        (r"<a>((?:up|down)+)</a>", "<a>up</a>"),
        (r"<a>(\d)</a>", ""),
    ],
)
def test_a_text_is_written_in_which_the_pattern_finds_an_action(pattern, text):
    assert text_of(pattern, "up") == text
