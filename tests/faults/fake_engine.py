"""An engine of one table of logits: it samples, learns with AdamW, saves and restores in milliseconds.

Everything around it is real: config, data, reward workers, trainer, checkpoints, run directory. Its completions depend
on its weights and on nothing else but the seeds of the requests, so that a wrong weight, a wrong optimizer state or a
wrong prompt shows in every number that follows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from mmrl.config.sections import Config
from mmrl.engine.sampler.admissions import OneByOneSampler, continued, turn_ids
from mmrl.engine.spec import EngineSpec
from mmrl.engine_api import Learner, NetworkFiles, SamplingRequest, UpdateResult, Way
from mmrl.errors import MMRLError
from mmrl.interfaces import Algorithm
from mmrl.ops.objective import PartialLoss, partial_loss, reduce_partials, score_loss, weighed_loss
from mmrl.system import failpoints
from mmrl.types import FloatArray, Rollout, RolloutGroup, Sample, Segment, TrainingRow
from tests.faults.fake_critic import FakeCritic

LETTERS = "." + "abcdefghijklmno"
"""What the policy writes; the first ends a completion."""
POSITIONS = 6


class FakeEngine(OneByOneSampler, Learner):
    """Implements ``Engine``, ``Sampler``, ``Learner`` and its policy; logits_PV over the letters at each position."""

    precision = "float32"

    def __init__(self, config: Config, algorithm: Algorithm | None, checkpoint: Path | None) -> None:
        super().__init__()
        self._config, self._algorithm = config, algorithm
        generator = torch.Generator().manual_seed(7)
        self.logits_PV = torch.randn(POSITIONS, len(LETTERS), generator=generator, requires_grad=True)
        self._reference_PV, self._is_reset = self.logits_PV.detach().clone(), False
        self.optimizer = torch.optim.AdamW([self.logits_PV], lr=config.learner.lr)
        self.updates = 0
        self.networks: Mapping[str, Any] = {"policy": self, "reference": SimpleNamespace(score=self._of_reference)}
        self._scores = algorithm is not None and algorithm.network == "reward"
        if self._scores:
            self.networks = {"reward": self}
        self.critic: FakeCritic | None = None
        if config.critic is not None and algorithm is not None:
            self.critic = FakeCritic(config.critic, algorithm)
            self.networks = {**self.networks, "critic": self.critic}
        if checkpoint is not None:
            self._restore(checkpoint)

    samples_apart = False

    def publish(self) -> int:
        return self.updates

    @contextmanager
    def sampling(self, version: int | None = None) -> Iterator[FakeEngine]:
        try:
            yield self
        finally:
            self.leave()

    @contextmanager
    def learning(self) -> Iterator[FakeEngine]:
        yield self

    def describe(self) -> Mapping[str, Any]:
        return {"device": "fake", "device_name": "fake"}

    def memory_bytes_max(self) -> int:
        return 1

    def abandon(self, error: MMRLError) -> bool:
        return False

    def close(self) -> None:
        return None

    def submit(self, requests: Sequence[SamplingRequest]) -> Sequence[int]:
        failpoints.reach("fake.generate")
        return super().submit(requests)

    def _group(self, request: SamplingRequest) -> RolloutGroup:
        logprobs_PV = torch.log_softmax(self.logits_PV.detach() / self._config.sampler.temperature, -1).numpy()
        members = [self._rollout(request, member, logprobs_PV) for member in range(request.num_samples)]
        return RolloutGroup(request.prompt, tuple(members))

    def _rollout(self, request: SamplingRequest, member: int, logprobs_PV: FloatArray) -> Rollout:
        rng = np.random.default_rng([request.seed + member, len(request.token_ids)])
        ids: list[int] = []
        before = sum(len(segment.token_ids) for segment in request.segments)
        while len(ids) < request.max_new_tokens and 0 not in ids:
            weights = np.exp(logprobs_PV[(before + len(ids)) % POSITIONS].astype(np.float64))
            greedy = request.temperature == 0
            ids.append(int(weights.argmax() if greedy else rng.choice(len(LETTERS), p=weights / weights.sum())))
        logprobs = logprobs_PV[(before + np.arange(len(ids))) % POSITIONS, ids]
        segment = Segment(np.array(ids, np.int32), True, logprobs)
        text = "".join(LETTERS[i] for i in turn_ids(request, segment.token_ids)).rstrip(".")
        reason: Any = "stop" if 0 in ids else "length"
        facts: dict[str, Any] = {"text": text, "finish_reason": reason, "weight_version": self.updates}
        return continued(request, member, segment, **facts)

    def score(self, samples: Sequence[Sample], *, way: Way = "packed") -> list[FloatArray]:
        if way == "wide":
            return []
        failpoints.reach("fake.logprobs")
        _check_tokens(samples)
        with torch.no_grad():
            return [self._logprobs_T(self.logits_PV, sample).numpy() for sample in samples]

    def _of_reference(self, samples: Sequence[Sample]) -> list[FloatArray]:
        _check_tokens(samples)
        return [self._logprobs_T(self._reference_PV, sample).numpy() for sample in samples]

    def final_values(self, samples: Sequence[Sample]) -> FloatArray:
        """Scores of a reward model, of which the table has each token's share."""
        assert self._scores, "a policy has no score head"
        failpoints.reach("fake.logprobs")
        _check_tokens(samples)
        with torch.no_grad():
            return np.array([float(self._score(sample)) for sample in samples], np.float32)

    def _score(self, sample: Sample) -> torch.Tensor:
        ids_T = torch.from_numpy(sample.token_ids.astype(np.int64)) % len(LETTERS)
        return self.logits_PV[torch.arange(len(ids_T)) % POSITIONS, ids_T].mean()

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        failpoints.reach("fake.update")
        _check_tokens([row.sample for row in rows])
        if not rows:
            return UpdateResult({"lr": self._config.learner.lr}, [], [])
        if self._scores:
            final_N = torch.stack([self._score(row.sample) for row in rows])
            partial = weighed_loss(rows, *score_loss(self._algorithm, rows, final_N))
            metrics = self._step(partial)
            nothing = [np.zeros(0, np.float32) for _ in rows]
            return UpdateResult(metrics, nothing, nothing, final_values=final_N.detach().numpy())
        parts = [self._logprobs_T(self.logits_PV, row.sample) for row in rows]
        logprobs_T = torch.cat(parts)
        entropies = [self._entropy_T(row.sample) for row in rows]
        metrics = self._step(partial_loss(self._algorithm, rows, logprobs_T, torch.cat(entropies)))
        found = [[each.detach().numpy() for each in values] for values in (parts, entropies)]
        return UpdateResult(metrics, *found)

    def _step(self, partial: PartialLoss) -> dict[str, float]:
        """An optimizer step; returns its metrics."""
        self.optimizer.zero_grad()
        partial.loss.backward()
        assert self.logits_PV.grad is not None
        norm = float(self.logits_PV.grad.norm())
        self.optimizer.step()
        self.updates += 1
        return reduce_partials([partial]) | {"lr": self._config.learner.lr, "policy/grad_norm": norm}

    def reset_reference(self) -> None:
        self._reference_PV, self._is_reset = self.logits_PV.detach().clone(), True
        failpoints.reach("fake.reset")

    def save(self, folder: Path) -> Mapping[str, NetworkFiles]:
        role, stored = next(iter(self.networks)), self._config.trainer.save_optimizer != "none"
        own = NetworkFiles.of(role, optimizer=stored)
        model, kept = folder / own.model, folder / own.state
        model.mkdir(parents=True)
        kept.mkdir(exist_ok=True)
        failpoints.reach("save.shard")
        save_file({"logits": self.logits_PV.detach().clone()}, model / "model.safetensors")
        state = self.optimizer.state[self.logits_PV]
        if stored:
            save_file({name: value.clone() for name, value in state.items()}, kept / "optimizer.safetensors")
        failpoints.reach("save.part")
        failpoints.reach("save.state")
        (kept / "learner.json").write_text(json.dumps({"updates": self.updates}))
        files = {role: own}
        if self.critic is not None:
            files["critic"] = self.critic.save(folder, optimizer=stored)
        if self._is_reset:
            files["reference"] = NetworkFiles.of("reference", trained=False)
            (folder / "reference" / "model").mkdir(parents=True)
            save_file({"logits": self._reference_PV}, folder / "reference" / "model" / "model.safetensors")
        return files

    def _restore(self, checkpoint: Path) -> None:
        own = NetworkFiles.of(next(iter(self.networks)))
        with torch.no_grad():
            self.logits_PV.copy_(load_file(checkpoint / own.model / "model.safetensors")["logits"])
        if (reference := checkpoint / "reference" / "model" / "model.safetensors").exists():
            self._reference_PV, self._is_reset = load_file(reference)["logits"], True
        if self.critic is not None:
            self.critic.restore(checkpoint)
        state = load_file(checkpoint / own.state / "optimizer.safetensors")
        if state:
            self.optimizer.state[self.logits_PV] = state
        self.updates = json.loads((checkpoint / own.state / "learner.json").read_text())["updates"]

    def _entropy_T(self, sample: Sample) -> torch.Tensor:
        logprobs_PV = torch.log_softmax(self.logits_PV / self._config.sampler.temperature, -1)
        return -(logprobs_PV.exp() * logprobs_PV).sum(-1)[torch.arange(len(sample.token_ids)) % POSITIONS]

    def _logprobs_T(self, logits_PV: torch.Tensor, sample: Sample) -> torch.Tensor:
        ids_T = torch.from_numpy(sample.token_ids.astype(np.int64)) % len(LETTERS)  # demonstrations are the tokenizer's
        positions_T = torch.arange(len(ids_T)) % POSITIONS
        return torch.log_softmax(logits_PV / self._config.sampler.temperature, -1)[positions_T, ids_T]


def _check_tokens(samples: Sequence[Sample]) -> None:
    """Refuse what a real learner cannot pack: a sample without tokens."""
    assert all(len(sample.token_ids) for sample in samples), "a sample without tokens cannot be packed"


def start_engine(spec: EngineSpec, **options: Any) -> FakeEngine:
    """To take the place of ``mmrl.cluster.launch.start_engine``."""
    if spec.config.cluster.is_split:
        from tests.faults.split_engine import SplitFakeEngine

        return SplitFakeEngine(spec.config, spec.algorithm, spec.checkpoint)
    if spec.config.sampler.partial is not None:
        from tests.faults.letter_steps import LetterSteps

        class InParts(LetterSteps, FakeEngine):
            """Writes a letter a step."""

        return InParts(spec.config, spec.algorithm, spec.checkpoint)
    return FakeEngine(spec.config, spec.algorithm, spec.checkpoint)
