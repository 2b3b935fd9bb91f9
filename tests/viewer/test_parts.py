"""Completions that were sampled in parts: the viewer tells which weights sampled which tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mmrl.types import CreditedGroup, Rollout
from mmrl.viewer.pages import Pages
from tests.viewer.browser import Viewer
from tests.viewer.made_run import make_run


def in_parts(group: CreditedGroup) -> CreditedGroup:
    """The group of which the first completion was cut after two tokens, and went on with weights 5 versions later."""
    first, *others = group.scored.rollouts
    if first.episode:
        return group
    whole = group.scored.group
    rollouts = (_cut(first), *others)
    return replace(group, scored=replace(group.scored, group=replace(whole, rollouts=rollouts)))


def _cut(rollout: Rollout) -> Rollout:
    (segment,) = rollout.segments
    parts = [
        replace(segment, token_ids=segment.token_ids[some], sampler_logprobs=segment.sampler_logprobs[some])
        for some in (slice(None, 2), slice(2, None))
    ]
    later = rollout.weight_version + 5
    before = replace(parts[0], weight_version=rollout.weight_version)
    after = replace(parts[1], weight_version=later, continues=True)
    return replace(rollout, segments=(before, after), weight_version=later)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path]:
    return (make_run(tmp_path_factory.mktemp("parts") / "run", credited=in_parts),)


def test_tokens_of_several_versions_have_theirs(runs: tuple[Path]) -> None:
    pages = Pages(runs)
    first, second = pages.document("run/0/step/2/group/0")["members"][:2]
    count = len(first["tokens"]["ids"])
    assert first["tokens"]["version"] == [1, 1, *[6] * (count - 2)] and count > 2
    assert "version" not in second["tokens"], "one version is told for the whole completion"
    assert second["weight_version"] == 1


def test_an_episode_of_one_version_has_none_of_its_tokens(runs: tuple[Path]) -> None:
    members = Pages(runs).document("run/0/step/2/group/3")["members"]
    assert all("version" not in each["tokens"] for each in members)


def test_a_mark_stands_where_other_weights_begin(viewer: Viewer) -> None:
    viewer.open("run/0/step/2/group/0?member=0&view=tokens")
    assert viewer.texts(".version-mark") == ["v1", "v6"]
    order = "return [...document.querySelector('.tokens').children].map((each) => each.dataset.at ?? each.textContent)"
    assert viewer.script(order)[:4] == ["v1", "0", "1", "v6"]
    viewer.script("document.querySelector('.token[data-at=\"2\"]').focus()")
    assert "weightsversion 6" in viewer.text(".token-details")
    viewer.open("run/0/step/2/group/0?member=1&view=tokens")
    assert viewer.count(".version-mark") == 0
