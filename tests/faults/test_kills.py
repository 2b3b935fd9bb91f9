"""The short form of ``kill_sweep``: runs are killed and signalled, go on, and equal those that were left alone."""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mmrl.rollout.records import read_rollouts
from tests.faults.comparison import metrics
from tests.faults.harness import Blow, Nursery
from tests.faults.kill_sweep import (
    BEHIND,
    COMPARED,
    CRITICS,
    EPISODES,
    FAKE,
    PARTS,
    REAL,
    REAL_BEHIND,
    REAL_PARTS,
    RESET,
    SCORED,
    Sweep,
    write_config,
)
from tests.warm_workers import Template

SAVING = {"checkpoint.begin", "save.shard", "save.part", "save.state", "checkpoint.filled", "checkpoint.sealed",
          "checkpoint.renamed", "checkpoint.pruning", "directory.replacing",
          "rollouts.begin", "rollouts.filled", "rollouts.renamed",
          "evaluations.begin", "evaluations.filled", "evaluations.renamed"}  # fmt: skip
THINNING = {"checkpoint.thinning", "checkpoint.thinned"}
"""Where only the newest checkpoint has the optimizer's state."""


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory, models: Callable[[str], Path]) -> Iterator[Nursery]:
    """The parent of runs with the fake engine."""
    with Nursery(tmp_path_factory.mktemp("fakes"), models("qwen2")) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def real(warm_engines: Template, models: Callable[[str], Path]) -> Callable[[Path], Nursery]:
    """Makes the parent of runs with real engines, with its logs in a folder."""
    return lambda folder: Nursery(folder, models("qwen2"), real=True, template=warm_engines)


@pytest.fixture(scope="module")
def sweeps(fakes: Nursery, tmp_path_factory: pytest.TempPathFactory, models: Callable[[str], Path]) -> dict[str, Sweep]:
    """By the algorithm's name; each has trained without a break."""
    folder = tmp_path_factory.mktemp("sweep")
    found = {name: Sweep(fakes, write_config(folder, models("qwen2"), name, FAKE[name])) for name in FAKE}
    for sweep in found.values():
        sweep.begin(is_slow=True)
        assert not sweep.failures
    return found


def check(sweep: Sweep, *blows: Blow, cold: bool = False) -> int:
    struck = sweep.chain(blows, cold=cold)
    failures, sweep.failures[:] = list(sweep.failures), []
    assert not failures, "\n".join(failures)
    return struck


@pytest.mark.full
def test_a_kill_at_any_point_of_saving_and_then_at_another_changes_nothing(sweeps: dict[str, Sweep]) -> None:
    """The second one is in the attempt that goes on from what the first one has left."""
    rng = np.random.default_rng(3)
    reached = {name: Counter(sweep.points) for name, sweep in sweeps.items()}
    assert set(reached["grpo"]) >= SAVING and set(reached["dapo"]) >= THINNING
    points: dict[str, list[str]] = {name: [] for name in sweeps}
    for turn, point in enumerate(sorted(SAVING | THINNING)):
        name = "dapo" if point in THINNING else list(sweeps)[turn % len(sweeps)]
        points[name if reached[name][point] else "grpo"].append(point)
    for name, own in points.items():
        for first, *second in (own[start : start + 2] for start in range(0, len(own), 2)):
            nth = int(rng.integers(1, reached[name][first] // 2 + 2))
            blows = [Blow(at=("point", first, nth)), *(Blow(at=("point", point, 1)) for point in second)]
            assert check(sweeps[name], *blows) == len(blows)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "grpo" else pytest.mark.slow) for name in FAKE]
)
def test_a_kill_before_any_line_changes_nothing(sweeps: dict[str, Sweep], name: str) -> None:
    """The later one is in the attempt that goes on from the first one's checkpoint."""
    sweep, rng = sweeps[name], np.random.default_rng(len(name))
    early, late = (int(share * sweep.lines) for share in rng.uniform([0.1, 0.05], [0.7, 0.2]))
    assert check(sweep, Blow(at=("line", early)), Blow(at=("line", late))) == 2


