"""The table of token columns: its rows fit the records that plugins see, and a run's columns follow from its needs."""

from __future__ import annotations

import dataclasses

import pytest

from mmrl.interfaces import Needs
from mmrl.token_columns import COLUMNS
from mmrl.types import Batch, Credit, CreditedGroup, PackedTokens, PreUpdateStatistics, Sample

OF = {
    "by credit": (Credit, CreditedGroup),
    "sampled": (Sample, Batch),
    "before the step": (Batch, CreditedGroup),
    "before each update": (PreUpdateStatistics,),
}


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_every_column_is_a_typed_attribute_of_what_plugins_see(column):
    assert column.packed in PackedTokens.__annotations__
    for owner in OF[column.known]:
        name = column.credited if owner is CreditedGroup else column.name
        assert name in owner.__annotations__ or hasattr(owner, name)


def test_names_and_fields_of_records_are_those_of_one_column():
    for attribute in ("name", "record", "replayed", "packed"):
        names = [name for column in COLUMNS if (name := getattr(column, attribute))]
        assert len(set(names)) == len(names)


def test_a_need_is_a_field_of_needs():
    fields = {field.name for field in dataclasses.fields(Needs)}
    assert {column.need for column in COLUMNS} - {""} <= fields


@pytest.mark.parametrize(
    ("needs", "updates", "asked"),
    [
        (Needs(), 1, set()),
        (Needs(), 2, {"old_logprobs"}),
        (Needs(reference_logprobs=True), 1, {"reference_logprobs"}),
        (Needs(reference_logprobs=True, old_logprobs=True), 1, {"reference_logprobs", "old_logprobs"}),
        (Needs(values=True), 1, {"values", "returns", "vpreds"}),
        (Needs(reference_logprobs=True, values=True), 1, {"reference_logprobs", "values", "returns", "vpreds"}),
    ],
)
def test_columns_follow_from_needs_and_the_number_of_optimizer_steps(needs, updates, asked):
    names = {column.name for column in needs.columns(updates)}
    assert names == {"advantages", "sampler_logprobs", "logprobs", "entropy"} | asked
    roles = {"reference": "reference_logprobs" in asked, "critic": "values" in asked}
    assert needs.roles == ("policy", *(role for role, is_there in roles.items() if is_there))


def test_a_network_answers_one_column_before_the_step():
    """``Network.score`` has one answer, which learning and replay would take for both."""
    roles = [column.role for column in COLUMNS if column.known == "before the step"]
    assert len(set(roles)) == len(roles)
