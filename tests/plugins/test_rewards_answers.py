"""Right is right and wrong is wrong, in every style of answer; and no answer hangs or crashes a reward."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.config.plugin_specs import RewardSpec
from mmrl.interfaces import Reward
from mmrl.rollout.rewards.scorer import Scorer
from mmrl.rollout.rewards.worker import call
from mmrl.testing import check_reward
from mmrl.types import EncodedPrompt, Prompt, Rollout, RolloutGroup
from mmrl_rewards.answers import final_answer
from mmrl_rewards.letters import folded

CLASSES = {
    "anls": "ANLS", "choice": "Choice", "code": "Code", "count": "Count", "exact": "Exact", "format": "Format",
    "iou": "IoU", "math": "Math", "numeric": "Numeric", "overlong": "Overlong", "relaxed": "Relaxed",
}  # fmt: skip
LOCAL = {"i_know_local_is_no_security_boundary": True}
GOLDS: dict[str, Any] = {"code": "assert f(1) == 2", "iou": [0, 0, 2, 2], "choice": "B"}


def _labelled() -> Any:
    spec = importlib.util.spec_from_file_location("labelled_answers", Path(__file__).with_name("labelled_answers.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.LABELLED


LABELLED = _labelled()


def made(name: str, **options: Any) -> Reward:
    cls = getattr(import_module(f"mmrl_rewards.{name}"), CLASSES[name])
    return cls(cls.Config(**(LOCAL if name == "code" else {}) | options))


def group(texts: Sequence[str], reference: Any, choices: Sequence[str] = (), columns: Any = None) -> RolloutGroup:
    prompt = EncodedPrompt(
        prompt=Prompt("p", (), answer=reference, columns=columns or {}, choices=tuple(choices)),
        text="",
        token_ids=np.zeros(0, np.int32),
        images=(),
    )
    return RolloutGroup(prompt, tuple(Rollout(prompt, (), i, text, "stop", 1) for i, text in enumerate(texts)))


def scores(
    reward: Reward, texts: Sequence[str], reference: Any, choices: Sequence[str] = (), columns: Any = None
) -> Any:
    return call(reward, group(texts, reference, choices, columns).rollouts)


@pytest.mark.parametrize("question", LABELLED, ids=lambda q: f"{q.style}-{q.reward}-{q.reference}")
def test_labelled_answers_are_graded_as_a_human_would(question):
    texts = [*question.right, *question.wrong]
    given = scores(
        made(question.reward, **question.options), texts, question.reference, question.choices, question.columns
    )
    expected = [1.0] * len(question.right) + [0.0] * len(question.wrong)
    assert [pair for pair in zip(texts, given, expected, strict=True) if pair[1] != pair[2]] == []


def test_there_are_enough_labelled_answers_of_each_style():
    count = Counter[str]()
    for question in LABELLED:
        count[question.style] += len(question.right) + len(question.wrong)
    assert count.total() >= 300
    assert min(count[style] for style in ("geometry3k", "clevr", "geoqa", "mathvista", "chartqa")) >= 40


@pytest.mark.parametrize("name", sorted({question.reward for question in LABELLED}))
def test_the_same_answer_has_the_same_score_and_no_answer_has_none(name):
    for question in (question for question in LABELLED if question.reward == name):
        reward = made(name, **question.options)
        rollouts = group([*question.right, *question.wrong], question.reference, question.choices, question.columns)
        seen = dict[str | None, Any]({None: 0.0})
        for rollout in rollouts.rollouts:
            answer = reward.answer_of(rollout)
            assert seen.setdefault(answer, reward.score_one(rollout)) == reward.score_one(rollout), rollout.text


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{3} and \boxed{5}", "3, 5"),
        (r"$\boxed{3}$ or $\boxed{5}$", "3, 5"),
        (r"\boxed{3},\;\boxed{5}, \text{ and } \boxed{7}", "3, 5, 7"),
        ("\\[\\boxed{3}\\]\n\\[\\boxed{5}\\]", "3, 5"),
        (r"**\boxed{3}** & **\boxed{5}**", "3, 5"),
        (r"\boxed{3}和\boxed{5}，以及\boxed{7}", "3, 5, 7"),
        (r"$x = \boxed{3}$ and $y_1 = \boxed{5}$", "3, 5"),
        (r"\boxed{\boxed{3}, \boxed{5}}", "3, 5"),
        (r"\boxed{3} and \boxed{\boxed{5}}", "3, 5"),
        (r"<answer>\boxed{3}; \boxed{5}</answer>", "3, 5"),
        ("\\boxed{5}\n\n\\boxed{5}", "5"),
        (r"\boxed{3}, \boxed{}", "3"),
        ("- \\boxed{3}\n- \\boxed{5}", "3, 5"),
        ("1. $\\boxed{3}$\n2. $\\boxed{5}$", "3, 5"),
        (r"\boxed{3} - \boxed{5}", "5"),
        (r"\boxed{4}. So \boxed{5}", "5"),
        (r"\boxed{4}, so \boxed{5}", "5"),
        (r"\boxed{4} = \boxed{5}", "5"),
        (r"\boxed{4} android \boxed{5}", "5"),
        (r"I think \boxed{1}. It is \boxed{1} because of x", "1"),
    ],
)
def test_boxes_that_follow_each_other_are_one_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize("blank", [r"\boxed{}", r"\boxed{ }", "<answer></answer>", "<answer>\n</answer>"])
def test_a_blank_mark_hides_nothing(blank):
    text = f"It belongs in {blank}. The answer is"
    for name in ("math", "numeric", "count", "exact"):
        assert scores(made(name), [f"{text} 12.", f"{text} 13.", f"12 {blank} \\boxed{{13"], "12") == [1, 0, 1]
    assert scores(made("choice"), [f"{text} B", f"{text} A"], "B") == [1, 0]


def test_several_boxes_are_no_choice_and_no_number_but_a_list():
    assert scores(made("choice"), [r"\boxed{A} and \boxed{B}", r"\boxed{B}, \boxed{B}"], "B") == [0, 1]
    assert scores(made("numeric"), [r"\boxed{0} and \boxed{6}", r"\boxed{6} and \boxed{0}"], "[0, 6]") == [1, 0]
    assert scores(made("numeric"), [r"\boxed{5} or \boxed{6}"], "5") == [0]
    assert scores(made("iou"), [r"\boxed{[0, 0, 2, 2]} and \boxed{[4, 4, 6, 6]}"], [[0, 0, 2, 2], [4, 4, 6, 6]]) == [1]


@pytest.mark.parametrize(
    ("name", "reference", "unreadable", "right", "wrong"),
    [
        ("choice", "D", r"\langle H\rangle \ll \Delta E", "D", "E"),
        ("choice", "C", "F = ma", "option (C), since it is so", "not (C)"),
        ("numeric", "12", r"\text{see above}", "12", "13"),
        ("numeric", "12", "x", "12 cm", "x"),
        ("count", "3", "apples", "three", "four"),
        ("iou", [0, 0, 2, 2], "a cat", "[0, 0, 2, 2]", "[4, 4, 6, 6]"),
    ],
)
def test_a_mark_that_is_not_of_the_kind_gives_way_to_what_is_stated_after_it(name, reference, unreadable, right, wrong):
    reward = made(name)
    for marked in (f"\\boxed{{{unreadable}}}", f"<answer>{unreadable}</answer>"):
        texts = [
            f"{marked}\n\n**Answer: {right}**",
            f"{marked} The answer is {wrong}.",
            f"The answer is {right}. {marked}",
        ]
        assert scores(reward, texts, reference) == [1, 0, 0]
    if name != "iou":
        assert scores(made(name, require_box=True), [f"\\boxed{{{unreadable}}} The answer is {right}."], reference) == [
            0
        ]


@pytest.mark.parametrize(
    ("name", "reference", "text"),
    [("choice", "D", r"\boxed{D} Answer: C"), ("numeric", "12", r"\boxed{12} Answer: 13"),
     ("count", "3", r"\boxed{three} Answer: 4"), ("iou", [0, 0, 2, 2], r"\boxed{[0, 0, 2, 2]} Answer: [4, 4, 6, 6]")],
)  # fmt: skip
def test_a_mark_of_the_kind_is_the_answer_whatever_is_stated_after_it(name, reference, text):
    assert scores(made(name), [text], reference) == [1]


SPELLINGS = [
    ("caf\u00e9", "cafe\u0301"), ("\uac00", "\u1100\u1161"), ("\u30ac", "\uff76\uff9e"), ("ABC12", "ＡＢＣ１２"),
    ("New York", "New\u00a0York"), ("New York", "New\u3000York"), ("yes", "y\u200be\u00ads\ufeff"), ("-5", "−5"),
    ("X-ray", "X\u2011ray"), ("2010-2015", "2010–2015"), ("don't", "don’t"), ('a "b"', "a “b”"), ("a,b", "a、b"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), SPELLINGS)
def test_spellings_of_unicode_are_one(one, other):
    for name in ("exact", "relaxed", "anls"):
        for reference, answer in ((one, other), (other, one)):
            assert scores(made(name), [answer, f"\\boxed{{{answer}}}"], reference) == [1, 1], name
    assert scores(made("choice"), [f"\\boxed{{{other}}}", "\\boxed{Ｂ}"], "B", ["tea", one]) == [1, 1]


@pytest.mark.parametrize("name", ["exact", "relaxed", "anls", "choice"])
def test_backticks_around_an_answer_are_no_part_of_it(name):
    reference = "B" if name == "choice" else "cat"
    texts = [f"`{reference}`", f"The answer is `{reference}`.", f"**`{reference}`**", "`a` or `b`"]
    assert [score == 1 for score in scores(made(name), texts, reference)] == [True, True, True, False]


def test_a_name_is_a_part_of_the_answer_where_the_reference_has_another():
    reward = made("math")
    answers = [reward.answer_of(each) for each in group([r"\boxed{x = 5}", r"\boxed{y = 5}", "5"], "x = 5").rollouts]
    assert answers == ["5", "y = 5", "5"]
    assert [reward.answer_of(each) for each in group([r"\boxed{x = 5}", r"\boxed{y = 5}"], "5").rollouts] == ["5", "5"]


def test_numbers_are_read_in_one_spelling():
    assert scores(made("numeric"), ["It is −5", "It is 5"], "-5") == [1, 0]
    assert scores(made("numeric"), ["It is −5"], "5") == [0]
    assert scores(made("count"), ["答案是：３", "there are ３"], "3") == [1, 1]
    assert scores(made("numeric"), ["有100、200、300", "有100，200，300"], "300") == [1, 1]
    assert scores(made("numeric"), ["the sum—7"], "7") == [1]


@pytest.mark.parametrize("text", ["x²", "1½", "ﬁn", "٣", "naïve"])
def test_characters_that_mean_something_else_stay(text):
    assert folded(text) == text


def test_a_letter_with_thousands_of_marks_takes_no_time():
    start = time.process_time()
    folded("a" + "\u0301\u0323" * 50_000)
    folded(("a" + "\u0301\u0323" * 15) * 3000)
    assert time.process_time() - start < 30


@pytest.mark.parametrize("name", ["math", "numeric", "exact"])
@pytest.mark.parametrize(
    ("reference", "answer", "expected"),
    [
        (0.1 + 0.2, "0.3", 1), (1.1 * 1.1, "1.21", 1), (6.999999999999999, "7", 1), (-(0.1 + 0.2), "-0.3", 1),
        (1.2e-5, "0.000012", 1), (0.1 + 0.2, "0.30000000000000004", 1), (0.1 + 0.2, "0.3000000001", 0),
        (0.123456789012, "0.123456789013", 0), (np.float32(0.1), "0.1", 1), ([np.float32(29.7)], "29.7", 1),
        (np.array([29.7], np.float32), "29.7", 1), (np.float16(0.1), "0.1", 1), ("0.30000000000000004", "0.3", 1),
        (np.float64(0.1 + 0.2), "0.3", 1), ({"answer": 0.1 + 0.2}, "0.3", 1), (2.5, "2.50000", None),
    ],
)  # fmt: skip
def test_a_float_means_its_shortest_decimal(name, reference, answer, expected):
    expected = float(name != "exact") if expected is None else expected
    assert scores(made(name), [f"\\boxed{{{answer}}}"], reference) == [expected]


HOSTILE = [
    "9**9**9**9", "9^{9^{9^{9}}}", "99999999!", "[" * 2**17, "(" * 200, "{" * 2**17, "}" * 2**17, r"\boxed{" * 20_000,
    r"\boxed{}" * 12_500 + "x", "<answer>" * 12_500, "</answer>" * 12_500, "<think>" * 12_500, "$" * 2**17,
    "import os; os.system('true')", "__import__('os')", "\0" * 1000, "7\0", "1" * 2**17, "1e999999999", "1e-999", "NaN",
    "-inf", r"\infty", r"\frac{1}{0}", r"\frac" * 60, r"\sqrt{" * 60, "1/" * 100, "0/0", "1," * 2**16, "-" * 2**17,
    " " * 2**17, "\n" * 2**17, "answer is " * 12_500, "the answer is" + " " * 2**17, "a" * 2**17, "one " * 25_000,
    "hundred hundred", "\ud800", "\u202e7", "𝟕", "٣", "7" + "\u0301" * 10_000, "```" * 12_500, "```python\n" * 10_000,
    '{"a":' * 12_500, "[[1,2,3,4]," * 6_000, '{"bbox_2d": [NaN, Infinity, 1e999, 2]}', "[1e308, -1e308, 1e308, 1]",
    r"\int_0^{\infty} e^{-x^2} dx", r"\sum_{n=1}^{10^{10}} n!", "x^{10^{10}}", "sin(" * 50, r"\begin{pmatrix}" * 20,
    "the answer is " + "9" * 5000,
    "the answer is " * 6_000, r"\boxed{x}" + "the answer is " * 6_000, r"\boxed{x}, " * 6_000,
    "A" * 100, "(A)" * 12_500, "3!!!!!!!!!", r"2^{2^{2^{2^{2^{2}}}}}", "factorial(10**9)",
]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "math" else pytest.mark.full)
        for name in sorted(set(CLASSES) - {"code", "overlong"})
    ],
)
def test_no_answer_hangs_or_crashes_a_reward(name):
    options = {"math": {"time_limit_s": 0.2}}.get(name, {})
    reward, reference = made(name, **options), GOLDS.get(name, "5")
    scores(reward, [r"\boxed{x+1}"], "x + 2")  # what is imported by the first call is no answer's fault
    for text in HOSTILE:
        for wrapped in (text, f"\\boxed{{{text}}}"):
            start = time.process_time()
            (score,) = scores(reward, [wrapped], reference)
            assert score is not None and 0 <= score <= 1
            if name != "format":
                assert score == 0, wrapped[:80]
            assert time.process_time() - start < 5, wrapped[:80]


@pytest.mark.full
def test_hostile_answers_are_graded_by_the_worker_like_all_others():
    names = ["math", "numeric", "choice", "count", "exact", "relaxed", "anls", "iou", "format"]
    specs = [RewardSpec(name="math", time_limit_s=0.2, timeout_s=60), *(RewardSpec(name=n) for n in names[1:])]
    texts = [f"\\boxed{{{text}}}" for text in HOSTILE[:16]]
    with Scorer(specs, workers=1) as scorer:
        futures = [scorer.submit(group([r"\boxed{B}", text, r"\boxed{B}"], "B")) for text in texts]
        results = [future.result(120) for future in futures]
    for text, scored in zip(texts, results, strict=True):
        for name in ("math", "choice", "exact", "relaxed", "anls"):
            assert scored.components[name].tolist() == [1, 0, 1], (name, text[:80])
        assert np.isnan(scored.components["numeric"]).all()


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_reward_keeps_the_rules_of_rewards(name):
    cls = getattr(import_module(f"mmrl_rewards.{name}"), CLASSES[name])
    check_reward(cls, options=LOCAL if name == "code" else {})


@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"format", "overlong"}))
@pytest.mark.parametrize("reference", [None, "", [], float("nan"), "   "], ids=repr)
def test_a_missing_reference_is_unscorable_and_never_zero(name, reference):
    assert scores(made(name), [r"\boxed{7}", ""], reference) == [None, None]


@pytest.mark.parametrize(
    ("name", "reference"),
    [("numeric", r"2\sqrt{221}"), ("count", "2.5"), ("count", "many"), ("iou", "no boxes"), ("iou", [[1, 1, 1, 5]]),
     ("choice", "seven"), ("code", 7), ("code", "assert f("), ("code", "It returns two."), ("code", ["assert f("])],
)  # fmt: skip
def test_a_reference_that_is_none_of_the_kind_is_unscorable(name, reference):
    assert scores(made(name), ["7"], reference) == [None]


@pytest.mark.parametrize(
    "reference",
    [
        r"\frac{1",
        "$$",
        r"\boxed{",
        r"\sqrt{",
        r"\frac{1}",
        r"\frac{1}{}",
        r"\frac",
        r"\sqrt{}",
        r"\boxed{}",
        r"\boxed{7",
        r"\boxed{\frac{1}{2}",
        "$",
        r"\( \)",
        r"\[ \]",
        "...",
        "?",
        "-",
        r"\cdot",
        r"\text{ }",
        "{",
        "}",
        "3}",
        "(3, 4",
        "[1, 2",
        r"\left(",
        r"\begin{pmatrix} 1",
        "x =",
        "5 +",
        "5^",
        "x_",
        r"2 \times",
        r"\frac{1}{0}",
        "1/0",
        "nan",
        r"\frac{1}{2",
        "\\",
        r"\{1, 2",
        r"\left\{1, 2",
        "/2",
        "^2",
    ],
)
def test_a_reference_that_math_cannot_read_is_unscorable_for_every_answer(reference):
    texts = [r"\boxed{7}", "no idea", reference, f"\\boxed{{{reference}}}"]
    assert scores(made("math"), texts, reference) == [None] * 4


@pytest.mark.parametrize(
    "reference",
    [
        "7",
        r"\frac12",
        r"\sqrt3",
        r"\sqrt[3]{8}",
        "[1, 2)",
        "]1, 2[",
        r"\infty",
        r"\pi",
        "A",
        "A)",
        "(A)",
        "no solution",
        "A+",
        "5!",
        r"\emptyset",
        r"5\%",
        r"\{1, 2\}",
        "5 cm",
        "$x = 5$",
        r"\mathbb{R}",
        r"\text{Evelyn}",
        "是",
        "1010_2",
        r"\frac\pi2",
        "x^2 - 1",
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        r"\left\{ 1 \right\}",
        "-3",
        "0.1",
        r"\$5",
        "9:30 a.m.",
        r"\overline{AB}",
        "x'",
    ],
)
def test_a_sound_reference_can_be_scored_and_is_its_own_answer(reference):
    assert scores(made("math"), [f"\\boxed{{{reference}}}", r"\boxed{123456}"], reference) == [1, 0]


def test_a_computed_float_means_its_shortest_decimal():
    assert scores(made("math"), [r"\boxed{0.3}", r"\boxed{\frac{3}{10}}", r"\boxed{0.31}"], 0.1 + 0.2) == [1, 1, 0]


def test_a_choice_that_is_not_offered_is_unscorable():
    assert scores(made("choice"), ["A", "60"], "60", ["30", "45"]) == [None, None]
    assert scores(made("choice"), ["A", "60"], "E", ["30", "45"]) == [None, None]


@pytest.mark.parametrize(
    ("reference", "answer", "expected"),
    [
        ("hello", "hello", 1.0),
        ("hello", "HELLO ", 1.0),
        ("hello", "hallo", 0.8),
        ("abcd", "abxy", 0.0),  # NL is 0.5, which is not below the threshold
        ("abcde", "abcxy", 0.6),
        (["12 May", "May 12"], "12 Mai", 5 / 6),
        ("hello", "", 0.0),
        ("kitten", "sitting", 1 - 3 / 7),
        ("a", "aaaaaaaaaa", 0.0),
    ],
)
def test_anls_is_one_less_the_normalised_distance_above_one_half(reference, answer, expected):
    assert scores(made("anls"), [f"<answer>{answer}</answer>"], reference) == [pytest.approx(expected)]


@pytest.mark.parametrize(
    ("reference", "answer", "expected"),
    [
        ([0, 0, 10, 10], "[0, 0, 10, 10]", 1.0),
        ([0, 0, 10, 10], "[0, 0, 10, 5]", 0.5),
        ([0, 0, 10, 10], "[5, 5, 15, 15]", 25 / 175),
        ([0, 0, 10, 10], "[20, 20, 30, 30]", 0.0),
        ("[0, 0, 10, 10]", '```json\n[{"bbox_2d": [0, 0, 10, 5], "label": "cat"}]\n```', 0.5),
        ({"x": 0, "y": 0, "width": 10, "height": 10}, '{"bbox": [0, 0, 10, 10]}', 1.0),
        ([0, 0, 10, 10], '{"x1": 10, "y1": 10, "x2": 0, "y2": 0}', 1.0),
        ([0, 0, 10, 10], "The box is (0,0),(10,10).", 1.0),
        ([0, 0, 10, 10], "<answer>[[0, 0], [10, 10]]</answer>", 1.0),
        ([0, 0, 10, 10], r"\boxed{[0, 0, 10, 10]}", 1.0),
        ([[0, 0, 2, 2], [4, 4, 6, 6]], "[[4, 4, 6, 6], [0, 0, 2, 2]]", 1.0),
        ([[0, 0, 2, 2], [4, 4, 6, 6]], "[[0, 0, 2, 2]]", 0.5),
        ([[0, 0, 2, 2]], "[[0, 0, 2, 2], [0, 0, 2, 2], [7, 7, 8, 8]]", 1 / 3),
        ([0, 0, 10, 10], '[{"bbox_2d": [0, 0, 10, 10]}, {"bbox_2d": [1, 1,', 1.0),
        ([0, 0, 10, 10], "[0, 0, 10]", 0.0),
        ([0, 0, 10, 10], "[3, 3, 3, 9]", 0.0),
        ([0, 0, 10, 10], "no box", 0.0),
        ([0, 0, 10, 10], '{"bbox_2d": ["0", true, null, 10]}', 0.0),
        ([[0, 0, 10, 10], [5, 5, 5, 9]], "[0, 0, 10, 10]", 0.5),
        ([0, 0, 10, 10], "[[0, 0, 10, 10], [3, 3, 3, 3]]", 0.5),
        ([0, 0, 10, 10], "[[0, 0, 10, 10], [0, 0, 1e300, 5]]", 0.5),
        ([0, 0, 10, 10], str([[0, 0, 10, 10]] + [[1, 1, 1, 1]] * 100), 0.0),
        ([[0, 0, 10, 10], [5, 5, 5, 9]], "[[0, 0, 10, 10], [5, 5, 5, 9]]", 0.5),
        (["0", "0", "10", "10"], "[0, 0, 10, 10]", 1.0),
        ([0, 0, 10, 10, 0.9], "[0, 0, 10, 10]", 1.0),
        ([[0, 0, 10, 10, 0.9], [20, 20, 30, 30, 0.8]], "[[0, 0, 10, 10], [20, 20, 30, 30]]", 1.0),
        ("0,0,10,10", "<answer>0, 0, 10, 10</answer>", 1.0),
        (["0,0,10,10", "20 20 30 30"], "[[0, 0, 10, 10], [20, 20, 30, 30]]", 1.0),
    ],
)
def test_boxes_are_matched_one_to_one_in_every_form(reference, answer, expected):
    assert scores(made("iou"), [answer], reference) == [pytest.approx(expected)]


def test_boxes_by_size_and_by_threshold():
    assert scores(made("iou", boxes="xywh"), ["[2, 2, 4, 4]"], [2, 2, 4, 4]) == [1.0]
    assert scores(made("iou", boxes="xywh"), ["[2, 2, 4, 4]"], {"x1": 2, "y1": 2, "x2": 6, "y2": 6}) == [1.0]
    answers = ["[0, 0, 10, 6]", "[0, 0, 10, 4]", "[0, 0, 10, 5]"]
    assert scores(made("iou", threshold=0.5), answers, [0, 0, 10, 10]) == [1, 0, 1]


def test_matching_is_the_best_of_all_and_not_the_first():
    reference = [[0, 0, 10, 10], [0, 0, 10, 9]]
    assert scores(made("iou"), ["[[0, 0, 10, 9], [0, 0, 10, 10]]"], reference) == [1.0]


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ("boxed", ["a \\boxed{1}.", "\\[ \\boxed{1} \\]", "**\\boxed{\\boxed{1}}**", "{ \\boxed{2}",
                   "\\boxed{\\frac{1}{2}}\n"],
                   ["\\boxed{1} b", "1", "\\boxed{}", "\\boxed{ }", "\\boxed{5} so we get \\frac{1}{2}",
                    "\\boxed{5} foo}", "\\boxed{} lots of text }", "\\boxed{5"]),
        ("answer", ["x <answer>1</answer>\n"], ["<answer></answer>", "<answer>1</answer> x", "<answer>1"]),
        (
            "think_then_answer",
            ["<think>a\nb</think>\n<answer>1</answer>"],
            ["<think>a</think> b <answer>1</answer>", "<answer>1</answer>",
             "<think>a<think>b</think><answer>1</answer>",
             "<think></think><answer>1</answer>"],
        ),
        (
            "think_then_boxed",
            ["<think>a</think> so \\boxed{1}"],
            ["<think>a \\boxed{1}</think>", "<think>a</think> \\boxed{1} and {2}",
                    "\\boxed{1}", "<think>a</think><think>b</think> \\boxed{1}"],
        ),
    ],
)  # fmt: skip
def test_forms_have_names(form, right, wrong):
    assert scores(made("format", pattern=form), [*right, *wrong], None) == [1] * len(right) + [0] * len(wrong)


@pytest.mark.parametrize("form", ["boxed", "answer", "think_then_answer", "think_then_boxed"])
@pytest.mark.parametrize("text", [t for t in HOSTILE if len(t) > 10_000], ids=lambda t: f"{t[:9]!r}")
def test_named_forms_take_linear_time(form, text):
    reward, start = made("format", pattern=form), time.process_time()
    for each in (text, f"<think>{text}</think>{text}", f"<think>a</think><answer>{text}", f"\\boxed{{{text}"):
        assert scores(reward, [each], None)[0] in (0, 1)
    assert time.process_time() - start < 30


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("numeric", {"rel_tol": -1}, "rel_tol"),
        ("numeric", {"abs_tol": float("inf")}, "abs_tol"),
        ("math", {"rel_tol": 1.5}, "rel_tol"),
        ("iou", {"threshold": 0}, "threshold"),
        ("iou", {"boxes": "xxyy"}, "xyxy"),
        ("exact", {"extract": "first"}, "last_number"),
        ("anls", {"threshold": 2}, "threshold"),
        ("code", {"i_know_local_is_no_security_boundary": False}, "no security boundary"),
    ],
)
def test_options_are_checked(name, options, message):
    with pytest.raises(ValueError, match=message):
        made(name, **options)
