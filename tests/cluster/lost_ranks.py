"""Two ranks of a Ray cluster that die and hang, one group after the other in one process.

    python lost_ranks.py MODEL ADDRESS SCENARIO...      # ADDRESS may be empty

Each group starts from what the one before it has saved after its first optimizer step, samples, and takes three steps
on what the first group has sampled. Prints one object per group, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.cluster.group import RankGroup
from mmrl.cluster.launch import start_engine
from mmrl.config.load import from_mapping
from mmrl.data.images import ImageGrid, MediaStore
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.spec import EngineSpec
from mmrl.engine_api import SamplingRequest
from mmrl.errors import RankLostError
from mmrl.types import EncodedPrompt, Prompt, RolloutGroup, TrainingRow
from mmrl_algorithms.grpo import GRPO

OOM_GROUP = Path("/sys/fs/cgroup/memory/mmrl-test-oom")
"""A control group of 4 MB; the kernel ends what needs more there."""
PROMPTS = [
    EncodedPrompt(prompt=Prompt(f"p{i}", ()), text="", token_ids=np.arange(20, 23 + i, dtype=np.int32), images=())
    for i in range(4)
]


class Lesson:
    """One group of ranks, and what is done to its rank 1."""

    def __init__(self, model: str, address: str, checkpoint: Path | None) -> None:
        config = from_mapping(
            {
                "model": {"path": model, "dtype": "float32"},
                "data": {"train": {"name": "table"}, "max_prompt_tokens": 64},
                "algorithm": {"name": "grpo"},
                "sampler": {"name": "hf", "group_size": 2, "max_new_tokens": 8},
                "learner": {"lr": 1e-2, "zero_stage": 3},
                "cluster": {"name": "ray", "ranks": 2, "address": address or None},
            }
        )
        media = MediaStore(Path("run/media").absolute(), ImageGrid(28, 3136, 50176))
        folder, algorithm = ModelFolder.open(model), GRPO(GRPO.Config())
        engine = start_engine(EngineSpec(config, folder, media, algorithm, 0, True, checkpoint))
        assert isinstance(engine, RankGroup)
        self.engine = engine
        self.ranks: list[dict[str, Any]] = list(engine.describe()["ranks"])
        self.moment = 0.0

    def sample(self, tokens: int = 8) -> list[RolloutGroup]:
        requests = [SamplingRequest(prompt, 2, 1.0, tokens, seed=10 * i) for i, prompt in enumerate(PROMPTS)]
        with self.engine.sampling() as sampler:
            found = dict(sampler.generate(requests))
        return [found[index] for index in range(len(PROMPTS))]

    def update(self, groups: list[RolloutGroup]) -> tuple[float, float]:
        """The sum of the log-probs before the step, and the gradient's norm."""
        samples = [rollout for group in groups for rollout in group.rollouts]
        rows = [
            TrainingRow(s, 1 / 8, s.mask, {"advantages": np.where(s.mask, i - 3.5, 0.0)}) for i, s in enumerate(samples)
        ]
        with self.engine.learning() as learner:
            result = learner.network("policy").update(rows)
        return float(sum(values.sum() for values in result.logprobs)), result.metrics["policy/grad_norm"]

    def hit(self, number: int) -> None:
        self.moment = time.monotonic()
        os.kill(self.ranks[1]["pid"], number)

    def end(self, scenario: str, groups: list[RolloutGroup]) -> None:
        """Let rank 1 die or hang, and go on until that is noticed."""
        kill = threading.Timer(1, self.hit, [signal.SIGKILL])
        kill.daemon = True
        if scenario == "generation":
            kill.start()
            while True:
                self.sample(300)
        elif scenario == "update":
            kill.start()
            while True:
                self.update(groups)
        elif scenario == "save":
            kill.start()
            with self.engine.learning() as learner:
                while True:
                    learner.save(Path("others"))
        elif scenario == "idle":
            self.hit(signal.SIGKILL)
            while not self.engine.failed:
                time.sleep(0.05)
            self.sample()
        elif scenario == "hang":
            self.hit(signal.SIGSTOP)
            threading.Timer(2, self.give_up).start()
            self.update(groups)
        elif scenario == "out of memory":
            OOM_GROUP.mkdir(exist_ok=True)
            (OOM_GROUP / "memory.limit_in_bytes").write_text(str(4 * 2**20))
            (OOM_GROUP / "cgroup.procs").write_text(str(self.ranks[1]["pid"]))
            self.moment = time.monotonic()
            while True:
                self.update(self.sample(60))

    def give_up(self) -> None:
        self.moment = time.monotonic()
        self.engine.abandon(RankLostError("the step takes too long"))


def main(model: str, address: str, scenarios: list[str]) -> None:
    checkpoint: Path | None = None
    groups: list[RolloutGroup] = []
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    for number, scenario in enumerate(scenarios):
        lesson = Lesson(model, address, checkpoint)
        seen: dict[str, Any] = {"shares": [rank["shares_files"] for rank in lesson.ranks]}
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            sampled = lesson.sample()
            groups = groups or sampled
            seen["steps"] = [lesson.update(groups)]
            checkpoint = Path(f"saved-{number}").absolute()
            with lesson.engine.learning() as learner:
                learner.save(checkpoint)
            seen["steps"] += [lesson.update(groups), lesson.update(groups)]
            lesson.end(scenario, groups)
        except RankLostError as error:
            seen |= {"noticed_s": time.monotonic() - lesson.moment, "what": error.what, "where": error.where}
            seen["remedy"] = error.remedy
        start = time.monotonic()
        lesson.engine.close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(signals) == 2 * (number + 1), "Ray has taken a signal"
        pids = [rank["pid"] for rank in lesson.ranks]
        seen |= {"close_s": time.monotonic() - start, "left": [pid for pid in pids if Path(f"/proc/{pid}").exists()]}
        print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
