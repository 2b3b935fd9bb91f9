import contextlib
import json
import time
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from mmrl.interfaces import RunFacts
from mmrl.rollout.rewards.worker import call
from mmrl.types import EncodedPrompt, Prompt, Rollout, Segment
from mmrl_rewards.answers import bare, final_answer, last_boxed, last_number, references
from mmrl_rewards.exact import Exact
from mmrl_rewards.format import Format
from mmrl_rewards.math import Math
from mmrl_rewards.overlong import Overlong
from mmrl_rewards.symbolic import OutOfTime, limit

GOLDEN = json.loads((Path(__file__).parents[1] / "golden_vectors.json").read_text())


def rollout(text, answer=None):
    prompt = EncodedPrompt(prompt=Prompt("p", (), answer=answer), text="", token_ids=np.zeros(0, np.int32), images=())
    return Rollout(prompt, (), 0, text, "stop", 1)


def written(*segments):
    """A rollout of segments, each a length and whether the policy wrote it."""
    prompt = EncodedPrompt(prompt=Prompt("p", ()), text="", token_ids=np.zeros(0, np.int32), images=())
    parts = tuple(Segment(np.ones(n, np.int32), by_policy, np.zeros(n, np.float32)) for n, by_policy in segments)
    return Rollout(prompt, parts, 0, "", "stop", 1)


def facts(max_new_tokens):
    return RunFacts(
        group_size=2, prompts_per_step=2, max_new_tokens=max_new_tokens, updates_per_batch=1, rewards=("overlong",)
    )


def score(reward, text, answer=None, **options):
    return call(reward(reward.Config(**options)), [rollout(text, answer)])[0]


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"so \boxed{7}", "7"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{7}{25}} and more", r"\frac{7}{25}"),
        (r"\boxed{ \{1, 2\} }", r"\{1, 2\}"),
        (r"a { b \boxed{3}", "3"),
        (r"} \boxed {4}", "4"),
        (r"\boxed{5} then cut off \boxed{6", "5"),
        (r"\boxed{\boxed{8}}", "8"),
        ("no box", None),
    ],
)
def test_the_last_complete_box_counts_whatever_braces_are_around_or_in_it(text, boxed):
    assert last_boxed(text) == boxed


def test_a_megabyte_of_open_boxes_is_read_in_linear_time():
    start = time.perf_counter()
    assert last_boxed(r"\boxed{" * 150_000) is None
    assert time.perf_counter() - start < 30


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("from 3 to 12.", "12"),
        ("it costs 1,234.50 dollars", "1,234.50"),
        ("x = -3", "-3"),
        ("3-2", "2"),
        ("about .5", ".5"),
        ("wait...7", "7"),
        ("half, 1/2", "1/2"),
        ("none", None),
    ],
)
def test_the_last_number_is_found(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("<answer> 3 </answer>", ["3"]),
        ("<think>2</think><answer>\\boxed{3}</answer>", ["3"]),
        ("$\\boxed{48}$", ["48"]),
        ("$2 \\sqrt { 221 }$", ["2 \\sqrt { 221 }"]),
        (["7", 8, 0.5], ["7", "8", "0.5"]),
        (np.array(["a", "b"]), ["a", "b"]),
        (0, ["0"]),
        (None, []),
        (" ", []),
        ([], []),
        (4.0, ["4", "4.0"]),
        ({"value": 4}, ["4"]),
        ({"unknown": 4}, []),
    ],
)
def test_references_are_unwrapped_and_lists_mean_any_of(answer, expected):
    assert references(answer) == expected


def test_an_answer_is_bared_of_what_is_around_it():
    assert bare("  \\( \\text{two  words}. \\) ") == "two words"
    assert bare("$a$ and $b$") == "$a$ and $b$"
    assert final_answer("<answer>\\boxed{1}</answer> \\boxed{2}") == "1"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1</answer> <answer>2</answer>", "2"),
        ("<ANSWER>1</Answer>", "1"),
        ("<answer>1</answer> <answer> </answer>", "1"),
        ("<answer>1</answer> <answer>2", "1"),
        ("<answer>1</answer></answer>", "1"),
        (r"\boxed{1} <answer></answer>", "1"),
        (r"\boxed{1} Put it in \boxed{}.", "1"),
        ("</answer>1<answer>", None),
    ],
)
def test_the_last_mark_that_is_complete_and_not_blank_counts(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "The answer is B.",
        "**Answer:** B",
        "Final answer: **B**",
        "The correct option is B.",
        "Best choice: B",
        "答案是B。",
    ],
)
def test_an_answer_is_stated_in_these_words(text):
    assert score(Exact, f"C is wrong, I think.\n{text}\nThat is it.", "B") == 1


def test_exact_compares_the_marked_answer_or_else_the_whole_completion():
    assert score(Exact, r"I see \boxed{7}", "7") == 1
    assert score(Exact, r"7, no, \boxed{8}", "7") == 0
    assert score(Exact, " Yes. ", "yes") == 1
    assert score(Exact, "It is 7", "7") == 0
    assert score(Exact, r"\boxed{7.0}", 7) == 0
    assert score(Exact, r"\boxed{b}", ["a", "b"]) == 1