@pytest.mark.parametrize(
    ("number", "name"),
    [
        pytest.param(signal.SIGTERM, "dapo", marks=pytest.mark.full),
        pytest.param(signal.SIGUSR1, "remax", marks=pytest.mark.slow),
        (signal.SIGINT, "grpo"),
    ],
)
def test_a_signal_ends_a_run_with_its_exit_code_and_nothing_is_lost(
    sweeps: dict[str, Sweep], number: signal.Signals, name: str
) -> None:
    """The code is checked for each blow."""
    sweep = sweeps[name]
    assert check(sweep, Blow(number, ("line", int(np.random.default_rng(number).uniform(0.2, 0.9) * sweep.lines))))


def test_a_second_signal_ends_a_run_at_once(sweeps: dict[str, Sweep]) -> None:
    sweep = sweeps["grpo"]
    check(sweep, Blow(signal.SIGTERM, ("handler", sweep.seconds * 0.6), again=0.01))


def test_the_best_checkpoint_is_that_of_the_best_evaluation(sweeps: dict[str, Sweep]) -> None:
    """Also if that is the last one, after which no other checkpoint is written."""
    run = sweeps["grpo"].unbroken
    found = {
        step: values["eval/letters_mean"] for step, values in metrics(run).items() if "eval/letters_mean" in values
    }
    best = max(found, key=found.__getitem__)
    assert best == max(found), "the last evaluation must be the best for this test"
    assert (run / "checkpoints" / "best").readlink() == Path(f"step-{best:06d}")


