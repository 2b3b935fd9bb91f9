"""What an evaluation tells of episodes: numbers by hand, the printed table, and rows that a continued one reads."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmrl.commands.eval.episodes import episode_estimates
from mmrl.commands.eval.output import Samples
from mmrl.commands.eval.results import Results
from mmrl.data.images import ImageGrid, MediaStore
from mmrl.testing.rollouts import make_rollouts
from mmrl.types import Call, FinishReason, PlayedTurn, RawImage, Rollout, RolloutGroup, ScoredGroup, Segment, Turn


def episode(rollout: Rollout, errors: list[list[str]], observed: int, reason: FinishReason) -> Rollout:
    """An episode of as many turns as there are lists, each with a call for each error; empty is a call without one."""
    played, segments = [], []
    for index, of_turn in enumerate(errors):
        calls = tuple(Call("look", None if error else {}, error) for error in of_turn)
        played.append(PlayedTurn(Turn(f"turn {index}", calls, index, "stop", 9), ("seen",)))
        segments += [rollout.segments[0], Segment(np.zeros(observed, np.int32), False, np.zeros(observed, np.float32))]
    return replace(rollout, episode=tuple(played), segments=tuple(segments[:-1]), finish_reason=reason)


@pytest.fixture
def groups() -> list[ScoredGroup]:
    """Two prompts with two episodes each; one of them failed before its first turn."""
    found = []
    for question in ("a", "b"):
        one, other = make_rollouts(["7", "8"], question=question)
        first = episode(one, [["", "no JSON"], [""], []], 5, "environment")
        second = episode(other, [[""]], 5, "stop") if question == "a" else None
        failed = replace(other, segments=(), finish_reason="failed", failure="hung")
        values = np.array([1.0, 0.0])
        members = (first, second or failed)
        valid = np.array([True, second is not None])
        found.append(ScoredGroup(RolloutGroup(one.prompt, members), values, valid, {"exact": values}))
    return found


def test_turns_calls_and_ends_are_means_over_episodes(groups: list[ScoredGroup]) -> None:
    found = {name: estimate.value for name, estimate in episode_estimates(groups).items() if estimate.value}
    assert found == {
        "eval/episode/turns_mean": (3 + 1 + 3 + 0) / 4,
        "eval/episode/calls_mean": (3 + 1 + 3 + 0) / 4,
        "eval/episode/observation_tokens_mean": (10 + 0 + 10 + 0) / 4,
        "eval/episode/invalid_calls_fraction": 2 / 7,
        "eval/episode/finish_stop_fraction": 0.25,
        "eval/episode/finish_environment_fraction": 0.5,
        "eval/episode/finish_failed_fraction": 0.25,
    }
    rollouts = make_rollouts(["7"])
    plain = ScoredGroup(RolloutGroup(rollouts[0].prompt, tuple(rollouts)), np.ones(1), np.ones(1, bool), {})
    assert episode_estimates([plain]) == {}


def test_a_table_shows_them_and_no_end_that_never_came(groups: list[ScoredGroup]) -> None:
    metrics = episode_estimates(groups)
    settings = {"temperature": 0, "samples": 1, "dataset": "d", "seed": 0, "accuracy": "exact"}
    counts = {"prompts": 2, "unscored": 1, "dropped": 0}
    lines = list(Results("m", None, settings, counts, metrics, {"d": (2, metrics)}, None).lines())
    (place,) = [number for number, line in enumerate(lines) if line.startswith("episodes")]
    titles = ["episodes", "turns", "calls", "invalid calls", "observation tokens", "stop", "environment", "failed"]
    assert re.split(" {2,}", lines[place].strip()) == titles
    assert lines[place + 1].startswith("d ") and "0.286" in lines[place + 1]
    assert "turns_mean" not in lines[2]


def test_a_continued_evaluation_reads_its_episodes_and_plays_failed_ones_again(
    groups: list[ScoredGroup], tmp_path: Path
) -> None:
    prompts = [group.group.prompt for group in groups]
    samples = Samples(tmp_path / "samples.jsonl", prompts, 2, tmp_path)
    for group in groups:
        samples.keep(group, [])
    known = Samples(tmp_path / "samples.jsonl", prompts, 2, tmp_path).known
    assert list(known) == ["a"]
    assert [each.episode for each in known["a"].rollouts] == [each.episode for each in groups[0].rollouts]


def test_an_environment_is_given_no_picture_where_the_model_sees_none(tmp_path: Path) -> None:
    from mmrl.engine.text.encoding import Encoder

    file = io.BytesIO()
    Image.new("RGB", (90, 60), "red").save(file, "PNG")
    store, raw = MediaStore(tmp_path, ImageGrid(28, 3136, 50176)), RawImage(file.getvalue(), "x")
    prompt = replace(make_rollouts(["7"])[0].prompt, images=(store.add(raw),))
    encoder = Encoder.__new__(Encoder)  # without a model's folder, which blanking does not need
    encoder._media = store
    found = encoder.blanked(replace(prompt, prompt=replace(prompt.prompt, images=(raw,))))
    (given,) = found.prompt.images
    with Image.open(io.BytesIO(given.data)) as image:
        assert image.size == (90, 60) and image.getcolors() == [(90 * 60, (128, 128, 128))]
    assert found.images == (store.add(given),)
