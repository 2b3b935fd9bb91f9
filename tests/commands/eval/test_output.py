"""What an evaluation keeps in its folder, without a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mmrl
from mmrl.commands.eval.output import OutputFolder, Samples
from mmrl.errors import ConfigError, DataError
from mmrl.rollout.rewards.failures import Failure
from mmrl.testing.rollouts import make_rollouts
from mmrl.types import RolloutGroup, ScoredGroup


def scored(question: str) -> ScoredGroup:
    rollouts = make_rollouts(["7", "8"], question=question)
    values = np.array([1.0, 0.0])
    return ScoredGroup(
        RolloutGroup(rollouts[0].prompt, tuple(rollouts)), values, np.ones(2, np.bool_), {"exact": values}
    )


def test_a_group_in_which_a_reward_had_failed_is_asked_for_again(tmp_path: Path) -> None:
    right, failed = scored("a"), scored("b")
    prompts = [group.group.prompt for group in (right, failed)]
    samples = Samples(tmp_path / "samples.jsonl", prompts, 2, tmp_path)
    samples.keep(right, [])
    samples.keep(failed, [Failure("exact", failed.group.rollouts[1], "hung")])
    assert list(Samples(tmp_path / "samples.jsonl", prompts, 2, tmp_path).known) == ["a"]


def test_a_folder_is_read_from_python_during_the_evaluation_and_after_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no evaluation"):
        mmrl.load_evaluation(tmp_path)
    groups = [scored("a"), scored("b")]
    prompts = [group.group.prompt for group in groups]
    with OutputFolder(tmp_path / "out") as output:
        output.claim({"samples": 2})
        found = mmrl.load_evaluation(output.path)
        assert found.is_live and found.settings == {"samples": 2} and found.results == {}
        with pytest.raises(DataError, match="has recorded no completions with blank images"):
            found.rollouts(blank=True)
        samples = Samples(output.path / "samples.jsonl", prompts, 2, output.media)
        samples.keep(groups[1], [])
        assert [(each.text, each.rewards) for each in found.rollouts()] == [("7", {"exact": 1}), ("8", {"exact": 0})]
        samples.keep(groups[0], [])
        output.write_results({"model": "models/a"})
    assert not found.is_live and found.results == {"model": "models/a"}
    index = found.groups().index(("prompt_id",), ("reward",))
    assert [(each.of_group["prompt_id"], each.of_rollouts["reward"]) for each in index] == [
        (prompt.id, [1.0, 0.0]) for prompt in reversed(prompts)
    ]
    (output.path / "settings.json").write_text("{")
    with pytest.raises(DataError, match="a file of the evaluation cannot be read"):
        _ = mmrl.load_evaluation(output.path).settings
