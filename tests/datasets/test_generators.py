from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mmrl.errors import DataError, ResourceError
from mmrl_datasets import charts, compare, digits, geometry, shapes, sums
from mmrl_datasets.charts import write_charts
from mmrl_datasets.compare import write_compare
from mmrl_datasets.digits import write_digits
from mmrl_datasets.geometry import write_geometry
from mmrl_datasets.problems import EASY, HARD, KINDS
from mmrl_datasets.shapes import COLOURS, write_shapes
from mmrl_datasets.sums import write_sums
from mmrl_datasets.table import Table

GENERATORS: dict[str, Callable[..., None]] = {
    "digits": write_digits,
    "shapes": write_shapes,
    "geometry": write_geometry,
    "charts": write_charts,
    "compare": write_compare,
    "sums": write_sums,
}
SPLITS = ("train", "test", "warmup")
TERM = r"\(?-?\d+\)?(?:\^2)?"
EQUATION = re.compile(rf"(?<![+^-] )(?<!\w)({TERM}(?: [+-] {TERM})+) = (-?\d+)(?![\d^]| [+-])")
"""A sum of integers and squares, and the integer that it is said to be."""


def rows(path: Path) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return read


def pictures(row: dict[str, Any]) -> list[Any]:
    return [np.asarray(Image.open(io.BytesIO(image["bytes"]))) for image in row["images"]]


def pixels(row: dict[str, Any]) -> Any:
    (picture,) = pictures(row)
    return picture


def halves(row: dict[str, Any]) -> list[Any]:
    """The digits of a row, drawn down to 8x8 again."""
    image = pixels(row)
    parts = np.split(image, image.shape[1] // image.shape[0], axis=1)
    return [np.asarray(Image.fromarray(p).convert("L").resize((8, 8), Image.Resampling.BICUBIC)) for p in parts]


def file_hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def digit_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder, train=200, test=60, warmup=50, pairs=0.5, seed=1)
    return folder


@pytest.fixture(scope="module")
def shape_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    write_shapes(folder, train=300, test=60, warmup=40, seed=1)
    return folder


