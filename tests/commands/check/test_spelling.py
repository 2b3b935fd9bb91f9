"""A reference answer as a person writes it: shortest decimals, whole LaTeX, and other spellings of the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mmrl.commands.check.spelling import respelled, written


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (float(np.float32(0.1)), ["0.1"]),
        (float(np.float32(29.7)), ["29.7"]),
        (float(np.float32(1 / 3)), ["0.33333334"]),
        (0.1 + 0.2, ["0.3"]),
        (1.1 * 1.1, ["1.21"]),
        (1 / 3, ["0.3333333333333333"]),
        (-1e-20, ["-1e-20"]),
        (np.float32(0.7), ["0.7"]),
        (3.0, ["3"]),
        (7, ["7"]),
        ("0.10000000149011612", ["0.1"]),
        ("0.30000000000000004", ["0.3"]),
        ("3.14159265358979", ["3.14159265358979"]),
        ("0.00000095367431640625", ["0.00000095367431640625"]),
        ([0.1 + 0.2, float(np.float32(0.7))], ["0.3", "[0.3, 0.7]"]),
        (np.array([1.5, 2.0]), ["1.5", "[1.5, 2.0]"]),
        ("\\frac{1", ["\\frac{1}"]),
        ("\\frac{1}{2}}", ["\\frac{1}{2}"]),
        ("$$", [""]),
        ("\\boxed{", [""]),
        ("\\{1, 2\\}", ["\\{1, 2\\}"]),
        ("{1,2", ["{1,2"]),
        ("}", ["}"]),
        ("$5", ["$5"]),
        ("New York", ["New York"]),
    ],
)
def test_a_reference_answer_is_written_as_a_person_would(answer: Any, expected: list[str]) -> None:
    assert written(answer) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 5.", "5"),
        ("First, add.\nThen stop.\n#### 72", "72"),
        ("Answer: B", "B"),
        ("$\\frac{1}{2}$", "\\frac{1}{2}"),
        ("\\boxed{7}", "7"),
        ("Half of it is \\frac{14}{4}, so x is \\boxed{\\frac{7}{2}}.", "\\frac{7}{2}"),
        ("He has 3 apples. The final answer is $12$.", "12"),
        ("#### 1,000", "1000"),
        ("$\\boxed{1}\\boxed{2}$", "\\boxed{1}\\boxed{2}"),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})"),
        ("\\frac { 8 } { 7 }", "\\frac{8}{7}"),
        ("\\dfrac12", "\\frac12"),
        ("5\\,\\text{m/s}", "5 m/s"),
        ("50\\%", "50%"),
        ("12,345", "12345"),
        ("2.50", "2.5"),
        ("5.0", "5"),
    ],
)
def test_another_spelling_means_the_same(text: str, expected: str) -> None:
    assert respelled(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("5", "0.5", "1,2,3", "(1, 2)", "New York", "10 cm", "$5", "$x$ and $y$", "2 \\pi r", "1 \\frac{1}{2}"),
        *(
            "90^\\circ",
            "the answer",
            "an answer is a reply",
            "x is \\boxed{7",
            "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
            "\\log_2 8",
            "",
        ),
    ],
)
def test_a_text_that_people_write_so_has_no_other_spelling(text: str) -> None:
    assert respelled(text) is None
