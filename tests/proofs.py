"""Proofs of what holds for a family: the families that a test runs over, and the results that the table is made of.

``@pytest.mark.proves("packing")`` says that a test proves a feature for the family of its parameter ``family``, or for
the one of its argument: ``proves("tensor_parallel", family="qwen2_5_vl")``. A test that does not compute in float32 has
``precision="bfloat16"``.

A test that measures packed pairs against unpacked ones of a family records its numbers as the property ``pairs``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from mmrl.engine.network.family import FAMILIES
from mmrl.engine.network.features import FEATURES, Feature

TESTS = Path(__file__).parent
RESULTS = TESTS / "families.json"
"""The last outcome of each proof: family, feature, test, and the tier to which the test belongs for that family."""
PAIRS = TESTS / "family_pairs.json"
"""Largest differences of packed pairs from unpacked ones: by family, of the loss, the log-probs and the gradient."""
REPRESENTATIVES = ("qwen2_5_vl", "internvl", "qwen3_5", "qwen2", "qwen3_moe")
"""A family of each kind: images as grids, as tiles, linear attention, text, experts. Shorter tiers try these alone;
``README.md`` has the rule."""
OUTCOMES = ("skipped", "passed", "failed")

Results = dict[str, dict[str, dict[str, dict[str, str]]]]
Pairs = dict[str, dict[str, float]]


def families(*features: Feature, sweep: pytest.MarkDecorator = pytest.mark.full) -> list[Any]:
    """Values of a test's parameter ``family``: the families that have these features on a CPU in float32.

    Args:
        sweep: The mark of all but the representatives.
    """
    return [
        pytest.param(name, marks=() if name in REPRESENTATIVES else sweep)
        for name, family in FAMILIES.items()
        if all(family.limit(feature, "cpu", "float32") is None for feature in features)
    ]


def has(family: str, feature: str, precision: str = "float32") -> bool:
    """True if a family has a feature on a CPU."""
    return FAMILIES[family].limit(cast(Feature, feature), "cpu", precision) is None


def stored_results() -> Results:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def stored_pairs() -> Pairs:
    return json.loads(PAIRS.read_text()) if PAIRS.exists() else {}


def is_test(name: str) -> bool:
    """True if a test such as ``tests/x.py::test_y`` exists."""
    file, _, function = name.partition("::")
    path = TESTS.parent / file
    return path.is_file() and f"def {function}(" in path.read_text()


def note(item: pytest.Item) -> None:
    """Write down what a test proves, in a form that reaches the process that collects the results."""
    for mark in item.iter_markers("proves"):
        values = getattr(item, "callspec", None)
        family = mark.kwargs.get("family") or (values.params["family"] if values else None)
        assert family in FAMILIES and set(mark.args) <= FEATURES.keys(), f"{item.nodeid} proves {mark}"
        tier = next((tier for tier in ("slow", "full") if item.get_closest_marker(tier)), "short")
        # A test of a limited family may go another way, with the other sampler, and then proves less.
        proven = [each for each in mark.args if has(family, each, mark.kwargs.get("precision", "float32"))]
        item.user_properties += [("proves", (family, feature, tier)) for feature in proven]


class Notary:
    """Collects the outcomes of a run's proofs, and at the end stores them beside those of other runs."""

    def __init__(self) -> None:
        self._found: Results = {}
        self._pairs: Pairs = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        for name, value in report.user_properties:
            if name == "proves":
                self._add(report.nodeid.partition("[")[0], report.outcome, *value)  # type: ignore[misc]
            if name == "pairs":
                family, differences = cast("tuple[str, dict[str, float]]", value)
                self._pairs[family] = {of: float(f"{most:.1e}") for of, most in differences.items()}

    def _add(self, test: str, outcome: str, family: str, feature: str, tier: str) -> None:
        """The worst outcome of all values of a test's other parameters counts; a skip is none."""
        known = self._found.setdefault(family, {}).setdefault(feature, {}).setdefault(test, {})
        known[tier] = max(known.get(tier, outcome), outcome, key=OUTCOMES.index)

    def pytest_sessionfinish(self) -> None:
        RESULTS.write_text(json.dumps(merged(stored_results(), self._found), indent=1) + "\n")
        pairs = stored_pairs() | self._pairs
        PAIRS.write_text(json.dumps({name: pairs[name] for name in FAMILIES if name in pairs}, indent=1) + "\n")


def merged(stored: Results, found: Mapping[str, Any]) -> Results:
    """Stored results with newer ones, of families and tests that exist, in the order of the record."""
    whole: Results = {}
    for family in FAMILIES:
        for feature in FEATURES:
            older, newer = (each.get(family, {}).get(feature, {}) for each in (stored, found))
            tests = {test: older.get(test, {}) | newer.get(test, {}) for test in sorted({*older, *newer})}
            if tests := {test: tiers for test, tiers in tests.items() if is_test(test)}:
                whole.setdefault(family, {})[feature] = tests
    return whole


def proving_tests(results: Results, family: str, feature: str) -> Sequence[str]:
    """The tests that passed and prove a feature; none if one of them failed."""
    tests = results.get(family, {}).get(feature, {})
    outcomes = {test: set(tiers.values()) for test, tiers in tests.items()}
    if any("failed" in found for found in outcomes.values()):
        return []
    return [test for test, found in outcomes.items() if "passed" in found]
