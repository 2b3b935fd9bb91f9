r"""Answers and whether they are right, judged by hand from the question's point of view, not from what the code says.

Each question has a reference as its dataset writes it, completions that a fair human marker would accept, and ones that
they would not. ``boxed(...)`` stands for completions that end with ``\boxed{...}``; all others are written out.

Judgements that are not obvious:

- A percentage is judged by its reference (see ``mmrl_rewards.math``): one sign, one meaning.
- A rounded decimal of an irrational reference is wrong where no tolerance was asked for.
- A unit may be left out; another unit is another answer.
- ``5 or 6`` is no answer, nor is a list that has the right one in it.
- Where a choice's text is another choice's letter, a bare ``A`` is that text, as the reference is; ``(A)`` is the
  letter.
- A cut-off box is no answer: what counts is what was said before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Question:
    style: str
    reward: str
    reference: Any
    right: Sequence[str] = ()
    wrong: Sequence[str] = ()
    choices: tuple[str, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def boxed(*answers: str) -> list[str]:
    return [f"Let me think. So it is \\boxed{{{answer}}}." for answer in answers]


def tagged(*answers: str) -> list[str]:
    return [f"<think>I look at it.</think> <answer>{answer}</answer>" for answer in answers]


GEOMETRY3K = [
    Question(
        "geometry3k",
        "math",
        r"2 \sqrt { 221 }",
        boxed(
            r"2\sqrt{221}",
            r"2 \sqrt { 221 }",
            r"\sqrt{884}",
            r"\sqrt{4 \cdot 221}",
            "2√221",
            "$2\\sqrt{221}$",
            r"x = 2\sqrt{221}",
            r"\sqrt{221} \times 2",
            r"2\sqrt{221}\text{ cm}",
            r"\displaystyle 2\sqrt{221}",
        ),
        boxed("221", r"\sqrt{221}", "29.7321", "29.73", "442", r"-2\sqrt{221}", r"2\sqrt{212}", r"4\sqrt{221}", ""),
    ),
    Question(
        "geometry3k",
        "math",
        r"2 \sqrt { 221 }",
        boxed("29.7321", "29.73", "29.7", r"2\sqrt{221}", r"\approx 29.73"),
        boxed("30", "28.9", "31.5", "29", "221"),
        options={"rel_tol": 0.005},
    ),
    Question(
        "geometry3k",
        "math",
        r"\frac { 7 } { 25 }",
        boxed(
            r"\frac{7}{25}",
            r"\dfrac{7}{25}",
            r"\frac { 14 } { 50 }",
            "7/25",
            "0.28",
            ".28",
            r"\frac{28}{100}",
            r"28\%",
            r"\tfrac{7}{25}",
            "0.280",
            r"\cos A = \frac{7}{25}",
        ),
        boxed(r"\frac{25}{7}", "7", "25", "0.3", "0.2800001", r"-\frac{7}{25}", "7:25:1", r"\frac{7}{24}"),
    ),
    Question(
        "geometry3k",
        "math",
        "48",
        [
            *boxed(
                "48",
                "48.0",
                r"48^\circ",
                r"48^{\circ}",
                "48°",
                "48 degrees",
                r"48\text{ degrees}",
                "48 cm",
                "+48",
                r"\text{48}",
                "x=48",
                "x = 48",
                r"m\angle ABC = 48^\circ",
                r"\angle A = 48",
                "6*8",
                "$48$",
                " 48 ",
                "048",
            ),
            "The answer is 48.",
            "so x is 48",
            "**Answer:** 48",
            "The final answer is $48^\\circ$.",
            "Answer: 48\n",
            r"First \boxed{47}, no: \boxed{48}",
            r"<answer>\boxed{48}</answer>",
            "<answer>48</answer>",
            r"It is \boxed{48}. Then \boxed{50",
            r"\[ \boxed{48} \]",
            r"\fbox{48}",
            r"$x=\boxed{48}$ degrees",
        ],
        [
            *boxed(
                "84",
                "-48",
                "4.8",
                "480",
                "48 or 49",
                "47, 48",
                r"\{48, 49\}",
                "48x",
                "4 8 0",
                r"\frac{1}{48}",
                "48.5",
                "",
            ),
            "The answer is 49.",
            r"\boxed{48} so \boxed{49}",
            "<answer>50</answer> 48",
            "x",
            "",
            r"48, that is \boxed{52}",
            r"<answer>\boxed{49}</answer> \boxed{48}",
            "forty",
        ],
    ),
    Question(
        "geometry3k",
        "math",
        "28.9",
        boxed("28.9", "28.90", "28.9 ft", r"\frac{289}{10}", "x≈28.9"),
        boxed("29", "28.8", "28.91", "28", r"\sqrt{835}"),
    ),
    Question(
        "geometry3k",
        "math",
        "28.9",
        boxed(r"\sqrt{835}", "28.9"),
        boxed(r"\sqrt{900}", "29", "28.8"),
        options={"rel_tol": 0.002},
    ),
    Question(
        "geometry3k",
        "math",
        r"36 \pi",
        boxed(r"36\pi", r"36 \pi", "36π", r"36\pi\text{ cm}^2", r"\pi \cdot 36", r"6^2\pi", "36pi", r"A = 36\pi"),
        boxed("36", "113.1", r"36\pi^2", r"18\pi", r"\pi", "113.097"),
    ),
    Question(
        "geometry3k",
        "math",
        r"\frac { 40 \sqrt { 3 } } { 3 }",
        boxed(r"\frac{40\sqrt{3}}{3}", r"\frac{40}{\sqrt{3}}", r"\frac{40}{3}\sqrt{3}", r"40/\sqrt{3}"),
        boxed("23.09", r"40\sqrt{3}", r"\frac{40}{3}", r"\frac{3}{40\sqrt{3}}"),
    ),
    Question(
        "geometry3k",
        "math",
        r"\sqrt { 34 }",
        boxed(r"\sqrt{34}", "√34", r"\sqrt 34", r"34^{1/2}", "sqrt(34)"),
        boxed("34", "5.83", r"\sqrt{43}", "√3"),
    ),
    Question(
        "geometry3k",
        "math",
        r"(3, -2)",
        boxed("(3,-2)", "(3, -2)", r"\left(3, -2\right)", "(3.0, -2)", "(3,−2)"),
        boxed("(-2, 3)", "3, 2", "(3, 2)", "3", "(3,-2,0)"),
    ),
    Question(
        "geometry3k",
        "math",
        r"\frac { 1 } { 2 }",
        boxed("1/2", "0.5", r"\frac12", "½", r"50\%", "50%", r"\sin 30^\circ"),
        boxed("2", "0.05", "1", r"5\%", r"0.5\%", "-1/2"),
    ),
    Question(
        "geometry3k",
        "math",
        "108",
        [
            "Each angle is (5-2)*180/5 = 108.",
            "The measure is 108°",
            "108",
            "so 108 degrees",
            "m∠A = 108",
            "The answer is: 108°",
            r"the answer is \(108^\circ\).",
        ],
        ["108, no, 72", "The measure is 72°", "The answer is 180 because 108 + 72 = 180"],
    ),
    Question(
        "geometry3k",
        "math",
        "7.5",
        boxed("7.5", r"7\frac{1}{2}", r"\frac{15}{2}", "7 1/2", "15/2", "7½", r"7 \frac { 1 } { 2 }"),
        boxed("71/2", "7", "8", r"\frac{7}{2}", "7.05"),
    ),
    Question(
        "geometry3k",
        "math",
        "10",
        boxed("10", "10 in.", r"10 \text{ units}", "10 inches", r"\sqrt{100}", "2 \\times 5"),
        boxed("100", "1", r"\sqrt{10}", "10i", "10^{10}"),
    ),
    Question(
        "geometry3k",
        "math",
        "10 cm",
        boxed("10", "10 cm", "10cm", r"10\text{ cm}", "10 centimeters", r"10\mathrm{cm}"),
        boxed("10 m", "10 mm", "100", "10 cm^2", "10 km"),
    ),
    Question(
        "geometry3k",
        "math",
        "1000",
        boxed("1,000", "1000", "1{,}000", r"1\,000", "10^3", r"1 \times 10^3", "1000.00"),
        boxed("1.000", "100", "1,00", "1,0000"),
    ),
    Question(
        "geometry3k", "math", ["48", "132"], boxed("48", "132", r"132^\circ"), boxed("180", "48 and 132 or 5", "84")
    ),
    Question(
        "geometry3k", "math", r"\boxed{\frac{3}{4}}", boxed("3/4", "0.75", r"75\%"), boxed("4/3", "0.7", r"0.75\%")
    ),
    Question(
        "geometry3k", "math", "$x=5$", [*boxed("5", "x=5", "x = 5", "5.0"), "x = 5"], boxed("-5", "x=6", "y = 5", "x")
    ),
    Question(
        "geometry3k", "math", "A", boxed("A", "(A)", r"\text{A}", "A.", r"\textbf{(A)}"), boxed("B", "(B)", "AB", "")
    ),
    Question(
        "geometry3k",
        "math",
        "C",
        boxed("C", "60", "(C)", r"60^\circ", "60°", "C. 60"),
        boxed("B", "45", "A", "120", "C. 45"),
        choices=("30", "45", "60", "90"),
    ),
    Question(
        "geometry3k",
        "math",
        r"60^\circ",
        boxed("C", "60", "(C)", r"\text{C}"),
        boxed("B", "45", "D", "90"),
        choices=("30", "45", "60", "90"),
    ),
]

INTERVALS = [
    Question(
        "math12k",
        "math",
        "[1, 2)",
        boxed("[1,2)", r"[1, 2)", r"\left[1, 2\right)"),
        boxed("(1,2)", "[1,2]", "1.5", "(1,2]"),
    ),
    Question(
        "math12k",
        "math",
        r"(-\infty, 3]",
        boxed(r"(-\infty, 3]", r"(-\infty,3]", "(-∞, 3]"),
        boxed(r"(-\infty, 3)", "3", r"[3, \infty)"),
    ),
    Question(
        "math12k", "math", r"x^2 - 1", boxed("x^2-1", "(x-1)(x+1)", "-1+x^2", "x²-1"), boxed("x^2+1", "x-1", "(x-1)^2")
    ),
    Question(
        "math12k",
        "math",
        "3, 5",
        boxed("3, 5", "3,5", r"\{3, 5\}", "5, 3", r"3\text{ and }5"),
        boxed("3", "5", "3, 5, 7", "35"),
    ),
    Question(
        "math12k",
        "math",
        r"50\%",
        boxed("50%", r"50\%", "0.5", "1/2", "50", r"50 \%", "50 percent"),
        boxed("5%", "0.05", "500", "5000%", r"0.5\%", "5"),
    ),
    Question("math12k", "math", "0.5", boxed("50%", "0.5", "1/2", r"50\%", ".5"), boxed("50", "0.5%", "5%", "5")),
    Question(
        "math12k", "math", "50", boxed("50%", "50", r"50\%", "100/2"), boxed("0.5", "5000%", r"5000\%", "0.5%", "1/2")
    ),
    Question("math12k", "math", "yes", boxed("Yes", "yes", r"\text{yes}", "YES."), boxed("no", "sey", "y", "1")),
    Question("math12k", "math", "1024", boxed("2^{10}", "1024", "1,024", "2**10"), boxed("2^{11}", "210", "20")),
    Question(
        "math12k",
        "math",
        r"\frac{1}{3}",
        boxed("1/3", r"\frac{1}{3}", "0.333333", r"\frac{2}{6}"),
        boxed("0.33", "0.3", "3", "0.333", "33%"),
    ),
    Question("math12k", "math", "3628800", boxed("10!", "3628800", "3,628,800"), boxed("9!", "362880")),
    Question("math12k", "math", "4:3", boxed("4:3", "4 : 3", r"\frac{4}{3}", "4/3"), boxed("3:4", "43", "4")),
    Question("math12k", "math", "-3", boxed("-3", "−3", r"-\frac{6}{2}", "x=-3"), boxed("3", "- 30", "0")),
]

GEOQA = [
    Question(
        "geoqa",
        "math",
        "<answer> 60° </answer>",
        [
            *tagged(
                "60°", "60", r"60^\circ", r"$60^{\circ}$", r"\boxed{60}", " 60 度 ", "60度", "∠ABC = 60°", "60 degrees"
            ),
            "故答案为:60°",
            "所以答案是 60°。",
            "答案:60",
            "因此,∠A的度数是60°。答案为60°。",
        ],
        [*tagged("30°", "120", "6", "", "60° or 30°", "-60"), "故答案为:30°", "答案是 120°。"],
    ),
    Question(
        "geoqa",
        "choice",
        "B",
        [
            *tagged("B", "(B)", "45°", "45", "B. 45°", r"\boxed{B}", "option B", "选B", "b"),
            "故选:B",
            "故选B。",
            "答案:B",
            "因此答案是 B。",
        ],
        [*tagged("A", "C", "30°", "B. 30°", "A or B", "", "60", "AB"), "故选:C", "答案:D"],
        choices=("30°", "45°", "60°", "90°"),
    ),
    Question(
        "geoqa",
        "numeric",
        "<answer> 5cm </answer>",
        tagged("5", "5cm", "5 cm", "5厘米", "5.0", r"5\text{ cm}", "x=5", "5"),
        tagged("5m", "5 米", "6", "50", "5 or 6", "5cm^2"),
    ),
    Question(
        "mathvista",
        "numeric",
        "[0, 6]",
        [*tagged("[0, 6]", "[0,6]", "[0.0, 6]", "$[0, 6]$"), "The answer is [0, 6]."],
        tagged("[6, 0]", "[0, 6, 6]", "[0]", "6", "[0, x]", "[0, 6", "[]", "[0, 7]", "[0.04, 6]"),
    ),
    Question(
        "geoqa",
        "numeric",
        "145°",
        tagged("145°", "145", "145 度", r"145^\circ", "145 degrees", "The angle is 145°."),
        tagged("35°", "14.5", "145 cm", "one", "-145"),
    ),
    Question(
        "geoqa",
        "math",
        "<answer> 2√3 </answer>",
        tagged("2√3", r"2\sqrt{3}", r"\sqrt{12}", r"$2\sqrt{3}$", "2√3 cm"),
        tagged("3√2", "12", "3.46", "√3", "23"),
    ),
    Question(
        "geoqa", "math", "100π", tagged("100π", r"100\pi", "100πcm²", r"10^2\pi"), tagged("100", "314", "10π", "314.16")
    ),
    Question(
        "geoqa",
        "choice",
        "60°",
        [*tagged("C", "60°", "60", "C、60°", "(C) 60°"), "答案选C"],
        tagged("A", "B", "90", "30°"),
        choices=("A. 30°", "B. 45°", "C. 60°", "D. 90°"),
    ),
]

CLEVR = [
    Question(
        "clevr",
        "count",
        "<answer> 3 </answer>",
        [
            *tagged(
                "3",
                " 3 ",
                "three",
                "Three",
                "3.0",
                "3 objects",
                "There are 3 red cubes.",
                r"\boxed{3}",
                "3 cubes",
                r"\text{three}",
            ),
            "There are 3 items in the photo",
            "I count three.",
            "One, two, three: 3",
            "The answer is 3.",
            "The answer is three objects.",
            r"\boxed{3}",
            "3",
        ],
        [
            *tagged("4", "33", "3.5", "", "3 or 4", "-3", "thirty", "2 or 3", "3, 4", "thirteen", "3/2"),
            "There are four",
            "3, no, 5",
            "two three",
            "none",
            "The answer is 4, not 3.",
        ],
    ),
    Question(
        "clevr",
        "count",
        "0",
        [*tagged("0", "zero", "none", "no", "None"), "There are 0", "The answer is none."],
        [*tagged("1", "one", "nothing but 2", ""), "There is one"],
    ),
    Question("clevr", "count", 10, [*tagged("10", "ten", "10 things"), "ten"], [*tagged("1", "0", "100"), "tens"]),
    Question(
        "clevr",
        "count",
        "21",
        tagged("21", "twenty-one", "twenty one", "Twenty-One balls"),
        tagged("20", "twenty", "12", "twenty-two"),
    ),
    Question(
        "clevr",
        "count",
        "105",
        tagged("105", "one hundred five", "a hundred and five", "one hundred and five"),
        tagged("100", "one hundred", "150", "5"),
    ),
    Question(
        "clevr",
        "count",
        "1200",
        tagged("1,200", "1200", "twelve hundred", "one thousand two hundred"),
        tagged("1,20", "12", "1.2"),
    ),
    Question(
        "clevr",
        "exact",
        "<answer> yes </answer>",
        [*tagged("yes", "Yes", "YES.", r"\text{yes}"), "yes"],
        [*tagged("no", "yes and no", "", "yess"), "It might be yes"],
    ),
    Question(
        "clevr",
        "exact",
        "7",
        ["7", "7.", r"\boxed{7}", "$7$", "<answer>7</answer>", "The answer is 7.", " 7\n"],
        ["8", "77", "7.0", "seven", "", "It is 7 or so", r"7 \boxed{8}", "-7"],
    ),
    Question(
        "clevr",
        "exact",
        "red",
        ["red", "Red", "The answer is red.", r"\boxed{\text{red}}", "Answer: Red"],
        ["blue", "reddish", "red blue", "der"],
    ),
    Question(
        "clevr", "exact", "B", ["B", "cylinder", "(B)"], ["A", "C", "cube"], choices=("sphere", "cylinder", "cube")
    ),
    Question(
        "clevr",
        "exact",
        "cube",
        ["C", "cube", "Cube.", r"\boxed{C}"],
        ["A", "B", "sphere"],
        choices=("sphere", "cylinder", "cube"),
    ),
]

MATHVISTA = [
    Question(
        "mathvista",
        "numeric",
        "1.2",
        boxed("1.2", "1.20", "1.24", "1.16", "6/5", r"\frac{6}{5}"),
        boxed("1.3", "1", "1.26", "12", "1.14", "-1.2"),
        columns={"precision": 1.0, "answer_type": "float"},
    ),
    Question(
        "mathvista",
        "numeric",
        "0.33",
        boxed("0.33", "1/3", "0.333", r"\frac{1}{3}"),
        boxed("0.3", "0.34", "3", "0.32"),
        columns={"precision": 2.0},
    ),
    Question(
        "mathvista",
        "numeric",
        "14",
        [*boxed("14", "14.0", "14 years", r"\text{14}"), "The answer is 14.", "It took 14 years"],
        boxed("15", "14.4", "1.4", "14 or 15", ""),
        columns={"precision": None, "unit": None},
    ),
    Question(
        "mathvista",
        "numeric",
        "5",
        boxed("5", "5 cm", "5.0", "5 centimeters"),
        boxed("5 m", "5 in", "6", "50 mm"),
        columns={"unit": "cm", "precision": None},
    ),
    Question(
        "mathvista",
        "numeric",
        "1000",
        boxed("1,000", "1000", "1{,}000", "$1,000", "1e3", "1 thousand", r"1 \times 10^3", "1k"),
        boxed("1.000", "100", "1,00", "1 million"),
    ),
    Question(
        "mathvista",
        "numeric",
        "2.5",
        boxed("2.5", "2½", "2 1/2", r"2\frac{1}{2}", "5/2", r"\dfrac{5}{2}", "2.50 dollars"),
        boxed("2", "2 1/3", "21/2", "25", "2.51"),
    ),
    Question(
        "mathvista",
        "numeric",
        "100",
        boxed("100", "104", "96", "105"),
        boxed("106", "94", "1", "10"),
        options={"rel_tol": 0.05},
    ),
    Question(
        "mathvista",
        "numeric",
        "0",
        boxed("0", "0.0", "0.4", "-0.5", "zero"),
        boxed("1", "0.6", "one"),
        options={"abs_tol": 0.5},
    ),
    Question(
        "mathvista", "numeric", "0.1", boxed("0.1", "0.15", "0.05"), boxed("0.16", "0.04"), options={"abs_tol": 0.05}
    ),
    Question(
        "mathvista",
        "numeric",
        "25%",
        boxed("25%", r"25\%", "0.25", "25", "25 percent", "1/4"),
        boxed("2.5", "0.025", "2500%", "75%"),
    ),
    Question("mathvista", "numeric", "0.25", boxed("25%", "0.25", "1/4"), boxed("25", "0.25%", "2.5%")),
    Question("mathvista", "numeric", "30", boxed("30%", "30", "30°"), boxed("0.3", "3000%", "31")),
    Question(
        "mathvista",
        "choice",
        "Yes",
        [*boxed("Yes", "A", "(A)", "yes", "A. Yes"), "The answer is A", "Yes", "(A)", "So it is (A)."],
        [*boxed("No", "B", "(B)", "A. No", "", "maybe"), "The answer is B", "No"],
        choices=("Yes", "No"),
    ),
    Question(
        "mathvista",
        "choice",
        "2.5",
        boxed("B", "2.5", "2.50", "option B", "B) 2.5", r"\text{(B)}", r"\textbf{B}", "b", "[B]"),
        boxed("A", "2", "25", "D", "E", "B) 3"),
        choices=("2", "2.5", "3", "3.5"),
    ),
    Question(
        "mathvista",
        "choice",
        "the blue ball",
        [
            *boxed("the blue ball", "The Blue Ball", "C", "C. the blue ball", r"\text{the blue ball}"),
            "Hence the answer is (C) the blue ball.",
            "I compare the four of them and so I choose C.",
            "Option C",
            "Answer: C",
        ],
        [
            *boxed("blue", "A", "the red ball", "A. the blue ball"),
            "The answer is a ball",
            "Option A",
            "I pick (C), no, (D)",
        ],
        choices=("the red ball", "the green ball", "the blue ball", "the ball"),
    ),
    Question("mathvista", "choice", "B", boxed("B", "(B)", "b"), boxed("A", "C"), choices=("A", "B", "C")),
    Question("mathvista", "choice", "A", boxed("A", "(B)", "B. A"), boxed("B", "(A)"), choices=("B", "A")),
    Question(
        "mmmu",
        "choice",
        "D",
        [*boxed("D", "(D)", "none of these"), "The correct option is D."],
        boxed("A", "1", "4"),
        choices=("1", "2", "3", "none of these"),
    ),
    Question(
        "mmmu",
        "choice",
        "C",
        [*boxed("C", "(C)", "c"), "The answer is (C).", "C", "C."],
        [*boxed("D", "CD", "3"), "", "no idea"],
    ),
    Question(
        "scienceqa",
        "choice",
        1,
        boxed("B", "1", "dog"),
        boxed("A", "2", "cat", "0"),
        choices=("cat", "dog", "cow"),
        options={"first_index": 0},
    ),
    Question(
        "scienceqa",
        "choice",
        "2",
        boxed("B", "2", "dog"),
        boxed("A", "3", "1"),
        choices=("cat", "dog", "cow"),
        options={"first_index": 1},
    ),
]

CHARTQA = [
    Question(
        "chartqa",
        "relaxed",
        ["14"],
        ["14", "14.5", "13.4", "14%", "The answer is 14.", r"\boxed{14}", "14.7", "fourteen", "14.0"],
        ["15", "13", "1.4", "140", "Yes", "", "14 or 15"],
    ),
    Question(
        "chartqa",
        "relaxed",
        "Yes",
        ["Yes", "yes", "YES.", "Answer: yes", r"\boxed{\text{Yes}}"],
        ["No", "Yes, but no", "", "1"],
    ),
    Question("chartqa", "relaxed", "23%", ["23%", "23", "0.23", "22.5%", "24%"], ["25%", "2.3", "0.3", "21%", "2300%"]),
    Question("chartqa", "relaxed", "0.57", ["57%", "0.57", "0.55", "58%"], ["57", "0.5", "0.57%", "5.7"]),
    Question(
        "chartqa",
        "relaxed",
        "1,200",
        ["1200", "1,200", "1250", "1.2 thousand", "$1,200"],
        ["1.2", "1300", "12,000", "120"],
    ),
    Question(
        "chartqa",
        "relaxed",
        "3.5 million",
        ["3.5 million", "3500000", "3,500,000", "3.4 million"],
        ["3.5", "3.9 million", "3.5 billion"],
    ),
    Question(
        "chartqa",
        "relaxed",
        "Germany",
        ["Germany", "germany", "The answer is Germany."],
        ["France", "German", "Germany and France"],
    ),
    Question("chartqa", "relaxed", "0", ["0", "0.0", "0%"], ["1", "0.01", "-1"]),
    Question("chartqa", "relaxed", "-20", ["-20", "-20.5", "-19", "−20"], ["20", "-22", "-18.5"]),
    Question("chartqa", "relaxed", "2016", ["2016", "2015"], ["1900", "216", "two"]),
    Question("chartqa", "relaxed", ["Red", "Crimson"], ["red", "crimson"], ["blue", "red, crimson"]),
    Question("chartqa", "relaxed", "100", ["100", "104"], ["105", "95"], options={"tolerance": 0.04}),
]

WRITING = [
    Question(
        "geometry3k",
        "math",
        "10",
        boxed(
            r"\$10",
            r"\mathbf{10}",
            "{10}",
            r"10\,\text{cm}",
            r"10~\mathrm{cm}",
            "(10)",
            r"\left(10\right)",
            r"10\degree",
            r"AB = 10",
            r"AB=6+4=10",
            r"10\text{ units}^2",
            "10 square units",
            r"\text{AB} = 10",
            "ten",
            "10 meters",
            r"\frac{20}{2}",
            "1e1",
            r"10.0\%",
            r"\large 10",
            r"\mathrm{10}",
        ),
        boxed("10 or 11", "10^2", "10 + 1", "10, 10.5", r"10 \pm 1", r"\pm 10", "1 0", "10x + 1", "x", "AB", "10!"),
    ),
    Question(
        "geometry3k",
        "math",
        r"2 \sqrt { 221 }",
        boxed(r"2\sqrt{221} \approx 29.73", "2√221 ≈ 29.7", "2*sqrt(221)"),
        boxed(r"29.73 \approx 2\sqrt{221}", r"2\sqrt{212} \approx 29.73"),
    ),
    Question(
        "geometry3k",
        "math",
        r"8 \sqrt { 3 } \text { cm }",
        boxed(r"8\sqrt{3}", r"8\sqrt{3} cm", r"8\sqrt{3}\text{ cm}"),
        boxed(r"8\sqrt{3}\text{ m}", r"3\sqrt{8}", "13.86 cm", r"8\sqrt{3} cm^2"),
    ),
    Question(
        "geometry3k",
        "math",
        r"\sqrt { 2 } : 1",
        boxed(r"\sqrt{2}:1", r"\sqrt{2} : 1", r"\sqrt{2}"),
        boxed(r"1:\sqrt{2}", "2:1"),
    ),
    Question("geometry3k", "math", "1:2:3", boxed("1:2:3", "1 : 2 : 3"), boxed("3:2:1", "1:2", "6", "1/6")),
    Question(
        "geometry3k",
        "math",
        "75",
        [
            "**75**",
            "The answer is **75**.",
            "### Answer\n75",
            "Answer: $75^\\circ$",
            "$$x = 75$$",
            "Thus, x = 75. ",
            "the final answer is: 75",
            "Final answer: 75 degrees",
            "It's 75!",
            "x=\n75",
        ],
        ["**57**", "The answer is **57**.", "I don't know.", "Answer: none", "75 + 1 = 76", "seventy-six", "75.1"],
    ),
    Question(
        "geometry3k",
        "math",
        "75",
        boxed("75"),
        ["75", "The answer is 75", r"\boxed{75", r"\boxed 75", "x = 75", r"\boxed{}"],
        options={"require_box": True},
    ),
    Question(
        "geometry3k",
        "math",
        "75",
        [r"75, so \boxed{7", "It is 75. <answer>7"],
        [r"It is 75, so \boxed{7}", "<answer>75 <answer>7"],
    ),
    Question(
        "geometry3k",
        "math",
        r"\infty",
        boxed(r"\infty", "∞", "infinity"),
        boxed("0", "1000000", "NaN", r"-\infty"),
    ),
    Question(
        "geometry3k",
        "math",
        "1.5e3",
        boxed("1500", "1,500", "1.5e3", r"1.5 \times 10^3", "1.5*10^3"),
        boxed("1.5", "15000", "1.5^3"),
    ),
    Question(
        "geometry3k",
        "math",
        "no solution",
        boxed("no solution", "No Solution", r"\text{no solution}"),
        boxed("solution", "0", "no"),
    ),
]

BOLD = [
    Question(
        "bold",
        reward,
        "5",
        ["**Answer:** 5", "**Answer: 5**", "**Answer**: 5", r"**Answer:** \(5\)", "Answer: **5.**", "**Answer:** **5**",
         "So.\n\n**Final Answer:** 5\n", "The answer is **5**.", "Answer: **5.** I am sure."],
        ["**Answer:** 6", "**Answer: 50**", "**Answer**: 15", "Answer: **6.** It is not 5"],
    )
    for reward in ("exact", "numeric", "count", "relaxed", "anls", "math")
]  # fmt: skip

CHOSEN = [
    Question(
        "chosen",
        "choice",
        "A",
        [
            *boxed("A", "A. triangle", "A: a triangle, with three corners", "(A) It is the triangle", "A, I think"),
            "The answer is (A).",
            "**Answer:** A",
            "So I pick A",
            "It is not a square. So it is (A).",
            "The answer is clearly (A).",
            "It has three corners.\n\nA",
        ],
        [
            *boxed("A, B, C, D", "A. B", "(A)(B)", "A) or B", "A: not sure, maybe B", "A. triangle B. square", "a, b",
                   "A. a square", "(a) or (b)", "A. triangle or circle", "B. triangle", "A and B"),
            "the answer is not A",
            "The answer is not (A).",
            "neither (B) nor (A)",
            "It could be (D), (C), (B) or (A)",
            "The options are D, C, B, A.",
            "Vitamin A",
            "It isn't (A).",
            "(B) or (A)",
        ],
        choices=("triangle", "square", "circle", "line"),
    ),
    Question(
        "chosen",
        "choice",
        "B",
        [
            "The answer is **B. square**",
            "The answer is **B. square**.",
            *boxed("B. square", "B. A square", "(B) a square"),
        ],
        ["The answer is **A. triangle**", *boxed("B. a triangle", "B. triangle")],
        choices=("triangle", "square", "circle", "line"),
    ),
    *(
        Question("chosen", "choice", "B",
                 ["The answer is B (square).", "答案是B（正方形）", "(B) is right", r"\boxed{B (square)}",
                  "B. not round"],
                 ["(B) is not right", "(B) cannot be right", "(B) is wrong", "(B) isn't it", "(B) can't be",
                  "A (square)", "B (or C)"],
                 choices=choices)
        for choices in ((), ("triangle", "square", "circle"))
    ),
    Question("chosen", "choice", "C", ["C. 60", "(C)"], ["neither (B) nor (C)", "C, D", "C) or D", "C. A"]),
    Question(
        "chosen", "choice", "A", boxed("A. ball", "A. the ball"), boxed("A. red ball"), choices=("ball", "red ball")
    ),
    Question(
        "chosen", "choice", "B", boxed("B. red ball", "B. the red ball"), boxed("B. ball"), choices=("ball", "red ball")
    ),
    *(
        Question(
            "chosen", reward, "B", boxed("B", "12", "B. 12", "(B) 12"), boxed("A. 12", "A", "B. 10", "(A) 12", "A: 12"),
            choices=("10", "12", "14", "2"),
        )
        for reward in ("math", "numeric", "exact", "relaxed")
    ),
    *(
        Question("chosen", reward, "B", boxed("B", "(A)"), boxed("A", "(B)"), choices=("B", "A"))
        for reward in ("math", "exact", "choice", "relaxed")
    ),
    Question("chosen", "exact", "A", boxed("A", "60", "$60$"), boxed("B", "30"), choices=("$60$", "$30$")),
]  # fmt: skip

UNITS = [
    Question("units", reward, reference, boxed(*right), boxed(*wrong))
    for reward in ("math", "numeric", "relaxed")
    for reference, right, wrong in (
        ("48 cm", ("48", "48 cm", "48 centimetres", "48 units"), ("48%", r"48\%", "48 m", "48 cm/s", "48 apples")),
        (r"48^\circ", ("48", "48°", "48 degrees"), ("48%", "48 percent", "48 cm", r"48\text{ rad}")),
        ("$5", ("5", "$5", "5 dollars", r"\$5", "5 USD"), ("5%", "500%", "5 cents", "€5", "5 euros", "5¢", "$5/hour")),
        ("0.5 m", ("0.5", "0.5 m", "1/2"), ("50%", "0.5%", "0.5 km")),
        ("48%", ("48", "48%", "0.48", "48 per cent"), ("48 cm", "48°", "0.48 m")),
        (
            r"60\text{ km/h}",
            ("60", "60 km/h", "60 kilometers per hour", "60 km per hour", "60 kmh", r"60 \mathrm{km\cdot h^{-1}}",
             "60 km an hour"),
            ("60 m/s", "60 mph", "60 km", "60 miles per hour", "60 km/min", "60 h/km"),
        ),
        (
            "9 cm^2",
            ("9", "9 square centimeters", "9 sq cm", "9 cm²", r"9\text{ cm}^2", "9 square units", "9 cm**2"),
            ("9 cm", "9 cm^3", "9 m^2", "9 cubic cm", "9 square inches", "9 cubic units"),
        ),
        ("9.8 m/s^2", ("9.8", r"9.8\text{ m/s}^2", "9.8 meters per second squared"), ("9.8 m/s", "9.8 m^2/s", "9.8 N")),
        ("5 days", ("5", "5 day", "5 Days"), ("5 weeks", "5 hours", "5 months", "5 years", "5 people")),
        ("5 kg", ("5", "5 kilograms", "5 kilos"), ("5 tons", "5 g", "5 pounds", "5 lb", "5 oz")),
        (r"20^\circ\text{C}", ("20", "20°C", "20 degrees Celsius", "20 degrees"), ("20°F", "20 K", "20%", "20 cm")),
        ("5 pounds", ("5", "5 lbs", "£5", "5 pound"), ("5 kg", "$5", "5 ounces")),
        (r"5\ \Omega", ("5", r"5\,\Omega", "5 ohms", "5 Ω"), (r"5\text{ V}", r"6\ \Omega")),
        (r"5\ \mu\text{m}", ("5", r"5\,\mu m", "5 µm", "5 microns"), ("5 mm", r"5\text{ m}", r"6\ \mu\text{m}")),
        (
            r"5\ \frac{\text{m}}{\text{s}^2}",
            ("5", "5 m/s^2", r"5\tfrac{\mathrm{m}}{\mathrm{s}^{2}}"),
            ("5 m/s", r"5\ \frac{\text{m}}{\text{s}}", r"5\ \frac{\text{km}}{\text{h}^2}"),
        ),
        (r"5\text{ kN}", ("5", "5 kN", "5 kilonewtons"), (r"5\text{ N}", r"5\text{ mN}", r"5000\text{ N}", "5 kg")),
        (r"5\text{ mA}", ("5", "5 milliamps"), (r"5\text{ A}", r"5\ \mu\text{A}", "5 meters")),
        (r"5\ \mu\text{C}", ("5", "5 microcoulombs"), (r"5\text{ nC}", r"5\text{ C}", r"5\ \mu\text{F}")),
        (r"5\text{ k}\Omega", ("5", r"5\ \mathrm{k\Omega}", "5 kiloohms"), (r"5\ \Omega", r"5\text{ M}\Omega")),
        (r"5\text{ T}", ("5", "5 tesla"), (r"5\text{ mT}", "5 atm")),
        ("5 rev/s", ("5", "5 revolutions per second"), ("5 rad/s", "5 rpm")),
        ("10^{5}", ("100000", "10^5", "1e5", r"1 \times 10^{5}"), ("105", "10^{-5}", "10^4", "10")),
        (r"5\text{ N}", ("5", r"5\text{ N}", "5 newtons"), (r"5\text{ J}", "5 kg", r"5\text{ N m}")),
        (
            "5 red apples",
            ("5", "5 apples", "5 red apples", "five apples"),
            ("5 green apples", "5 pears", "5 red pears", "5 cm", "5 apples per day", "6 apples"),
        ),
        ("5 berries", ("5 Berries", r"5 \text{ berries}"), ("5 boxes", r"5 \text{ beans}")),
        ("5", ("5 apples", "5 tons", "5 km/h", "5 people per km^2"), ("5 x", "5 k", "5 A", "5/m", "5*m", "5 - m")),
    )
] + [
    Question("units", "math", r"\frac{3}{2} kT", boxed(r"\frac32 kT", "1.5 kT"), boxed(r"\frac32", "1.5")),
    Question("units", "count", "3 cubes", boxed("3", "3 cubes", "three", "3 red cubes", "3.0"),
             boxed("3 spheres", "3 cm", "4 cubes", "3%", "3 cubes per row")),
    Question("units", "count", "3", boxed("3 days", "3 cubes"), boxed("3 cm", "3 kg", "3%", "3 cubes a minute")),
    Question("units", "math", r"8 \sqrt { 3 } \text { cm }",
             boxed(r"8\sqrt{3}", r"8\sqrt{3}\text{ centimeters}"),
             boxed(r"8\sqrt{3}\text{ km}", r"8\sqrt{3}\text{ cm/s}", r"8\sqrt{3} \text{ cm}^2")),
    Question("units", "math", r"8\sqrt{3}\text{ apples}", boxed(r"8\sqrt{3}", r"8\sqrt{3}\text{ apples}"),
             boxed(r"8\sqrt{3}\text{ pears}", r"8\sqrt{3}\text{ cm}")),
    Question("units", "math", r"25\pi\text{ square units}", boxed(r"25\pi", r"25\pi\text{ cm}^2"),
             boxed(r"25\pi\text{ cubic units}", r"25\pi\text{ cm}")),
]  # fmt: skip

STATED = [
    *(
        Question(
            "stated",
            reward,
            "5",
            boxed("5", "= 5", "5 cm", "5 cm long", "the 5 cubes", "5 people", "The length is 5 cm.", "It's 5", "x = 5",
                  "The sum of the sides is about 5", "There are 5 red cubes"),
            boxed("5!", "5 factorial", "5 x", "5 i", "5 log", "5 tenths", "a third of 5", "double 5", "isn't 5",
                  "It isn't 5", "cannot be 5", "5 maybe six", "5, eleven, twelve", "half of it is 5", "one of 5",
                  "5 of 6", "It is less than 5", "It was never 5", "5 hundred", "5 or so"),
        )
        for reward in ("numeric", "relaxed")
    ),
    Question(
        "stated",
        "count",
        "3",
        [*boxed("3", "three", "The 3 cubes", "There are 3 cubes", "I see three"), "There are 3, and no one is red"],
        [
            *boxed("more than 3", "at least 3", "fewer than 3", "less than three", "isn't 3", "3!", "3 hundred",
                   "none of them, 3", "over 3", "3 or more", "There are at least 3", "I don't see 3", "3 tens"),
            "The answer is at least 3.",
        ],
    ),
    Question("stated", "count", "1", ["There is one", "1 cube"], ["I see no one", "There is not any one", "each one"]),
    Question("stated", "count", "300", boxed("3 hundred", "three hundred"), boxed("3")),
    Question("stated", "count", "0", boxed("There are none", "none."), boxed("none of them, 3", "no one")),
]  # fmt: skip

UNREAD = [
    Question("unread", "math", "3", boxed("3", "1+2", "1+2=3", r"\log_2(8)", "f(2)=3", r"\angle 1 = 3", r"\frac 6 2"),
             boxed("1 (2)", "2(1)", r"2\left(1\right)", r"1\quad2", r"1 \phantom{2}", "1 2", r"1\;2", "1=2=3", "2x=3",
                   "2[1]", r"1^\circ2")),
    Question("unread", "math", "5", boxed("5", "AB = 2+3 = 5"),
             boxed(r"5\\6", "5_2", r"4\lor 5", r"1\mid 5", r"4\to 5", r"4 \Rightarrow 5", "4 & 5", "x^2=5", "4 -> 5",
                   r"5 \bmod 2", "5...6", r"5\boxed{6}")),
    Question("unread", "math", "12", boxed("12"), boxed(r"1\,2", r"1\text{ }2", "1'2", r"1\sim 2", r"1\approx 2")),
    Question("unread", "math", "no", boxed("no", "No"), boxed("on", "yes", "n")),
    Question("unread", "math", "1010_2", boxed("1010_2", "1010_{2}"), boxed("1010", "1010_3", "10")),
    Question("unread", "math", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", boxed(r"\begin{pmatrix}1\\2\end{pmatrix}"),
             boxed(r"\begin{pmatrix}2\\1\end{pmatrix}", "1", "2")),
    Question("unread", "math", "1, 2", boxed("1, 2", r"1, \quad 2"), boxed("1", r"1 \quad 2")),
    *(Question("unread", reward, 4.0, boxed("4", "4.0"), boxed("5")) for reward in ("exact", "math", "numeric")),
    *(Question("unread", reward, {"value": 4}, boxed("4"), boxed("5", "{'value': 4}")) for reward in ("exact", "math")),
]  # fmt: skip

FORMULAS = [
    Question("formulas", "math", reference, right, wrong)
    for reference, right, wrong in (
        (
            r"\frac{1}{3}",
            [
                r"So $\frac13$",
                r"$x = \frac{1}{3}$",
                r"Hence \( \frac{2}{6} \).",
                r"\[ \frac13 \]",
                r"it is \frac{1}{3}.",
                r"There is 1 way of 3, so $$\tfrac{1}{3}$$ is the share.",
                r"$\frac{1}{3}$ for $x$",
            ],
            [
                r"$\frac{3}{1}$",
                r"from 1 to 3",
                r"$\frac13$, no, $\frac14$",
                r"$\frac{1}{3}$ of 6",
                r"\frac{1}{4}",
                "$1$ of $3$",
            ],
        ),
        (
            "12",
            ["There are 12 such values of $n$.", "$a = 1$ gives 12", "the volume of $ABCD$ is 12", "We pay $5, so 12"],
            ["There are 11 such values of $n$.", "$12$ is 1 more", r"$12$ or $13$", "$n = 12$ and $m = 3$"],
        ),
        (r"$[0, 1)$", ["$[0, 1)$", r"The range is $\left[0, 1\right)$."], ["$(0, 1)$", "0", "1", "$[0, 1]$"]),
        (
            r"Therefore $x \ge 5$",
            [r"$x \geq 5$ holds", r"\boxed{x >= 5}", r"\boxed{[5, \infty)}"],
            [r"$x > 5$", "5", r"$x \le 5$"],
        ),
        (
            "$21, 16$ or $11$",
            ["$21$, $16$, and $11$", r"\boxed{21, 16, 11}"],
            ["$21, 16$", "11", r"\boxed{21, 16, 11, 5}"],
        ),
        (
            "7",
            ["<answer>The value is $7$</answer>", "The answer is: the value of $x$ is $7$.", r"\boxed{x = 7}"],
            [
                "<answer>The value is not $7$</answer>",
                "<answer>It is $7$ or $8$</answer>",
                "<answer>If $7$, then $8$</answer>",
            ],
        ),
        ("5 days", ["It takes 5 days.", "$5$ days", "5"], ["It takes 5 weeks.", "$5$ weeks", "6 days"]),
        ("odd", [r"$\text{odd}$", "$odd$"], [r"$\text{even}$", "$od$"]),
        ("5 cm", ["AB的长是5厘米。", "长为5cm", "得$5$厘米"], ["长是5米。", "长为5毫米", "长为15厘米", "得6"]),
    )
] + [
    Question("formulas", "numeric", "5 cm", ["AB的长为5厘米。", "得5cm"], ["长为5米。", "长5毫米", "长15厘米"]),
    Question("formulas", "count", "3", ["图中有3个苹果。", "一共有３个", "りんごは3つです"],
             ["图中有13个", "有3.5个", "13つ"]),
    Question("formulas", "math", "3, 5", ["The answers are 3 and 5.", "Answers: $5$ and $3$"],
             ["The answers are 3 and 6."]),
    Question("formulas", "numeric", "5", ["The answer is 5."],
             ["The answers are 3 and 5.", "The answers are 5 and 3."]),
    Question("formulas", "math", "5",
             ["The answer is:\n\n$$\n5\n$$\n\nDone, 7.", "Answer:\n\\[\nx = 5.\n\\]", "答案是：\n$$\n5\n$$"],
             ["The answer is:\n$$\n6\n$$\n5", "The answer is\n$$\n5\n$$ or 6", "Answer:\n\\[\n5 \\text{ or } 6\n\\]",
              "答案不是5", "结果不为5"]),
    *(
        Question("formulas", reward, "7", tagged("Answer: 7", "The final answer: 7", "The answer is 7"),
                 tagged("Answer: 8", "Answer: 7 or 8", "Wrong answer: 7", "Answer: not 7"))
        for reward in ("math", "numeric", "count")
    ),
]  # fmt: skip

PARTS = [
    Question("parts", "math", reference, boxed(*right), boxed(*wrong))
    for reference, right, wrong in (
        (
            "2, 3",
            (
                "x_1 = 2, x_2 = 3",
                "3, 2",
                r"x = 2 \text{ or } x = 3",
                "x = 2, 3",
                "a = 2, b = 3",
                r"\{3; 2\}",
                "2 and 3",
            ),
            ("x_1 = 2", "2, 3, 4", "a = 3, b = 2", "x_1 = 2, x_2 = 4", "[2, 3]", "23", "2 < 3", "x = 2 = 3"),
        ),
        (
            "x = 3, y = 2",
            ("x = 3, y = 2", "y = 2, x = 3", "(3, 2)", "3, 2"),
            ("x = 2, y = 3", "2, 3", "(2, 3)", "x = 3", "y = 3, x = 2"),
        ),
        (
            "(3, 2)",
            ("(3, 2)", "x = 3, y = 2", "(x, y) = (3, 2)", "3, 2", r"(\frac{6}{2}, 2)"),
            ("(2, 3)", "[3, 2]", "(3, 2, 1)", "2, 3", "x = 2, y = 3", "(3, 2]", "3", "(y, x) = (2, 3)"),
        ),
        (
            r"(1, 2), (3, 4)",
            ("(3, 4), (1, 2)", r"(1,2) \text{ and } (3,4)"),
            ("(1, 2)", "(2, 1), (3, 4)", r"(1,2) \cup (3,4)", "1, 2, 3, 4"),
        ),
        (
            r"1 \pm \sqrt{2}",
            (r"1 + \sqrt{2}, 1 - \sqrt{2}", r"x = 1 \pm \sqrt 2"),
            (r"1 + \sqrt{2}", r"-1 \pm \sqrt{2}", r"1 \pm 2"),
        ),
        (
            r"x \le 2",
            ("x <= 2", r"2 \ge x", r"(-\infty, 2]", r"x \in (-\infty, 2]"),
            ("x < 2", "x >= 2", "y <= 2", "2", r"x \le 3", "x = 2"),
        ),
        (
            r"x \ne 5",
            ("x != 5", r"x \neq 5", r"(-\infty, 5) \cup (5, \infty)"),
            ("x = 5", "x != 4", "5", r"(-\infty, \infty)"),
        ),
        (
            r"-2 \le x < 7",
            (r"x \in [-2, 7)", "[-2, 7)", r"7 > x \geq -2"),
            ("[-2, 7]", "(-2, 7)", "-2, 7", r"-7 \le x < 2", r"[-2, 8)"),
        ),
        (r"x \in [-2, 7]", (r"-2 \le x \le 7", "[-2, 7]"), (r"-2 < x \le 7", "(-2, 7]", r"y \in [-2, 7]", "7")),
        (
            r"x < -1 \text{ or } x > 3",
            (r"(-\infty, -1) \cup (3, \infty)", "x > 3 or x < -1"),
            ("(-1, 3)", "x < -1", "x > 3, x < 1"),
        ),
        (
            r"V_1 : V_2 = 11 : 21",
            ("11:21", r"V_1:V_2 = 11:21", r"\frac{11}{21}"),
            ("21:11", "11", "11:22", "V_1:V_3 = 11:21"),
        ),
        (
            "x = 1/3",
            (r"x = 5 + 5 + 1 = 1/3", "1/3", r"x = \frac{1}{3} \approx 0.33"),
            ("x = 1/3 = 5", "y = 1/3", r"x \approx 0.33", "3"),
        ),
        ("x + z = 1", ("x + z = 1", "z = 1 - x"), ("1", "x + z = 2", "x = 1")),
        (
            r"\begin{pmatrix} 1 & \frac12 \\ 3 & 4 \end{pmatrix}",
            (r"\left[\begin{array}{cc}1 & 0.5 \\ 3 & 4\end{array}\right]",),
            (
                r"\begin{pmatrix} 1 & 3 \\ 0.5 & 4 \end{pmatrix}",
                r"1 & 0.5 \\ 3 & 4",
                r"\begin{pmatrix} 1 & 0.5 \end{pmatrix}",
            ),
        ),
        ("f(2) < f(1)", ("f(2) < f(1)", "f(1) > f(2)"), ("f(1) < f(2)", "f(2) > f(1)")),
    )
]

LATEX = [
    Question("latex", "math", reference, boxed(*right), boxed(*wrong))
    for reference, right, wrong in (
        (
            "3",
            (r"\log_2 8", r"\log_{2} 8", r"\log_28", r"\dfrac62", r"\sqrt[3]{27}", r"\int_0^1 3 \, dx"),
            ("2 8", r"\log_8 2", r"\log_2 9", "2_8"),
        ),
        (r"\log_{10} 1000", ("3", r"\log_{10}(1000)"), ("10 1000", "4")),
        (
            "9:30 a.m.",
            ("9:30 am", r"9:30 \text{ a.m.}", "09:30 AM", "9:30"),
            ("10:30 a.m.", "9:30 p.m.", "21:30", "9.5", "9:03 a.m.", "9 a.m."),
        ),
        ("9 p.m.", ("21:00", "9:00 pm", r"9\text{ PM}"), ("9 a.m.", "9:30 p.m.", "20:00", "9 cm")),
        (r"\emptyset", (r"\varnothing", r"\{\}", "∅", r"\{ \}"), ("0", r"\{0\}", r"\{\emptyset\}")),
        (
            "11111100",
            (r"11,\! 111,\! 100", r"11{,}111{,}100", r"11\,111\,100"),
            ("11, 111, 100", r"11,\ 111,\ 100", "11 111 100"),
        ),
        (r"\{1, 2\}", (r"\left\{1, 2\right\}", r"\left\{ 2 , 1 \right\}"), (r"\left\{1, 3\right\}", r"\{1\}")),
        ("125 miles", (r"125\textnormal{ miles}", r"125\mbox{ mi}"), (r"125\textnormal{ km}",)),
        (r"\\frac{1}{2}", (r"\frac{1}{2}", "0.5"), ("2", r"\frac{2}{1}")),
        ("May 5", (r"\text{May } 5", r"\text{May}\ 5"), (r"\text{May } 6", r"\text{June } 5", "5")),
        (r"2 \text{ hours } 30 \text{ minutes}", ("2 hours 30 minutes",), ("2 hours 20 minutes", "32", "2 hours")),
        ("2020-05-12", ("2020-5-12", r"\text{2020-05-12}"), ("2020-12-05", "2003", "2020-05-13")),
        ("2003", ("2003",), ("2020-05-12", "2020-12-05")),
        ("12/05/2020", ("12/5/2020",), ("24/10/2020", "05/12/2020")),
        ("5'6\"", ("5'6\"",), ("56", "6'5\"", "66")),
        ("f'(2)", ("f'(2)",), ("f(2)", "f''(2)")),
        (
            "2 + 3i",
            ("3i + 2", r"2 + 3\cdot i", "3 i + 2", r"2+3\mathrm{i}", r"2 + i\cdot 3", r"2 + \sqrt{-9}"),
            ("2 - 3i", "3 + 2i", "5", "5i", "2 + 3", "2 + 3j", "2 + 3i^2", "3i"),
        ),
        ("i", ("1i", r"\sqrt{-1}"), ("-i", "1", "i^2", "j")),
        ("-1", ("-1",), ("i", "i^3")),
        (r"\frac{\pi}{2}", (r"\frac\pi2", r"\frac\pi{2}"), (r"\frac2\pi", r"\frac\pi4")),
        (r"\mathbb{R}", (r"\mathbb R", r"(-\infty, \infty)"), (r"\mathbb Z", "0")),
        (r"\Delta", (r"\Delta",), (r"\Gamma", "1")),
        (
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
            (r"\begin{bmatrix} 1 & 2 \\[4pt] 3 & 4 \end{bmatrix}",),
            (r"\begin{pmatrix} 1 & 2 \\[4pt] 4 & 3 \end{pmatrix}",),
        ),
        (
            "0 < x < 4",
            (
                r"x > 0 \text{ and } x < 4",
                "0 < x and 4 > x",
                r"\{x \mid 0 < x < 4\}",
                r"\{x \in \mathbb R : 0 < x < 4\}",
            ),
            (
                r"x > 0 \text{ or } x < 4",
                r"x > 4 \text{ and } x < 0",
                r"x > 0 \text{ and } y < 4",
                r"\{x | 0 < x < 5\}",
            ),
        ),
        (r"x < 0 \text{ or } x > 4", (r"x > 4 \text{ or } x < 0",), (r"x < 0 \text{ and } x > 4", "0 < x < 4")),
        (
            "1, 2",
            (r"x \in \{2, 1\}", r"\lbrace 1, 2 \rbrace", r"\{2, 1\}"),
            (r"x \in \{1, 3\}", r"x \in [1, 2]", r"x \in \{1\}", r"\lbrace 1 \rbrace"),
        ),
        (r"x \in \{1, 2\}", (r"x \in \{2, 1\}", "1, 2"), (r"x \in \{1, 3\}", "1", r"x \in [1, 2]")),
        (r"90^\circ", (r"90^{\circ}", r"90\degree", "90°", "90"), (r"90^{90}", r"9^\circ")),
        ("5", ("5",), ("5 - m", "5 + cm", "x = 5, y = 6", r"x = 6 \text{ and } y = 5", "5 = 6", r"5 \text{ or } 6")),
    )
]

LABELLED = [
    *GEOMETRY3K,
    *INTERVALS,
    *GEOQA,
    *CLEVR,
    *MATHVISTA,
    *CHARTQA,
    *WRITING,
    *BOLD,
    *CHOSEN,
    *UNITS,
    *STATED,
    *UNREAD,
    *FORMULAS,
    *PARTS,
    *LATEX,
]