@pytest.mark.slow  # test_branches.py has episodes that are killed
@pytest.mark.parametrize("name", ["refilled", "episodes"])
def test_episodes_repeat_whatever_their_tools_take_also_after_four_kills(
    fakes: Nursery, tmp_path: Path, models: Callable[[str], Path], name: str
) -> None:
    sweep = Sweep(fakes, write_config(tmp_path, models("qwen2"), name, EPISODES[name]))
    sweep.begin()
    assert not sweep.failures, "\n".join(sweep.failures)
    played = [rollout.rollout.episode for rollout in read_rollouts(sweep.unbroken)]
    assert {len(turns) for turns in played} > {1, 3} and any(turns[-1].done for turns in played)
    if name == "refilled":
        assert any(values.get("rollout/rounds", 0) > 1 for values in metrics(sweep.unbroken).values())
    waits = {two.began - one.finished for turns in played for one, two in pairwise(turns)}
    assert waits and min(waits) == 3, "answers are read after environment.latency_steps"
    points = (("rollouts.begin", 1), ("checkpoint.renamed", 2), ("rollouts.renamed", 1))
    blows = [Blow(at=("point", *point)) for point in points]
    assert check(sweep, *blows, Blow(at=("s", 0.2 * sweep.seconds))) == 4


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name == "behind" else pytest.mark.slow) for name in BEHIND]
)
def test_a_kill_of_a_run_whose_sampler_is_behind_changes_nothing(
    fakes: Nursery, tmp_path: Path, models: Callable[[str], Path], name: str
) -> None:
    """In the thread that samples; while weights are published; between two updates; while a checkpoint is written, and
    before it is complete; and by a signal, which waits for the batches of the last whole step."""
    sweep = Sweep(fakes, write_config(tmp_path, models("qwen2"), name, BEHIND[name]))
    sweep.begin()
    assert not sweep.failures, "\n".join(sweep.failures)
    points = ("fake.sample", 18), ("fake.publish", 2), ("fake.update", 1), ("checkpoint.filled", 1), ("save.part", 1)
    blows = [Blow(at=("point", *point)) for point in points]
    assert check(sweep, *blows) == len(blows)
    lines = np.random.default_rng(7).uniform(0.3, 0.9, 2) * sweep.lines
    assert check(sweep, *(Blow(signal.SIGTERM, ("line", int(line))) for line in sorted(lines)[:1]))
    assert check(sweep, Blow(signal.SIGTERM, ("point", "fake.sample", 21)), Blow(at=("line", int(lines[1] / 2))))


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_a_kill_of_a_run_that_samples_in_parts_changes_nothing(
    fakes: Nursery, tmp_path: Path, models: Callable[[str], Path], name: str
) -> None:
    """While parts are written, at their cut, between two updates, while a checkpoint is written, and after it; and by
    signals."""
    sweep = Sweep(fakes, write_config(tmp_path, models("qwen2"), name, PARTS[name]))
    sweep.begin()
    assert not sweep.failures, "\n".join(sweep.failures)
    points = ("fake.step", 40), ("fake.cut", 2), ("fake.update", 2), ("save.part", 1), ("checkpoint.renamed", 1)
    blows = [Blow(at=("point", *point)) for point in points]
    assert check(sweep, *blows) == len(blows)
    assert check(sweep, *(Blow(signal.SIGTERM, ("point", *point)) for point in (("fake.step", 20), ("fake.cut", 1))))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name == "dpo" else pytest.mark.slow) for name in COMPARED]
)
def test_a_kill_at_each_stage_of_a_run_on_candidates_changes_nothing(
    fakes: Nursery, tmp_path: Path, models: Callable[[str], Path], name: str
) -> None:
    """While data are read; between an evaluation and the next update; between a step's two updates; while a checkpoint
    is written; before its seal; and after it, before its step is logged."""
    sweep = Sweep(fakes, write_config(tmp_path, models("qwen2"), name, COMPARED[name]))
    sweep.begin(is_slow=True)
    assert not sweep.failures, "\n".join(sweep.failures)
    blows = [Blow(at=("line", int(0.03 * sweep.lines)))]
    points = ("evaluations.renamed", 2), ("fake.update", 2), ("save.part", 1), ("checkpoint.filled", 2)
    blows += [Blow(at=("point", *point)) for point in (*points, ("checkpoint.renamed", 1))]
    assert check(sweep, *blows) == len(blows)
    (*_, last) = metrics(sweep.unbroken).values()
    assert last["eval/accuracy"] > 0.5 and last["loss/preference"] < math.log(2)


@pytest.mark.slow
def test_a_kill_of_real_engines_changes_nothing(
    tmp_path: Path, models: Callable[[str], Path], real: Callable[[Path], Nursery]
) -> None:
    with real(tmp_path) as nursery:
        sweep = Sweep(nursery, write_config(tmp_path, models("qwen2"), "real", REAL))
        sweep.begin(is_slow=True)
        assert check(sweep, Blow(at=("point", "save.state", 4)), Blow(at=("s", sweep.seconds * 0.8)))
        assert check(sweep, Blow(signal.SIGTERM, ("handler", 2.0)), cold=True)


@pytest.mark.slow
def test_a_kill_of_real_engines_that_sample_in_parts_changes_nothing(
    tmp_path: Path, models: Callable[[str], Path], real: Callable[[Path], Nursery]
) -> None:
    """After a step that no checkpoint has, with completions in the middle."""
    with real(tmp_path) as nursery:
        sweep = Sweep(nursery, write_config(tmp_path, models("qwen2"), "parts", REAL_PARTS))
        sweep.begin(is_slow=True)
        assert not sweep.failures, "\n".join(sweep.failures)
        assert check(sweep, Blow(at=("point", "rollouts.begin", 3))) == 1


