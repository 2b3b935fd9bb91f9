"""The table of families is what its script writes, and each proof in it is a test that exists and says so."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmrl.engine.network.family import FAMILIES, Family
from mmrl.engine.network.features import FEATURES, Limit
from tests import proofs
from tests.family_table import PAIRS, STATEMENTS, WRITTEN, cell, page
from tests.proofs import REPRESENTATIVES, families, is_test, merged, proving_tests, stored_pairs, stored_results

ROOT = Path(__file__).parents[1]


def cells(text: str) -> dict[str, dict[str, str]]:
    """The table's cells by family and head."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    head = rows[0]
    return {row[0].strip("`"): dict(zip(head, row, strict=True)) for row in rows[2 : 2 + len(FAMILIES)]}


def test_the_page_is_what_the_script_writes() -> None:
    assert WRITTEN.read_text() == page(stored_results(), stored_pairs()), "run python -m tests.family_table"


def test_every_family_has_a_line_with_every_feature() -> None:
    found = cells(WRITTEN.read_text())
    assert found.keys() == FAMILIES.keys() and STATEMENTS.keys() == FEATURES.keys()
    for name, family in FAMILIES.items():
        assert found[name].keys() == {"family", "models", *FEATURES.values()}
        for feature, title in FEATURES.items():
            limit = family.all_limits.get(feature)
            text = found[name][title]
            proven = r"proven \([\d, ]+\)"
            allowed = rf"{re.escape(str(limit))}(; else {proven})?" if limit else rf"{proven}|not proven"
            assert re.fullmatch(allowed, text), (name, title)


def test_packed_pairs_of_every_family_are_measured_and_equal_to_unpacked_ones() -> None:
    found = stored_pairs()
    assert list(found) == list(FAMILIES)
    assert {of for differences in found.values() for of in differences} == {"loss", "log-probs", "gradient"}
    assert max(most for differences in found.values() for most in differences.values()) < 1e-5
    [(file, test)], [other] = re.findall(r"`(tests/\S+)::(\w+)`", PAIRS), re.findall(r"`::(\w+)`", PAIRS)
    assert is_test(f"{file}::{test}") and is_test(f"{file}::{other}")


def declared(test: str) -> set[str]:
    """The features that a test's decorators, or those of its parameters, say that it proves."""
    file, _, function = test.partition("::")
    (found,) = [
        node
        for node in ast.parse((ROOT / file).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    calls = [node for decorator in found.decorator_list for node in ast.walk(decorator) if isinstance(node, ast.Call)]
    marks = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "proves"]
    return {ast.literal_eval(argument) for mark in marks for argument in mark.args}


def test_every_proof_is_a_test_that_exists_and_says_what_it_proves() -> None:
    results = stored_results()
    assert results.keys() <= FAMILIES.keys()
    for family, features in results.items():
        for feature in features:
            for test in proving_tests(results, family, feature):
                assert feature in declared(test), (family, feature, test)


def test_a_failure_anywhere_takes_a_proof_back_and_a_skip_is_none() -> None:
    test = "tests/test_family_table.py::test_the_page_is_what_the_script_writes"
    results = {"llama": {feature: {test: outcomes} for feature, outcomes in {
        "hf": {"short": "passed", "slow": "failed"}, "lora": {"full": "skipped"}, "zero_3": {"slow": "passed"},
    }.items()}}  # fmt: skip
    found = {feature: cell(FAMILIES["llama"], feature, results, {test: 7}) for feature in ("hf", "lora", "zero_3")}
    assert found == {"hf": "not proven", "lora": "not proven", "zero_3": "proven (7)"}
    other = Family("llama", "L", limits={"zero_3": Limit("refused", "never tried", "cpu")})
    assert cell(other, "zero_3", results, {test: 7}) == "refused on a CPU: never tried"
    slim = replace(FAMILIES["llama"], limits={"zero_3": Limit("refused", "no kernel", "cpu", "float32")})
    found = cell(slim, "zero_3", results, {test: 7})
    assert found == "refused on a CPU in float32: no kernel; else proven (7)"  # by a test in bfloat16
    newer = merged(results, {"llama": {"hf": {test: {"slow": "passed"}, "tests/none.py::test_gone": {}}}, "none": {}})
    assert newer["llama"]["hf"] == {test: {"short": "passed", "slow": "passed"}} and newer.keys() == {"llama"}


def test_families_that_lack_a_feature_are_left_out_and_representatives_are_in_every_tier() -> None:
    reading = [name for name, family in FAMILIES.items() if family.vision]
    assert [parameter.values[0] for parameter in families("vision_once")] == reading
    short = {parameter.values[0] for parameter in families() if not parameter.marks}
    assert short == set(REPRESENTATIVES) <= FAMILIES.keys()
    assert {parameter.marks[0].name for parameter in families(sweep=pytest.mark.slow) if parameter.marks} == {"slow"}


def test_outcomes_are_stored_beside_those_of_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = "tests/test_family_table.py::test_the_page_is_what_the_script_writes"
    monkeypatch.setattr(proofs, "RESULTS", tmp_path / "families.json")
    monkeypatch.setattr(proofs, "PAIRS", tmp_path / "family_pairs.json")
    (tmp_path / "family_pairs.json").write_text('{"llama": {"loss": 2e-06}, "qwen2": {"loss": 1.0}}')

    def run(*reports: tuple[str, str, str, str]) -> dict[str, str]:
        notary = proofs.Notary()
        for value, when, outcome, tier in reports:
            proves = [["proves", ["qwen2", "hf", tier]], ["other", 1], ["pairs", ["qwen2", {"loss": 1.2345e-6}]]]
            report = SimpleNamespace(nodeid=f"{test}[{value}]", when=when, outcome=outcome, user_properties=proves)
            notary.pytest_runtest_logreport(report)
        notary.pytest_sessionfinish()
        return json.loads((tmp_path / "families.json").read_text())["qwen2"]["hf"][test]

    passed = [("a", "setup", "passed", "short"), ("a", "call", "passed", "short"), ("a", "teardown", "passed", "short")]
    assert run(*passed) == {"short": "passed"}
    assert run(("a", "setup", "failed", "slow"), ("b", "call", "passed", "slow"))["slow"] == "failed"
    found = run(("a", "call", "skipped", "slow"), ("b", "call", "passed", "slow"))
    assert found == {"short": "passed", "slow": "passed"}
    assert stored_pairs() == {"qwen2": {"loss": 1.2e-06}, "llama": {"loss": 2e-06}}


def test_what_a_test_proves_goes_with_its_family_and_tier_unless_the_family_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limited = replace(FAMILIES["llama"], limits={"vllm": Limit("refused", "not built", "cpu")})
    monkeypatch.setattr(proofs, "FAMILIES", {**FAMILIES, "llama": limited})

    def noted(parameter: str, *marks: str, **named: str) -> list[Any]:
        mark = pytest.mark.proves("hf", "vllm", **named).mark
        item = SimpleNamespace(
            iter_markers=lambda name: [mark],
            get_closest_marker=lambda name: name in marks,
            callspec=SimpleNamespace(params={"family": parameter}),
            user_properties=[],
            nodeid="a test",
        )
        proofs.note(item)
        return [values for _, values in item.user_properties]

    assert noted("qwen2", "full") == [("qwen2", "hf", "full"), ("qwen2", "vllm", "full")]
    assert noted("llama", "full", "slow") == [("llama", "hf", "slow")]
    assert noted("llama", family="qwen3") == [("qwen3", "hf", "short"), ("qwen3", "vllm", "short")]
    with pytest.raises(AssertionError, match="a test proves"):
        noted("mamba")
