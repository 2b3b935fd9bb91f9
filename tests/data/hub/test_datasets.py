"""Datasets on a hub: the revision that is asked for, or an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

LOAD = """
import json, sys
from mmrl.errors import MMRLError
from mmrl.data.hub import HubRepo
from mmrl_datasets.table import Table

for options in map(json.loads, sys.argv[1:]):
    try:
        if options.pop("only_resolve", False):
            answer = HubRepo("dataset", options["path"], options["revision"]).pinned().revision
        else:
            answer = [prompt.answer for prompt in Table(Table.Config(**options)).load()]
    except MMRLError as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer))
"""


@pytest.fixture
def load(python: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The answers of each dataset, given by its options, or the error."""

    def run(*options: dict[str, Any], **variables: str) -> list[Any]:
        done = python("-c", LOAD, *map(json.dumps, options), **variables)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.fixture
def data(hub: Any, sums: Any) -> Any:
    repo = hub.repo("datasets/org/sums")
    repo.push(sums([1]), "v1")
    repo.push(sums([2, 3]), "v2")
    return repo


@pytest.mark.full
def test_a_revision_gives_its_rows_or_an_error_but_no_others(load: Any, hub: Any, data: Any) -> None:
    first, second = {"path": "org/sums", "revision": "v1"}, {"path": "org/sums", "revision": "v2"}
    newest = {"path": "org/sums", "split": "train"}
    pinned = {"path": "org/sums", "revision": data.refs["v1"]}
    assert load(first, pinned, {**second, "only_resolve": True}) == [["2"], ["2"], data.refs["v2"]]

    hub.requests.clear()
    cached, other = load(first, second, HF_HUB_OFFLINE="1")
    assert cached == ["2"]  # datasets by itself gives these rows for v2, too
    assert other.startswith("HubUnreachableError: the cache has no data of this revision of dataset org/sums")
    assert hub.requests == []

    assert load(newest, second) == [["4", "6"], ["4", "6"]]


@pytest.mark.full
def test_offline_the_default_branch_is_not_the_revision_that_was_prepared_last(load: Any, data: Any) -> None:
    newest = {"path": "org/sums", "split": "train"}
    assert load(newest, {**newest, "revision": "v1"}) == [["4", "6"], ["2"]]
    (again,) = load(newest, HF_HUB_OFFLINE="1")
    assert again == ["4", "6"] or again.startswith("HubUnreachableError: the cache has no data of this revision"), again


def test_what_the_hub_refuses_is_an_error_that_says_what_to_do(load: Any, hub: Any, data: Any, sums: Any) -> None:
    for access in ("gated", "private"):
        hub.repo(f"datasets/org/{access}", access).push(sums([1]))
    hub.fail("GET /cdn/", 503, 1)
    nothing, revision, gated, private, split, fine = load(
        {"path": "org/nothing"},
        {"path": "org/sums", "revision": "v9"},
        {"path": "org/gated"},
        {"path": "org/private"},
        {"path": "org/sums", "split": "test"},
        {"path": "org/sums", "revision": "v1"},
    )
    assert nothing.startswith("HubError: the hub has no dataset org/nothing") and "a path here" in nothing
    assert revision.startswith("HubError: dataset org/sums has no revision v9")
    assert f"accept its licence at {hub.url}/datasets/org/gated" in gated
    assert "private" in private and "HF_TOKEN" in private
    assert split.startswith("DataError: There is no split 'test'") and "possible: train" in split
    assert fine == ["2"]
