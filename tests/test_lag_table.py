"""The table of algorithms on tokens of older weights is what its script writes, and the script tells them apart."""

from __future__ import annotations

from typing import Any

import pytest

from mmrl.config.load import from_mapping
from mmrl.errors import ConfigError
from mmrl.plugin_host import registry
from mmrl.runs.asynchrony import check_asynchrony
from mmrl.step.gather import SOURCES
from mmrl_algorithms.dapo import DAPO
from tests.lag_table import ASKED, HEAD, WRITTEN, page, refusal, row, rows


def test_the_page_is_what_the_script_writes() -> None:
    assert WRITTEN.read_text() == page(WRITTEN.read_text()), "run python -m tests.lag_table"


def test_every_algorithm_of_this_repository_has_a_line() -> None:
    own = [info.name for info in registry.list_plugins() if info.target.startswith("mmrl_algorithms.")]
    found = [each[0].partition(",")[0].strip("`") for each in rows()]
    assert set(found) == set(own) and len(HEAD) == {len(each) for each in rows()}.pop()


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("grpo", ("exact", "corrected", "corrected", "of tokens, clipped", "")),
        ("gspo", ("exact", "corrected", "corrected", "of completions, clipped", "")),
        ("sapo", ("exact", "corrected", "corrected", "of tokens, fading", "")),
        ("raft", ("exact", "corrected", "corrected", "none", "")),
        ("ppo", ("exact", "corrected", "corrected", "of tokens, clipped", "the critic's returns")),
        ("reinforce_pp_baseline", ("exact", "corrected", "corrected", "of tokens, clipped", "its term `kl`")),
        ("sft", ("samples nothing", "refused", "refused", "", "")),
    ],
)
def test_algorithms_of_each_kind_are_told_apart(name: str, cells: tuple[str, ...]) -> None:
    assert row(name, {})[1:] == cells


def test_a_selection_with_a_state_is_refused_with_a_lag_alone() -> None:
    lag, partial = ASKED
    plain: Any = registry.given("algorithm", "dapo", {})
    steered = registry.given("algorithm", "dapo", {"kl": {"coef": 0.1, "target": 0.01}})
    assert not refusal(plain, lag) and "selects groups and has a state" in refusal(steered, lag)
    assert not refusal(steered, partial)

    class Remembers(DAPO):
        """Its state is empty before the first step."""

        def state(self) -> dict[str, Any]:
            return {}

    assert "selects groups and has a state" in refusal(Remembers(plain.config), lag)


def test_steps_that_sample_nothing_are_told_what_is_possible_in_place_of_what_was_asked() -> None:
    given: Any = registry.given("algorithm", "sft", {})
    split = {"cluster": {"name": "ray", "sampler_ranks": 2, "learner_ranks": 1}}
    for asked, possible in ((split, "cluster.ranks: 3"), (ASKED[1], "sampler.partial: null")):
        data = {"train": {"name": "table"}}
        config = from_mapping({"model": {"path": "m"}, "data": data, "algorithm": {"name": "sft"}, **asked})
        with pytest.raises(ConfigError) as caught:
            check_asynchrony(config, given, given.needs(), SOURCES[given.source])
        assert caught.value.possible == possible