@pytest.fixture(scope="module")
def geometry_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both levels, in two folders."""
    folder = tmp_path_factory.mktemp("geometry")
    for level in (EASY, HARD):
        write_geometry(folder / str(level), train=260, test=60, warmup=30, level=level, image_size=112, seed=1)
    return folder


@pytest.fixture(scope="module")
def chart_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("charts")
    write_charts(folder, train=120, test=40, warmup=20, seed=1)
    return folder


@pytest.fixture(scope="module")
def compare_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    write_compare(folder, train=120, test=40, warmup=20, seed=1)
    return folder


def test_without_scikit_learn_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    digits._digits.cache_clear()
    with pytest.raises(ResourceError, match="scikit-learn's, which is not installed") as caught:
        write_digits(tmp_path / "digits", train=3, test=2)
    assert "mmrl-train[digits]" in caught.value.remedy and not (tmp_path / "digits").exists()


def test_the_answers_are_those_of_the_digits_shown(digit_folder: Path) -> None:
    from sklearn.datasets import load_digits
    from sklearn.neighbors import KNeighborsClassifier

    source = load_digits()
    model = KNeighborsClassifier(1).fit(255 - source.images.reshape(-1, 64) * (255 / 16), source.target)
    read = rows(digit_folder / "train.parquet")
    assert len(read) == 200
    assert sum(pixels(row).shape == (56, 112, 3) for row in read) == 100
    right = [sum(model.predict([half.ravel() for half in halves(row)])) == int(row["answer"]) for row in read]
    assert np.mean(right) > 0.98
    for row in read:
        asked = "What is the sum of the two digits?" if pixels(row).shape[1] == 112 else "What digit is this?"
        assert row["problem"] == f"<image>{asked}"
        assert row["solution"] == f"\\boxed{{{row['answer']}}}"


def test_captions_are_documents_of_digits_and_their_values(tmp_path: Path) -> None:
    write_digits(tmp_path, train=0, test=359, captions=40, seed=1)
    held_out = {row["images"][0]["bytes"]: row["answer"] for row in rows(tmp_path / "test.parquet")}
    for split, count in (("captions", 40), ("held_out_captions", 5)):
        read = Table(Table.Config(path=str(tmp_path), split=split, document="problem")).load()
        assert len(read) == count and {len(row.images) for row in read} == {1, 2, 3}
        for row in read:
            assert row.messages[0].content.replace("<image> ", "") == row.columns["answer"]
            shown = [held_out.get(image.data) for image in row.images]
            values: list[str | None] = list(row.columns["answer"].split())
            assert shown == ([None] * len(shown) if split == "captions" else values)


def test_verdicts_are_all_ten_answers_of_which_the_right_one_scores(tmp_path: Path) -> None:
    write_digits(tmp_path, train=1438, test=0, verdicts=30)
    known = {row["images"][0]["bytes"]: row["answer"] for row in rows(tmp_path / "train.parquet")}
    for row in Table(Table.Config(path=str(tmp_path), split="verdicts")).load():
        assert {each.text for each in row.candidates} == {f"\\boxed{{{digit}}}" for digit in range(10)}
        (right,) = (each.text for each in row.candidates if each.score)
        assert right == f"\\boxed{{{known[row.images[0].data]}}}"


def test_no_digit_of_a_test_row_is_trained_on(digit_folder: Path) -> None:
    shown = {
        split: {half.tobytes() for row in rows(digit_folder / f"{split}.parquet") for half in halves(row)}
        for split in ("train", "test", "warmup")
    }
    assert len(shown["test"]) > 80
    assert not shown["test"] & (shown["train"] | shown["warmup"])


def test_digits_are_turned_to_the_left_with_the_same_rows(tmp_path: Path) -> None:
    for folder, turns in (("upright", 0), ("turned", 1)):
        write_digits(tmp_path / folder, train=20, test=5, pairs=0.5, quarter_turns=turns)
    for one, other in zip(*(rows(tmp_path / name / "train.parquet") for name in ("upright", "turned")), strict=True):
        assert (one["problem"], one["answer"]) == (other["problem"], other["answer"])
        for before, after in zip(halves(one), halves(other), strict=True):
            assert np.abs(np.rot90(before.astype(int)) - after).max() < 30


def test_every_training_digit_comes_once_before_any_comes_twice(tmp_path: Path) -> None:
    write_digits(tmp_path, train=1438, test=359)
    read = [row["images"][0]["bytes"] for split in ("train", "test") for row in rows(tmp_path / f"{split}.parquet")]
    assert len(set(read)) == 1797
    assert not (tmp_path / "warmup.parquet").exists()
    with pytest.raises(DataError, match="1439 rows of one digit are more than the 1438 digits"):
        write_digits(tmp_path / "more", train=1439)


def test_the_counts_are_those_of_the_shapes_drawn(shape_folder: Path) -> None:
    from scipy.ndimage import label

    read = rows(shape_folder / "train.parquet")
    assert len({pixels(row).shape for row in read}) == 5
    for row in read:
        asked = re.fullmatch(r"<image>How many (\w+) (circle|square|triangle)s are there\?", row["problem"])
        assert asked is not None
        of_colour = np.abs(pixels(row).astype(int) - COLOURS[asked[1]]).sum(-1) < 40
        areas, num_areas = label(of_colour)
        found = [measure(areas == area) for area in range(1, num_areas + 1)]
        assert str(found.count(asked[2])) == row["answer"], row["problem"]
        assert row["solution"] == f"\\boxed{{{row['answer']}}}"


def measure(area: Any) -> str:
    """The kind of a filled area, from how much of its bounding box it fills."""
    ys, xs = np.nonzero(area)
    if len(ys) < 60:
        return "edge of another colour"
    fill = len(ys) / ((np.ptp(ys) + 1) * (np.ptp(xs) + 1))
    return "square" if fill > 0.92 else "circle" if fill > 0.68 else "triangle"


def test_answers_are_spread_and_zero_occurs(shape_folder: Path) -> None:
    answers = [row["answer"] for row in rows(shape_folder / "train.parquet")]
    assert set(answers) == {"0", "1", "2", "3", "4"}
    assert max(answers.count(a) for a in set(answers)) < 0.3 * len(answers)


def colours(picture: Any) -> list[str]:
    """The colour of each thing in a scene: of its pixel that is furthest from white."""
    from scipy.ndimage import label

    ink = (255.0 - picture).sum(-1)
    things, number = label(ink > 60, np.ones((3, 3)))
    darkest = [
        picture[np.unravel_index(np.argmax(ink * (things == thing)), ink.shape)] for thing in range(1, number + 1)
    ]
    return [min(COLOURS, key=lambda name: np.abs(pixel - np.array(COLOURS[name])).sum()) for pixel in darkest]


def count(scene: list[list[str]], words: str) -> int:
    """How many things of a scene have every word of ``large red circles``."""
    wanted = {word for word in words.split() if word != "things"}
    return sum(wanted <= {size, colour, f"{shape}s"} for size, colour, shape in scene)


def test_varied_scenes_ask_for_any_of_size_colour_and_shape(tmp_path: Path) -> None:
    write_shapes(tmp_path, train=150, test=1, varied=1.0)
    read = rows(tmp_path / "train.parquet")
    asked = [row["problem"].removeprefix("<image>How many ").removesuffix(" are there?") for row in read]
    assert {len(words.split()) for words in asked} == {1, 2, 3}
    assert {"large", "small", "things", "stars", "rings", "purple"} <= set(" ".join(asked).split())
    for row, words in zip(read, asked, strict=True):
        scene = json.loads(row["scene"])
        assert row["answer"] == str(count(scene, words))
        assert sorted(colours(pixels(row))) == sorted(colour for _, colour, _ in scene)


@pytest.mark.parametrize(("varied", "num_kinds"), [(0.0, 12), (1.0, 60)])
def test_a_single_thing_is_named_with_verdicts_on_all_names(tmp_path: Path, varied: float, num_kinds: int) -> None:
    """A ring is empty in its middle; of others the share of its bounding box that a thing fills tells its shape."""
    write_shapes(tmp_path, train=0, test=30, verdicts=120, single=1.0, varied=varied)
    filled = {"circle": 0.785, "square": 1, "triangle": 0.5, "star": 0.36}
    held_out = {row["images"][0]["bytes"] for row in rows(tmp_path / "test.parquet")}
    read = rows(tmp_path / "verdicts.parquet")
    assert not held_out & {row["images"][0]["bytes"] for row in read}
    for row in read:
        picture = pixels(row)
        assert picture.shape == (56, 56, 3) and row["problem"] == "<image>What is this?"
        dark = np.clip((255 - picture.min(-1)) / (255 - picture.min()), 0, 1)
        ys, xs = (np.flatnonzero(dark.max(axis) > 0.2) for axis in (1, 0))
        height, width = np.ptp(ys) + 1, np.ptp(xs) + 1
        share = dark.sum() / height / width
        middle = dark[round(ys.mean()), round(xs.mean())]
        *size, colour, shape = row["answer"].split()
        assert colours(picture) == [colour]
        assert ("ring" if middle < 0.5 else min(filled, key=lambda each: abs(filled[each] - share))) == shape
        assert size == (["large" if height > 32 else "small"] if varied else [])
        right = [text for text, score in zip(row["candidates"], row["scores"], strict=True) if score]
        assert right == [row["solution"]] and len(set(row["candidates"])) == num_kinds


def test_verdicts_on_a_count_are_all_counts(tmp_path: Path) -> None:
    write_shapes(tmp_path, train=0, test=1, verdicts=20)
    for row in rows(tmp_path / "verdicts.parquet"):
        assert sorted(row["candidates"]) == [f"\\boxed{{{number}}}" for number in range(5)]
        assert sorted(zip(row["scores"], row["candidates"], strict=True))[-1] == (1, row["solution"])


def expected(kind: str, v: dict[str, int]) -> Any:
    """The answer to a problem, from its values, by a computer algebra system."""
    import sympy

    rational, root, a, b = sympy.Rational, sympy.sqrt, sympy.Point(0, 0), sympy.Point(0, 0)
    if "ax" in v:
        a, b = sympy.Point(v["ax"], v["ay"]), sympy.Point(v["bx"], v["by"])
    match kind:
        case "hypotenuse":
            return sympy.Triangle(sss=(v["AC"], v["BC"], root(v["AC"] ** 2 + v["BC"] ** 2))).sides[2].length
        case "right_corner":
            x, y = v["AC"], v["BC"]
            return root([y * y - x * x, x * x - y * y, x * x + y * y][v["corner"]])
        case "leg" | "tangent":
            leg, whole = v.values()
            return root(whole**2) * sympy.sin(sympy.acos(rational(leg, whole)))
        case "two_triangles":
            return sympy.Point(0, 0, 0).distance(sympy.Point(*v.values()))
        case "third_angle":
            return 180 - sum(v.values())
        case "triangle_area":
            return abs(sympy.Triangle((0, 0), (v["AB"], 0), (1, v["CD"])).area)
        case "sine":
            return sympy.sin(sympy.atan(rational(v["BC"], v["AC"])))
        case "circle":
            circle = sympy.Circle((0, 0), rational(v["length"], 2 if v["is_diameter"] else 1))
            return circle.area if v["asks_area"] else circle.circumference
        case "inscribed_angle":
            return rational(v["AOB"], 2)
        case "parallel_lines":
            # Angles with the level lines, between the rays that the place names: same side and same height are equal.
            return [v["angle"], v["angle"], 180 - v["angle"], 180 - v["angle"]][v["place"]]
        case "distance":
            return a.distance(b)
        case "midpoint":
            return a.midpoint(b)
        case "slope":
            return sympy.Line(a, b).slope
    raise AssertionError(kind)


@pytest.mark.parametrize("level", [EASY, HARD])
def test_geometry_answers_are_those_of_a_computer_algebra_system(geometry_folder: Path, level: int) -> None:
    import sympy
    from math_verify import parse

    read = rows(geometry_folder / str(level) / "train.parquet")
    assert {row["kind"] for row in read} == set(KINDS) and {row["level"] for row in read} == {level}
    for row in read:
        found, *_ = parse(f"${row['answer']}$")
        right = expected(row["kind"], json.loads(row["values"]))
        pairs = zip(found.args[:2], right, strict=True) if row["kind"] == "midpoint" else [(found, right)]
        assert all(sympy.simplify(one - other) == 0 for one, other in pairs), (
            row["kind"],
            row["values"],
            row["answer"],
        )


def test_geometry_answers_are_written_as_in_geometry3k(geometry_folder: Path) -> None:
    answers = {row["answer"] for level in "12" for row in rows(geometry_folder / level / "train.parquet")}
    forms = (
        r"\d+",
        r"\\sqrt \{ \d+ \}",
        r"\d+ \\sqrt \{ \d+ \}",
        r"(- )?\\frac \{ \d+ \} \{ \d+ \}",
        r".* \\pi",
        r"\( .* , .* \)",
    )
    for form in forms:
        assert sum(re.fullmatch(form, answer) is not None for answer in answers) > 3, form


def test_geometry_solutions_are_worked_and_every_equation_in_them_holds(geometry_folder: Path) -> None:
    import sympy

    checked = 0
    for level in "12":
        for row in rows(geometry_folder / level / "train.parquet"):
            steps, _, box = row["solution"].rpartition(r" \boxed{")
            assert box == row["answer"] + "}"
            assert 55 <= len(re.findall(r"\d|[A-Za-z]+|[^\sA-Za-z\d]", row["solution"])) <= 200, row["solution"]
            for left, right in EQUATION.findall(steps):
                assert sympy.sympify(left.replace("^", "**")) == int(right), row["solution"]
                checked += 1
    assert checked > 300


@pytest.mark.parametrize("level", [EASY, HARD])
def test_the_figure_alone_says_where_the_right_angle_is(level: int) -> None:
    pose = KINDS["right_corner"].pose
    at_b, at_c, other = (pose({"AC": x, "BC": 3, "corner": corner}, level) for x, corner in ((5, 1), (5, 2), (7, 2)))
    assert at_b.question == at_c.question and (at_b.answer, at_c.answer) == ("4", r"\sqrt { 34 }")
    drawings = [each.figure.draw(84, 84, 15) for each in (at_b, at_c, other)]
    assert drawings[0] != drawings[1] == drawings[2]


@pytest.mark.parametrize("level", [EASY, HARD])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "right_corner"])
def test_a_geometry_problem_needs_its_picture(kind: str, level: int) -> None:
    rng = np.random.default_rng(0)
    values = KINDS[kind].sample(rng, level)
    others = next(v for v in iter(lambda: KINDS[kind].sample(rng, level), None) if v != values)
    problem, other = KINDS[kind].pose(values, level), KINDS[kind].pose(others, level)
    given = [str(value) for name, value in values.items() if name not in ("place", "is_diameter", "asks_area")]
    shown = " ".join(label.text for label in problem.figure.labels)
    assert all(value in shown for value in given)
    assert all(re.search(rf"(?<!\d){value}(?!\d)", problem.givens) for value in given)
    assert not re.search(r"\d", problem.question)
    drawings = [each.figure.draw(168, 126, 14) for each in (problem, problem, other)]
    assert drawings[0] == drawings[1]
    assert drawings[0] != drawings[2] or "asks_area" in values


def test_no_geometry_test_row_has_the_values_of_another_split(geometry_folder: Path, chart_folder: Path) -> None:
    for folder in (geometry_folder / "1", geometry_folder / "2", chart_folder):
        problems = {
            split: {(row["kind"], row["values"]) for row in rows(folder / f"{split}.parquet")} for split in SPLITS
        }
        assert len(problems["test"]) > 25
        assert not problems["test"] & (problems["train"] | problems["warmup"])


def test_geometry_rows_can_have_text_or_three_pictures_of_different_sizes(tmp_path: Path) -> None:
    write_geometry(tmp_path, train=90, test=10, kinds=("leg", "tangent"), text_only=0.4, multi=0.3)
    read = rows(tmp_path / "train.parquet")
    numbers = [len(row["images"]) for row in read]
    assert set(numbers) == {0, 1, 3} and numbers.count(0) > 20 and numbers.count(3) > 15
    for row in read:
        values = json.loads(row["values"]).values()
        assert row["problem"].count("<image>") == len(row["images"])
        assert row["images"] or all(re.search(rf"\b{value}\b", row["problem"]) for value in values)
        assert len({picture.shape for picture in pictures(row)}) == len(row["images"])
        asked = [place for place in ("first", "second", "third") if f"the {place} picture" in row["problem"]]
        assert len(asked) == (len(row["images"]) == 3)
    assert len({picture.shape for row in read for picture in pictures(row)}) > 5


def test_geometry_can_tell_all_values_but_one_in_the_question(tmp_path: Path) -> None:
    kinds = ("two_triangles", "third_angle", "circle", "slope")
    write_geometry(tmp_path, train=60, test=10, kinds=kinds, told=5)
    for row in rows(tmp_path / "train.parquet"):
        _, *told = json.loads(row["values"]).values()
        numbers = [int(number) for number in re.findall(r"\d+", row["problem"])]
        assert numbers == (told if row["kind"] in ("two_triangles", "third_angle") else []), row["problem"]
    values = {"AB": 3, "BC": 4, "CD": 5}
    shown, told = KINDS["two_triangles"].pose(values, EASY), KINDS["two_triangles"].pose(values, EASY).told(1)
    assert told.question == "Find AD, if CD = 5." and told.solution == shown.solution
    assert [label.text for label in shown.figure.labels if label not in told.figure.labels] == ["5"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": ("leg", "cube")}, "cube"),
        ({"kinds": ()}, "none"),
        ({"level": 3}, "level 1 or 2"),
        ({"text_only": 0.6, "multi": 0.6}, "1 or less together"),
        ({"kinds": ("hypotenuse",), "text_only": 1.0, "level": 1}, "fewer different rows"),
    ],
)
def test_geometry_that_cannot_be_drawn_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        write_geometry(tmp_path / "out", train=100, test=5, **options)
    assert not (tmp_path / "out").exists()


def test_charts_show_their_values_and_the_answers_follow(chart_folder: Path) -> None:
    read = rows(chart_folder / "train.parquet")
    assert {row["kind"] for row in read} == {"bar", "line", "pie"} and len({pixels(row).shape for row in read}) == 4
    for row in read:
        values = json.loads(row["values"])
        names = re.findall(r"\b(?:" + "|".join(values) + r")\b", row["problem"])
        worth = [values[name] for name in names]
        answers = {
            "largest": lambda v=values: max(v, key=v.get),
            "smallest": lambda v=values: min(v, key=v.get),
            "value": lambda w=worth: w[0],
            "sum": lambda w=worth: sum(w),
            "difference": lambda w=worth: w[0] - w[1],
        }
        assert row["answer"] == str(answers[row["asked"]]()), row["problem"]
        if row["kind"] == "line":
            continue
        of_colour = [np.abs(pixels(row).astype(int) - colour).sum(-1) < 20 for colour in charts.COLOURS[: len(values)]]
        measured = [mask.sum() if row["kind"] == "pie" else np.ptp(np.nonzero(mask)[0]) + 1 for mask in of_colour]
        shares = np.array(list(values.values())) / sum(values.values())
        np.testing.assert_allclose(np.array(measured) / sum(measured), shares, atol=0.025)


def test_comparisons_are_right_and_choices_are_letters(compare_folder: Path) -> None:
    read = rows(compare_folder / "train.parquet")
    assert {len(row["images"]) for row in read} == {2, 3} and {row["choices"] is None for row in read} == {True, False}
    for row in read:
        scenes = json.loads(row["scenes"])
        words = re.search(r"\w+ (?:circle|square|triangle)s", row["problem"])
        assert words is not None
        counts = [count(scene, words[0]) for scene in scenes]
        for scene, picture in zip(scenes, pictures(row), strict=True):
            assert sorted(colours(picture)) == sorted(colour for _, colour, _ in scene)
        if row["choices"]:
            assert [
                f"{letter}) {choice}" in row["problem"] for letter, choice in zip("ABC", row["choices"], strict=False)
            ]
            assert len(row["choices"]) == len(counts) and counts.count(max(counts)) == 1
            assert row["answer"] == "ABC"[counts.index(max(counts))]
        else:
            assert row["answer"] == str(sum(counts) if len(counts) == 3 else abs(counts[0] - counts[1]))


def test_sums_are_right_and_no_two_rows_ask_for_the_same_numbers(tmp_path: Path) -> None:
    write_sums(tmp_path)
    asked = []
    for row in rows(tmp_path / "train.parquet") + rows(tmp_path / "test.parquet"):
        terms = [int(number) for number in re.findall(r"\d+", row["problem"])]
        asked.append(tuple(sorted(terms)))
        assert row["answer"] == str(sum(terms)) and row["solution"] == f"{terms[0]} + {terms[1]} = {row['answer']}"
        assert row["images"] == []
    assert len(set(asked)) == len(asked) == 132 + 64
    with pytest.raises(DataError, match="cannot be drawn"):
        write_sums(tmp_path, train=133)


def test_no_picture_is_in_two_rows(
    shape_folder: Path, geometry_folder: Path, chart_folder: Path, compare_folder: Path
) -> None:
    for folder in (shape_folder, geometry_folder / "2", compare_folder):
        shown = [
            image["bytes"] for split in SPLITS for row in rows(folder / f"{split}.parquet") for image in row["images"]
        ]
        assert len(shown) == len(set(shown)) >= 160


@pytest.mark.parametrize("write", GENERATORS.values(), ids=GENERATORS)
def test_the_same_seed_gives_the_same_files_and_another_is_not_written_over_them(tmp_path: Path, write: Any) -> None:
    write(tmp_path / "a", train=20, test=10, seed=3)
    write(tmp_path / "b", train=20, test=10, seed=3)
    before = file_hashes(tmp_path / "a")
    assert before == file_hashes(tmp_path / "b")
    assert set(before) == {"train.parquet", "test.parquet"}
    write(tmp_path / "a", train=20, test=10, seed=3)
    with pytest.raises(DataError, match="holds other rows"):
        write(tmp_path / "a", train=20, test=10, seed=4)
    assert file_hashes(tmp_path / "a") == before
    write(tmp_path / "c", train=30, test=10, seed=3)
    assert file_hashes(tmp_path / "c")["test.parquet"] == before["test.parquet"]


def test_an_interrupted_file_is_not_taken_for_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="holds other rows"):
        write_digits(tmp_path, train=5, test=5)


def test_the_table_loader_reads_what_the_generators_write(
    digit_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    prompts = Table(Table.Config(path=str(digit_folder), split="test")).load()
    assert len(prompts) == 60
    assert prompts[0].id == "test/0"
    assert prompts[0].demonstration == f"\\boxed{{{prompts[0].answer}}}"
    assert len(prompts[0].images) == 1


@pytest.mark.full
@pytest.mark.parametrize("module", GENERATORS)
def test_the_generators_are_commands(tmp_path: Path, module: str) -> None:
    command = [sys.executable, "-m", f"mmrl_datasets.{module}", str(tmp_path / "out"), "--train", "4", "--test", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(rows(tmp_path / "out" / "train.parquet")) == 4


@pytest.mark.parametrize("main", [module.main for module in (digits, shapes, geometry, charts, compare, sums)])
def test_bad_options_exit_with_the_code_for_data(tmp_path: Path, main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--train", "--seed"):
        assert main([str(tmp_path), option, "-1"]) == 3
        assert "0 or more" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_fresh_geometry_rows_are_new_pictures_of_known_values(tmp_path: Path) -> None:
    write_geometry(tmp_path, train=150, test=10, fresh=20, kinds=("right_corner",), level=EASY, image_size=84)
    train, fresh = (rows(tmp_path / f"{split}.parquet") for split in ("train", "fresh"))
    held_out = {row["problem"] for row in rows(tmp_path / "test.parquet")}
    assert len(fresh) == 20 and not held_out & {row["problem"] for row in [*fresh, *train]}
    assert not {row["images"][0]["bytes"] for row in train} & {row["images"][0]["bytes"] for row in fresh}
    assert {row["problem"] for row in fresh} & {row["problem"] for row in train}