def test_exact_takes_the_answer_from_where_it_is_told():
    assert score(Exact, "7", "7", extract="boxed") == 0
    assert score(Exact, "It is 7 of them", "7", extract="last_number") == 1
    assert score(Exact, r"\boxed{7}!", "7", extract="whole") == 0
    assert score(Exact, "Yes", "yes", case_sensitive=True) == 0


def test_without_a_reference_exact_and_math_say_that_they_cannot_score():
    assert score(Exact, "7", None) is None
    assert score(Math, "7", "") is None


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        (r"\sqrt{884}", r"2 \sqrt { 221 }"),
        ("48", r"48^\circ"),
        ("48 cm", "48"),
        (r"\frac{7}{25}", "0.28"),
        ("7/25", r"\frac { 7 } { 25 }"),
        ("(A)", "A"),
        ("1,000", "1000"),
        ("x = 3", "3"),
        (r"50\%", "0.5"),
        (r"50\%", "50"),
        ("Yes", "yes"),
        ("8", ["7", "8"]),
        ("3", "<answer> 3 </answer>"),
    ],
)
def test_math_accepts_equal_values(answer, reference):
    assert score(Math, f"so \\boxed{{{answer}}}", reference) == 1


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("221", r"2 \sqrt { 221 }"),
        ("29.7321", r"2\sqrt{221}"),
        ("50", "0.5"),
        ("5 or 6", "5"),
        ("5$ or $6", "5"),
        ("sey", "yes"),
        ("9**9**9**9", "9"),
        ("", "5"),
        ("\0", "0"),
    ],
)
def test_math_refuses_other_values(answer, reference):
    assert score(Math, f"so \\boxed{{{answer}}}", reference) == 0


@pytest.mark.parametrize("answer", ["9^{9^{9^{9}}}", "99999999!", "[" * 290, "{" * 10**6, "1" * 10**6])
def test_a_hostile_answer_is_wrong_and_soon(answer):
    start = time.perf_counter()
    assert score(Math, f"<answer>{answer}</answer>", "5", time_limit_s=0.3) == 0
    assert time.perf_counter() - start < 30


def test_the_time_limit_strikes_again_where_its_exception_was_swallowed():
    def deaf():
        start = time.process_time()
        with contextlib.suppress(OutOfTime):
            while time.process_time() - start < 5:
                sum(range(10**6))
        while time.process_time() - start < 5:
            sum(range(10**6))

    with pytest.raises(OutOfTime), limit(0.1):
        deaf()


def test_math_takes_the_last_number_only_where_no_box_is_required():
    assert score(Math, "the sum is 12", "12") == 1
    assert score(Math, "the sum is 12", "12", require_box=True) == 0
    assert score(Math, r"12, or \boxed{13}", "12") == 0


def test_format_matches_the_whole_completion_across_lines():
    assert score(Format, "first\nthen \\boxed{\\frac{1}{2}}.\n") == 1
    assert score(Format, r"\boxed{1} and more") == 0
    assert score(Format, "<think>\na\n</think> b", pattern="<think>.*</think>.*") == 1


def test_a_pattern_that_is_none_is_refused_with_the_options():
    with pytest.raises(ValidationError, match="not a regular expression"):
        Format.Config(pattern="(")


@pytest.mark.parametrize("golden", GOLDEN["overlong"], ids=lambda entry: str(entry["l_max"]))
def test_overlong_equals_the_golden_vectors(golden):
    options = {"max_tokens": golden["l_max"], "cache_tokens": golden["l_cache"], "factor": golden["factor"]}
    reward = Overlong(Overlong.Config(**options))
    scores = call(reward, [written((length, True)) for length in golden["lengths"]])
    assert scores == pytest.approx(golden["expected"], rel=1e-12, abs=0)
    assert str(scores[0]) == "0.0"


def test_overlong_is_a_penalty_with_the_papers_defaults():
    assert Overlong.penalty and not Exact.penalty
    assert Overlong.Config().model_dump() == {"max_tokens": 20480, "cache_tokens": 4096, "factor": 1.0}


def test_overlong_counts_only_what_the_policy_wrote():
    reward = Overlong(Overlong.Config(max_tokens=10, cache_tokens=4))
    assert reward.score_one(written((4, True), (100, False), (4, True))) == -0.5
    assert reward.score_one(written((100, False))) == 0.0


def test_a_cache_larger_than_the_limit_is_refused():
    with pytest.raises(ValidationError, match="cache_tokens is 5, more than max_tokens, 4"):
        Overlong.Config(max_tokens=4, cache_tokens=5)
    Overlong.Config(max_tokens=4, cache_tokens=4)


@pytest.mark.parametrize(
    ("max_new_tokens", "fragment"),
    [(60, "never reached: it begins after 60"), (61, "never whole"), (99, "never whole"), (101, "no longer grows")],
)
def test_overlong_warns_of_a_limit_that_is_not_the_runs(max_new_tokens, fragment):
    reward = Overlong(Overlong.Config(max_tokens=100, cache_tokens=40))
    (warning,) = reward.check(facts(max_new_tokens))
    assert fragment in warning and f"sampler.max_new_tokens, {max_new_tokens}" in warning
    assert reward.check(facts(100)) == []