@pytest.mark.slow
def test_a_kill_of_real_engines_of_which_the_sampler_is_behind_changes_nothing(
    tmp_path: Path, models: Callable[[str], Path], real: Callable[[Path], Nursery]
) -> None:
    """While both sides work; within a checkpoint, which holds a batch; and by a signal."""
    with real(tmp_path) as nursery:
        sweep = Sweep(nursery, write_config(tmp_path, models("qwen2"), "behind", REAL_BEHIND))
        sweep.begin(is_slow=True)
        assert not sweep.failures, "\n".join(sweep.failures)
        points = ("rollouts.begin", 3), ("checkpoint.filled", 1), ("rollouts.renamed", 2)
        assert check(sweep, *(Blow(at=("point", *point)) for point in points)) == 3
        assert check(sweep, Blow(signal.SIGTERM, ("point", "rollouts.begin", 4)))


@pytest.mark.slow
@pytest.mark.parametrize("name", RESET)
def test_a_kill_of_real_engines_between_a_reset_and_the_next_checkpoint_changes_nothing(
    tmp_path: Path, models: Callable[[str], Path], real: Callable[[Path], Nursery], name: str
) -> None:
    """In step 3, after the reset of step 2; in step 5, so that the run goes on from a reference that is no checkpoint's
    policy; and within the checkpoint after the reset of step 6."""
    with real(tmp_path) as nursery:
        sweep = Sweep(nursery, write_config(tmp_path, models("qwen2"), name, RESET[name]))
        sweep.begin(is_slow=True)
        assert not sweep.failures, "\n".join(sweep.failures)
        weights = Path("model", "adapter_model.safetensors" if "lora" in name else "model.safetensors")
        six, seven = (sweep.unbroken / "checkpoints" / f"step-00000{step}" for step in (6, 7))
        reference, *policies = ((folder / weights).read_bytes() for folder in (seven / "reference", six, seven))
        assert [each == reference for each in policies] == [True, False]
        points = ("rollouts.begin", 3), ("rollouts.begin", 5), ("checkpoint.filled", 1)
        assert check(sweep, *(Blow(at=("point", *point)) for point in points)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORED)
def test_a_kill_of_a_real_reward_model_changes_nothing(
    tmp_path: Path, models: Callable[[str], Path], real: Callable[[Path], Nursery], name: str
) -> None:
    """Between two steps, within a checkpoint and after one."""
    with real(tmp_path) as nursery:
        sweep = Sweep(nursery, write_config(tmp_path, models("qwen2"), name, SCORED[name]))
        sweep.begin(is_slow=True)
        assert not sweep.failures, "\n".join(sweep.failures)
        last = sweep.unbroken / "checkpoints/step-000005"
        assert {path.name for path in (last / "reward").iterdir()} == {"model", "state"} and not (
            last / "model"
        ).exists()
        points = ("rollouts.begin", 2), ("save.shard", 1), ("checkpoint.filled", 1)
        assert check(sweep, *(Blow(at=("point", *point)) for point in points)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", CRITICS)
def test_a_kill_of_real_engines_with_two_networks_changes_nothing(
    tmp_path: Path, models: Callable[[str], Path], real: Callable[[Path], Nursery], name: str
) -> None:
    """Between the states of the two in the first checkpoint; in the step after which the policy begins to learn; and
    between an optimizer step and the checkpoint."""
    with real(tmp_path) as nursery:
        sweep = Sweep(nursery, write_config(tmp_path, models("qwen2"), name, CRITICS[name]))
        sweep.begin(is_slow=True)
        assert not sweep.failures, "\n".join(sweep.failures)
        last = sweep.unbroken / "checkpoints/step-000005"
        assert {path.name for path in last.iterdir()} == {"manifest.json", "model", "state", "critic"}
        found = metrics(sweep.unbroken)
        for name, steps in (("loss/total", [3, 4, 5]), ("critic/loss", [1, 2, 3, 4, 5])):
            assert [step for step, values in found.items() if name in values] == steps
        points = ("save.state", 2), ("rollouts.begin", 1), ("checkpoint.filled", 2)
        assert check(sweep, *(Blow(at=("point", *point)) for point in points)) == 3
