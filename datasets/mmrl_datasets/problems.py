"""Geometry problems of a dozen kinds: the drawing, the question, a worked solution, and the answer in LaTeX.

Answers are written as Geometry3K writes them: ``48``, ``2 \\sqrt { 221 }``, ``\\frac { 7 } { 25 }``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import cos, isqrt, radians, sin

import numpy as np

from mmrl_datasets.figure import Figure, Label
from mmrl_datasets.layout import boxed, first

Values = Mapping[str, int]

EASY, HARD = 1, 2
"""Levels. 1: values of one digit, angles in tens, figures that lie alike and are not to scale; 2: larger values, and
figures to scale (as far as they stay readable), turned and mirrored."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem as it is put to the policy.

    Attributes:
        givens: The content of the figure in words, with which a text row begins.
        question: The question; it repeats nothing that the figure shows.
        steps: The way to the answer, without the box.
        answer: The answer in LaTeX.
        turns: True if the figure may be turned and mirrored.
    """

    figure: Figure
    givens: str
    question: str
    steps: str
    answer: str
    turns: bool = True

    @property
    def solution(self) -> str:
        return f"{self.steps} {boxed(self.answer)}"

    def told(self, count: int) -> Problem:
        """The same problem with that number of values in the question instead of the figure, at most all but one."""
        valued = [label for label in self.figure.labels if label.value]
        labels = valued[max(1, len(valued) - count) :]
        if not labels:
            return self
        given = " and ".join(
            f"{label.value} = {label.text}"
            if len(label.value) > 1
            else f"the angle at {label.value} has {label.text.rstrip('°')} degrees"
            for label in labels
        )
        rest = [label for label in self.figure.labels if label not in labels]
        question = f"{self.question.removesuffix('.')}, if {given}."
        return replace(self, figure=replace(self.figure, labels=rest), question=question)


@dataclass(frozen=True, slots=True)
class Kind:
    """``sample(rng, level)`` draws values; ``pose(values, level)`` makes them a problem."""

    sample: Callable[[np.random.Generator, int], Values]
    pose: Callable[[Values, int], Problem]


def fraction(value: Fraction) -> str:
    """LaTeX of a rational number in lowest terms."""
    sign = "- " if value < 0 else ""
    whole = str(abs(value.numerator))
    return sign + (whole if value.denominator == 1 else rf"\frac {{ {whole} }} {{ {value.denominator} }}")


def root(radicand: int) -> str:
    """LaTeX of a square root, the largest square taken out."""
    outer = next(k for k in range(isqrt(radicand), 0, -1) if radicand % (k * k) == 0)
    inner = radicand // (outer * outer)
    if inner == 1:
        return str(outer)
    return rf"{outer} \sqrt {{ {inner} }}" if outer > 1 else rf"\sqrt {{ {inner} }}"


def _sqrt(radicand: int) -> str:
    """The root before and after squares are taken out; once where that is the same."""
    plain, simple = rf"\sqrt {{ {radicand} }}", root(radicand)
    return plain if plain == simple else f"{plain} = {simple}"


def _lengths(rng: np.random.Generator, level: int, names: str, low: int = 2) -> Values:
    high = 9 if level == EASY else 20
    return {name: int(rng.integers(low, high + 1)) for name in names.split()}


def _drawn(level: int, *lengths: float) -> list[float]:
    """Lengths for the drawing: equal ones, or the true ratios as far as figures stay readable."""
    largest = max(lengths)
    return [1.0 if level == EASY else max(length / largest, 0.45) for length in lengths]


def _right_triangle(level: int, across: float, up: float) -> tuple[Figure, complex, complex, complex]:
    """Triangle ABC with the right angle at C and BC across, and its corners."""
    figure, c = Figure(), 0j
    width, height = (1.3, 1.0) if level == EASY else _drawn(level, across, up)
    a, b = height * 1j, complex(width)
    figure.polygon(A=a, B=b, C=c)
    figure.right_angle(c, a, b, 0.1)
    return figure, a, b, c


def _hypotenuse(v: Values, level: int) -> Problem:
    figure, a, b, c = _right_triangle(level, v["BC"], v["AC"])
    figure.side(a, c, v["AC"], b, "AC")
    figure.side(b, c, v["BC"], a, "BC")
    x, y = v["AC"], v["BC"]
    return Problem(
        figure,
        f"Triangle ABC has a right angle at C, AC = {x} and BC = {y}.",
        "Find AB.",
        f"AC = {x} and BC = {y}. The angle at C is right, so AB^2 = AC^2 + BC^2 = {x}^2 + {y}^2"
        f" = {x * x} + {y * y} = {x * x + y * y}. AB = {_sqrt(x * x + y * y)}.",
        root(x * x + y * y),
    )


def _leg_values(rng: np.random.Generator, level: int) -> Values:
    short, long = sorted(rng.choice(np.arange(2, 10 if level == EASY else 26), 2, replace=False).tolist())
    return {"AC": short, "AB": long}


def _leg(v: Values, level: int) -> Problem:
    x, y = v["AC"], v["AB"]
    rest = y * y - x * x
    figure, a, b, c = _right_triangle(level, rest**0.5, x)
    figure.side(a, c, x, b, "AC")
    figure.side(a, b, y, c, "AB")
    return Problem(
        figure,
        f"Triangle ABC has a right angle at C, AC = {x} and AB = {y}.",
        "Find BC.",
        f"AC = {x} and AB = {y}. The angle at C is right, so AB^2 = AC^2 + BC^2 and BC^2 = AB^2 - AC^2 = {y}^2 - {x}^2"
        f" = {y * y} - {x * x} = {rest}. BC = {_sqrt(rest)}.",
        root(rest),
    )


def _right_corner_values(rng: np.random.Generator, level: int) -> Values:
    """Two sides, and the corner of the right angle: C between them, or the one that makes the longer one hypotenuse."""
    v = _lengths(rng, level, "AC BC")
    corners = ["C"] + (["B"] if v["AC"] > v["BC"] else ["A"] if v["BC"] > v["AC"] else [])
    return {**v, "corner": "ABC".index(corners[int(rng.integers(len(corners)))])}


def _right_corner(v: Values, level: int) -> Problem:
    """The question tells the lengths; the figure shows the right angle, and so the hypotenuse."""
    x, y, corner = v["AC"], v["BC"], "ABC"[v["corner"]]
    c, b = 0j, 1.3 + 0j
    a = {"A": 0.48 + 0.63j, "B": b + 1j, "C": c + 1j}[corner]
    figure, corners = Figure(), {"A": a, "B": b, "C": c}
    figure.polygon(**corners)
    figure.areas.append([*corners.values()])
    p, q = (point for name, point in corners.items() if name != corner)
    figure.right_angle(corners[corner], p, q, 0.16)
    long, short = max(x, y), min(x, y)
    square = x * x + y * y if corner == "C" else long * long - short * short
    hypotenuse, leg = ("AC", "BC") if corner == "B" else ("BC", "AC")
    way = (
        f"AB^2 = AC^2 + BC^2 = {x}^2 + {y}^2 = {x * x} + {y * y} = {square}"
        if corner == "C"
        else f"AB^2 = {hypotenuse}^2 - {leg}^2 = {long}^2 - {short}^2 = {long * long} - {short * short} = {square}"
    )
    return Problem(
        figure,
        f"Triangle ABC has a right angle at {corner}.",
        f"Find AB, if AC = {x} and BC = {y}.",
        f"AC = {x} and BC = {y}. The angle at {corner} is right, so {way}. AB = {_sqrt(square)}.",
        root(square),
    )


def _two_triangles(v: Values, level: int) -> Problem:
    """Right triangles ABC and ACD, the second on the hypotenuse of the first."""
    x, y, z = v["AB"], v["BC"], v["CD"]
    width, height = (1.0, 1.0) if level == EASY else _drawn(level, y, x)
    a, b, c = height * 1j, 0j, complex(width)
    beside = (c - a) * 1j / abs(c - a)
    d = c + beside * (1.1 if level == EASY else min(max(z / max(x, y), 0.45), 1.3))
    figure = Figure()
    figure.polygon(A=a, B=b, C=c, D=d)
    figure.paths.append([a, c])
    figure.right_angle(b, a, c, 0.1)
    figure.right_angle(c, a, d, 0.1)
    for p, q, name, apart in ((a, b, "AB", c), (b, c, "BC", a), (c, d, "CD", a)):
        figure.side(p, q, v[name], apart, name)
    first, whole = x * x + y * y, x * x + y * y + z * z
    return Problem(
        figure,
        f"Triangle ABC has a right angle at B, triangle ACD a right angle at C; AB = {x}, BC = {y} and CD = {z}.",
        "Find AD.",
        f"AB = {x}, BC = {y}, CD = {z}. AC^2 = {x}^2 + {y}^2 = {x * x} + {y * y} = {first}."
        f" AD^2 = AC^2 + {z}^2 = {first} + {z * z} = {whole}. AD = {_sqrt(whole)}.",
        root(whole),
    )


def _angle_values(rng: np.random.Generator, level: int) -> Values:
    step = 10 if level == EASY else 1
    a = int(rng.integers(20 // step, 120 // step + 1)) * step
    return {"A": a, "B": int(rng.integers(20 // step, (160 - a) // step + 1)) * step}


def _third_angle(v: Values, level: int) -> Problem:
    x, y = v["A"], v["B"]
    a, b = 0j, 1 + 0j
    drawn_a, drawn_b = (42, 48) if level == EASY else (x, y)
    reach = sin(radians(drawn_b)) / sin(radians(drawn_a + drawn_b))
    c = reach * complex(cos(radians(drawn_a)), sin(radians(drawn_a)))
    figure = Figure()
    figure.polygon(A=a, B=b, C=c)
    figure.angle(a, b, c, f"{x}°", 0.12, "A")
    figure.angle(b, c, a, f"{y}°", 0.12, "B")
    z = 180 - x - y
    return Problem(
        figure,
        f"In triangle ABC the angle at A has {x} degrees and the angle at B has {y} degrees.",
        "Find the angle at C in degrees.",
        f"The angles of a triangle add up to 180 degrees. A = {x} and B = {y}, so A + B = {x} + {y} = {x + y}."
        f" C = 180 - {x + y} = {z}. Check: {x} + {y} + {z} = 180.",
        str(z),
    )


def _triangle_area(v: Values, level: int) -> Problem:
    x, y = v["AB"], v["CD"]
    width, height = (1.3, 0.9) if level == EASY else _drawn(level, x, y)
    a, b, foot = 0j, complex(width), complex(0.35 * width)
    c = foot + height * 1j
    figure = Figure()
    figure.polygon(A=a, B=b, C=c)
    figure.paths.append([c, foot])
    figure.right_angle(foot, b, c, 0.08)
    figure.side(a, b, x, c, "AB")
    figure.side(c, foot, y, a, "CD")
    figure.name(c, D=foot)
    half = Fraction(x * y, 2)
    return Problem(
        figure,
        f"In triangle ABC the side AB = {x}, and the altitude CD from C to AB is {y}.",
        "Find the area of triangle ABC.",
        f"The base is AB = {x} and the height is CD = {y}. The area is half of base times height."
        f" {x} \\cdot {y} = {x * y}, and half of {x * y} is \\frac {{ {x * y} }} {{ 2 }} = {fraction(half)}."
        f" Check: 2 \\cdot {fraction(half)} = {x * y}.",
        fraction(half),
    )


_TRIPLES = ((3, 4, 5), (5, 12, 13), (8, 15, 17), (7, 24, 25), (20, 21, 29), (9, 40, 41), (12, 35, 37))


def _sine_values(rng: np.random.Generator, level: int) -> Values:
    """Legs with a whole hypotenuse, which is at most 50 at the easy level."""
    x, y, z = _TRIPLES[rng.integers(len(_TRIPLES))]
    factor = int(rng.integers(1, (50 if level == EASY else 120) // z + 1))
    x, y = rng.permutation([x, y]).tolist()
    return {"AC": x * factor, "BC": y * factor}


def _sine(v: Values, level: int) -> Problem:
    x, y = v["AC"], v["BC"]
    z = isqrt(x * x + y * y)
    figure, a, b, c = _right_triangle(level, y, x)
    figure.side(a, c, x, b, "AC")
    figure.side(b, c, y, a, "BC")
    ratio = Fraction(y, z)
    return Problem(
        figure,
        f"Triangle ABC has a right angle at C, AC = {x} and BC = {y}.",
        "Find the sine of the angle at A as a fraction.",
        f"AC = {x} and BC = {y}. AB^2 = {x}^2 + {y}^2 = {x * x} + {y * y} = {z * z}, so AB = {z}."
        f" \\sin A = BC / AB = \\frac {{ {y} }} {{ {z} }} = {fraction(ratio)}.",
        fraction(ratio),
    )


def _circle_values(rng: np.random.Generator, level: int) -> Values:
    """A radius or (``is_diameter``) a diameter, and whether the area or the circumference is asked for."""
    return {
        "length": int(rng.integers(2, 10 if level == EASY else 41)),
        "is_diameter": int(rng.integers(2)),
        "asks_area": int(rng.integers(2)),
    }


def _times_pi(value: Fraction) -> str:
    return r"\pi" if value == 1 else f"{fraction(value)} \\pi"


def _circle(v: Values, level: int) -> Problem:
    length, is_diameter = v["length"], bool(v["is_diameter"])
    radius = Fraction(length, 2) if is_diameter else Fraction(length)
    figure, o, p = Figure(), 0j, 1 + 0j
    start = -p if is_diameter else o
    figure.circles.append((o, 1.0))
    figure.dots.append(o)
    figure.paths.append([start, p])
    figure.side(start, p, length, -1j)
    figure.name(o + 1j, O=o)
    figure.name(o, P=p, **({"Q": start} if is_diameter else {}))
    shown, r = ("diameter PQ" if is_diameter else "radius OP"), fraction(radius)
    given = f"The {shown} of the circle is {length}"
    given += f", so r = \\frac {{ {length} }} {{ 2 }} = {r}." if is_diameter else f", and this is its radius: r = {r}."
    if v["asks_area"]:
        value, asked = radius * radius, "area"
        steps = f"{given} The area is \\pi r^2, and r^2 = {r} \\cdot {r} = {fraction(value)}"
    else:
        value, asked = 2 * radius, "circumference"
        steps = f"{given} The circumference is 2 \\pi r, and 2 \\cdot r = 2 \\cdot {r} = {fraction(value)}"
    return Problem(
        figure,
        f"A circle with centre O has the {shown} = {length}.",
        f"Find the {asked} of the circle in terms of \\pi.",
        f"{steps}. So the {asked} of the circle is {_times_pi(value)}.",
        _times_pi(value),
    )


def _central_values(rng: np.random.Generator, level: int) -> Values:
    step = 10 if level == EASY else 1
    return {"AOB": int(rng.integers(40 // step, 160 // step + 1)) * step}


def _inscribed_angle(v: Values, level: int) -> Problem:
    x = v["AOB"]
    half_opening = radians((100 if level == EASY else x) / 2)
    o, c = 0j, 1j
    a, b = (complex(side * sin(half_opening), -cos(half_opening)) for side in (-1, 1))
    figure = Figure(circles=[(o, 1.0)], dots=[o], paths=[[a, o, b], [a, c, b]])
    figure.angle(o, a, b, f"{x}°", 0.22)
    figure.name(o, A=a, B=b, C=c)
    figure.name(-1j, O=o)
    answer = fraction(Fraction(x, 2))
    return Problem(
        figure,
        f"A, B and C lie on a circle with centre O, C on the larger arc; the angle AOB has {x} degrees.",
        "Find the angle ACB in degrees.",
        f"The angle AOB at the centre has {x} degrees. The angle ACB at the circle stands on the same arc AB, so it is"
        f" half of the angle at the centre. ACB = AOB / 2 = {x} / 2 = \\frac {{ {x} }} {{ 2 }} = {answer}."
        f" Check: 2 \\cdot {answer} = {x}.",
        answer,
    )


def _tangent_values(rng: np.random.Generator, level: int) -> Values:
    v = _leg_values(rng, level)
    return {"OT": v["AC"], "OP": v["AB"]}


def _tangent(v: Values, level: int) -> Problem:
    r, distance = v["OT"], v["OP"]
    rest = distance * distance - r * r
    drawn = 2.1 if level == EASY else min(max(distance / r, 1.5), 2.8)
    o, p = 0j, complex(drawn)
    t = complex(1 / drawn, (1 - 1 / drawn**2) ** 0.5)
    figure = Figure(circles=[(o, 1.0)], dots=[o], paths=[[o, t, p, o]])
    figure.right_angle(t, o, p, 0.14)
    figure.side(o, t, r, p, "OT")
    figure.side(o, p, distance, t, "OP")
    figure.name(o, T=t, P=p)
    figure.name(0.4 + 0.6j, O=o)
    return Problem(
        figure,
        f"PT touches the circle with centre O in T; OT = {r} and OP = {distance}.",
        "Find PT.",
        f"OT = {r} and OP = {distance}. A tangent is perpendicular to the radius, so PT^2 = OP^2 - OT^2"
        f" = {distance}^2 - {r}^2 = {distance * distance} - {r * r} = {rest}. PT = {_sqrt(rest)}.",
        root(rest),
    )


_PLACES = (
    ("corresponding", (1, 1j), True),
    ("alternate", (-1, -1j), True),
    ("same-side interior", (1, -1j), False),
    ("alternate exterior's neighbour", (-1, 1j), False),
)
"""Name of the angle x, the sides between which it lies at the other line, whether it equals the given one."""


def _parallel_values(rng: np.random.Generator, level: int) -> Values:
    step = 10 if level == EASY else 1
    angle = first(lambda: int(rng.integers(30 // step, 150 // step + 1)) * step, lambda angle: angle != 90)
    return {"angle": angle, "place": int(rng.integers(len(_PLACES)))}


def _parallel_lines(v: Values, level: int) -> Problem:
    x, (_, (along, across), equal) = v["angle"], _PLACES[v["place"]]
    drawn = (60 if x < 90 else 120) if level == EASY else x
    direction = complex(cos(radians(drawn)), sin(radians(drawn)))
    p, q = 0j, direction / direction.imag
    figure = Figure(paths=[[p - 1, p + 1], [q - 1, q + 1], [p - 0.55 * direction, q + 0.55 * direction]])
    figure.name(p, l=p + 1)
    figure.name(q, m=q + 1)
    figure.angle(p, p + 1, q, f"{x}°", 0.16)
    figure.angle(q, q + along, q + direction * across.imag, "x", 0.16)
    answer = x if equal else 180 - x
    turned = "to the right" if along == 1 else "to the left"
    where = f"between the part of m {turned} and the part of the transversal {'above' if across == 1j else 'below'} m"
    reason = (
        f"The angle x is equal to the given angle, since l and m are parallel and the two angles open the same way:"
        f" x = {x}. Check: the angle next to x is 180 - {x} = {180 - x}, and {x} + {180 - x} = 180."
        if equal
        else f"The angle next to x is equal to the given angle, {x}, since l and m are parallel; with x it makes a"
        f" straight line: x + {x} = 180. x = 180 - {x} = {answer}. Check: {answer} + {x} = 180."
    )
    return Problem(
        figure,
        f"The level lines l and, above it, m are parallel. A transversal makes an angle of {x} degrees with l, to the"
        f" right of it and above l. The angle x lies at m, {where}.",
        "The lines l and m are parallel. Find x in degrees.",
        f"The given angle at l is {x} degrees. {reason}",
        str(answer),
    )


def _point_values(rng: np.random.Generator, level: int) -> Values:
    low, high = (0, 9) if level == EASY else (-9, 9)
    ax, bx = rng.choice(np.arange(low, high + 1), 2, replace=False).tolist()
    ay, by = rng.choice(np.arange(low, high + 1), 2, replace=False).tolist()
    return {"ax": ax, "ay": ay, "bx": bx, "by": by}


def _axes(v: Values, level: int) -> Figure:
    """Both points on a grid, joined, with their coordinates beside them."""
    low, high = (0, 9) if level == EASY else (-9, 9)
    middle = 0 if level == EASY else (low + high) // 2
    figure = Figure(
        paths=[[complex(low, middle), complex(high, middle)], [complex(middle, low), complex(middle, high)]]
    )
    for tick in range(low, high + 1, 1 if level == EASY else 3):
        figure.faint += [[complex(tick, low), complex(tick, high)], [complex(low, tick), complex(high, tick)]]
    a, b = complex(v["ax"], v["ay"]), complex(v["bx"], v["by"])
    figure.paths.append([a, b])
    figure.dots += [a, b]
    up = 1j if a.imag > b.imag else -1j
    figure.labels += [Label(a, f"A({v['ax']}, {v['ay']})", up), Label(b, f"B({v['bx']}, {v['by']})", -up)]
    return figure


def _minus(value: int) -> str:
    return f"({value})" if value < 0 else str(value)


def _on_axes(v: Values, level: int, question: str, steps: str, answer: str) -> Problem:
    a, b = (f"({v[f'{name}x']}, {v[f'{name}y']})" for name in "ab")
    return Problem(
        _axes(v, level),
        f"The points are A{a} and B{b}.",
        question,
        f"A = {a} and B = {b}. {steps}",
        answer,
        turns=False,
    )


def _differences(v: Values) -> tuple[int, int, str]:
    dx, dy = v["bx"] - v["ax"], v["by"] - v["ay"]
    shown = f"{v['bx']} - {_minus(v['ax'])} = {dx}. y: {v['by']} - {_minus(v['ay'])} = {dy}."
    return dx, dy, f"x: {shown}"


def _distance(v: Values, level: int) -> Problem:
    dx, dy, steps = _differences(v)
    total = dx * dx + dy * dy
    steps += f" {_minus(dx)}^2 + {_minus(dy)}^2 = {dx * dx} + {dy * dy} = {total}. AB = {_sqrt(total)}."
    return _on_axes(v, level, "Find the distance of A and B.", steps, root(total))


def _midpoint(v: Values, level: int) -> Problem:
    parts = [Fraction(v[f"a{axis}"] + v[f"b{axis}"], 2) for axis in "xy"]
    steps = "Each coordinate is a mean. " + " ".join(
        f"{axis}: {v[f'a{axis}']} + {_minus(v[f'b{axis}'])} = {2 * part}, and half of {2 * part} is {fraction(part)}."
        for axis, part in zip("xy", parts, strict=True)
    )
    return _on_axes(v, level, "Find the midpoint of AB.", steps, f"( {fraction(parts[0])} , {fraction(parts[1])} )")


def _slope(v: Values, level: int) -> Problem:
    dx, dy, steps = _differences(v)
    answer = fraction(Fraction(dy, dx))
    steps += f" The slope is the change of y by the change of x: \\frac {{ {dy} }} {{ {dx} }} = {answer}."
    return _on_axes(v, level, "Find the slope of the line AB.", steps, answer)


KINDS: dict[str, Kind] = {
    "hypotenuse": Kind(lambda rng, level: _lengths(rng, level, "AC BC"), _hypotenuse),
    "leg": Kind(_leg_values, _leg),
    "right_corner": Kind(_right_corner_values, _right_corner),
    "two_triangles": Kind(lambda rng, level: _lengths(rng, level, "AB BC CD"), _two_triangles),
    "third_angle": Kind(_angle_values, _third_angle),
    "triangle_area": Kind(lambda rng, level: _lengths(rng, level, "AB CD"), _triangle_area),
    "sine": Kind(_sine_values, _sine),
    "circle": Kind(_circle_values, _circle),
    "inscribed_angle": Kind(_central_values, _inscribed_angle),
    "tangent": Kind(_tangent_values, _tangent),
    "parallel_lines": Kind(_parallel_values, _parallel_lines),
    "distance": Kind(_point_values, _distance),
    "midpoint": Kind(_point_values, _midpoint),
    "slope": Kind(_point_values, _slope),
}
