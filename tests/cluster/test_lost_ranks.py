"""A rank is killed in the middle of a run on two nodes; the run goes on from its checkpoint and ends all the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.cluster.test_two_nodes import assert_seen_by_the_doctor, assert_trained, sent_files
from tests.faults.comparison import metrics

pytestmark = pytest.mark.full

DEADLY = '''\
"""An algorithm that kills its own rank once, at a point of the run."""

import os
import signal
from pathlib import Path

from mmrl.system import failpoints
from mmrl_algorithms.grpo import GRPO


class Deadly(GRPO):
    class Config(GRPO.Config):
        marker: str

    def __init__(self, config):
        super().__init__(config)
        self._left = 3  # in the second or third step, whatever the point
        if (place := os.environ.get("DEADLY")) is None:
            return
        point, rank = place.split(":")
        if os.environ.get("RANK") == rank:
            self._point, failpoints.inject = point, self._reach

    def loss(self, tokens):
        self._reach("loss")
        return super().loss(tokens)

    def _reach(self, point):
        if point != getattr(self, "_point", None):
            return
        self._left -= 1
        if not self._left and not Path(self.config.marker).exists():
            Path(self.config.marker).write_text(point)
            os.kill(os.getpid(), signal.SIGKILL)
'''


@pytest.fixture
def deadly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The algorithm's section, its package on the path of every process that is started."""
    site = tmp_path / "site"
    info = site / "deadly-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deadly\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[mmrl.algorithms]\ndeadly = deadly:Deadly\n")
    (site / "deadly.py").write_text(DEADLY)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    return {"name": "deadly", "marker": str(tmp_path / "marker")}


def assert_same(run: Path, unbroken: Path) -> None:
    """Weights, optimizer and metrics, bit for bit."""
    assert metrics(run) == metrics(unbroken)
    last = Path("checkpoints", "step-000003")
    states = {f"state/optimizer-{rank:05d}-00001.safetensors" for rank in range(2)}
    for name in ("model/model.safetensors", *states):
        found, expected = (load_file(path / last / name) for path in (run, unbroken))
        assert found.keys() == expected.keys()
        assert all((found[key] == expected[key]).all() for key in found), name


@pytest.mark.parametrize(
    ("place", "sampler"),
    [
        pytest.param("rank.advance:1", "vllm", id="in generation", marks=pytest.mark.slow),
        pytest.param("loss:1", "vllm", id="in the update", marks=pytest.mark.slow),
        pytest.param("loss:1", "hf", id="in the update, without vLLM"),
        pytest.param("save.shard:0", "vllm", id="in saving", marks=pytest.mark.slow),
    ],
)
def test_a_run_survives_the_death_of_a_rank(
    place: str,
    sampler: str,
    deadly: dict[str, Any],
    work: Path,
    household: Any,
    warm_mmrl: Callable[..., Any],
    start_cluster: Callable[[int, int], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second node sees none of the driver's files. The run that no rank leaves has forks as ranks."""
    monkeypatch.setenv("DEADLY", place)
    address = start_cluster(1, 1)
    settings = [f"algorithm.{key}={value}" for key, value in deadly.items()]
    settings += ["trainer.steps=3", "trainer.save_every=1", "trainer.max_restarts=1", f"sampler.name={sampler}"]
    settings += ["cluster.name=ray", "cluster.ranks=2", f"cluster.address={address}"]
    broken, unbroken = work / f"broken-{place}-{sampler}", work / f"unbroken-{place}-{sampler}"
    before = sent_files()
    result = household.run("train", "config.yaml", *settings, f"trainer.run_dir={broken}", folder=work)
    assert result.returncode == 0, result.stderr
    assert Path(deadly["marker"]).read_text() == place.partition(":")[0]
    events = [json.loads(line) for line in (broken / "events.jsonl").read_text().splitlines()]
    (restart,) = [event for event in events if event["kind"] == "restart"]
    assert re.match(r"rank \d is gone", restart["message"])  # the others may end with it
    attempts = [json.loads(line) for line in (broken / "attempts.jsonl").read_text().splitlines()]
    assert [attempt["exit_code"] for attempt in attempts if "exit_code" in attempt] == [5, 0]
    assert_trained(broken, 1, before)
    assert_seen_by_the_doctor(household, work, [*settings, f"trainer.run_dir={broken}"])
    name = f"algorithm.name={Path(deadly['marker']).with_name('site') / 'deadly.py'}:Deadly"
    others = [each for each in settings if not each.startswith(("algorithm.name", "cluster.address"))]
    again = warm_mmrl("train", "config.yaml", *others, name, f"trainer.run_dir={unbroken}", folder=work)
    assert again.returncode == 0, again.stderr
    assert_same(broken, unbroken)
