"""The fake engine's critic: a table of values by position and by the token before it, learned with AdamW."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from mmrl.config.critic import CriticConfig
from mmrl.engine_api import Network, NetworkFiles, UpdateResult, Way
from mmrl.interfaces import Algorithm
from mmrl.ops.objective import reduce_partials, value_loss, weighed_loss
from mmrl.system import failpoints
from mmrl.types import FloatArray, Sample, TrainingRow

POSITIONS, TOKENS = 6, 17


class FakeCritic(Network):
    """Implements the ``Network`` of a critic; values_PV at each position, given the token before it."""

    def __init__(self, config: CriticConfig, algorithm: Algorithm) -> None:
        self._config, self._algorithm = config, algorithm
        self.values_PV = torch.zeros(POSITIONS, TOKENS, requires_grad=True)
        self.optimizer = torch.optim.AdamW([self.values_PV], lr=config.lr, weight_decay=config.weight_decay)

    def score(self, samples: Sequence[Sample], *, way: Way = "packed") -> list[FloatArray]:
        failpoints.reach("fake.logprobs")
        with torch.no_grad():
            return [self._values_T(sample).numpy()[:-1] for sample in samples]

    def final_values(self, samples: Sequence[Sample]) -> FloatArray:
        with torch.no_grad():
            return np.array([float(self._values_T(sample)[-1]) for sample in samples], np.float32)

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        failpoints.reach("fake.update")
        if not rows:
            return UpdateResult({"critic/lr": self._config.lr}, [], [])
        parts = [self._values_T(row.sample)[:-1] for row in rows]
        partial = weighed_loss(rows, *value_loss(self._algorithm, rows, torch.cat(parts)))
        self.optimizer.zero_grad()
        partial.loss.backward()
        assert self.values_PV.grad is not None
        norm = float(self.values_PV.grad.norm())
        self.optimizer.step()
        metrics = reduce_partials([partial]) | {"critic/lr": self._config.lr, "critic/grad_norm": norm}
        nothing = [np.zeros(0, np.float32) for _ in rows]
        return UpdateResult(metrics, nothing, nothing, vpreds=[part.detach().numpy() for part in parts])

    def _values_T(self, sample: Sample) -> torch.Tensor:
        """(T + 1,) the values before each token, and after the last one."""
        assert len(sample.token_ids), "a sample without tokens cannot be packed"
        before_T = torch.from_numpy(np.concatenate([[TOKENS - 1], sample.token_ids % (TOKENS - 1)]))
        return self.values_PV[torch.arange(len(before_T)) % POSITIONS, before_T]

    def save(self, folder: Path, *, optimizer: bool) -> NetworkFiles:
        files = NetworkFiles.of("critic", optimizer=optimizer)
        for name in (files.model, files.state):
            (folder / name).mkdir(parents=True)
        save_file({"values": self.values_PV.detach().clone()}, folder / files.model / "model.safetensors")
        if optimizer:
            state = {name: value.clone() for name, value in self.optimizer.state[self.values_PV].items()}
            save_file(state, folder / files.state / "optimizer.safetensors")
        (folder / files.state / "learner.json").write_text(json.dumps({}))
        return files

    def restore(self, checkpoint: Path) -> None:
        files = NetworkFiles.of("critic")
        with torch.no_grad():
            self.values_PV.copy_(load_file(checkpoint / files.model / "model.safetensors")["values"])
        if state := load_file(checkpoint / files.state / "optimizer.safetensors"):
            self.optimizer.state[self.values_PV] = state
