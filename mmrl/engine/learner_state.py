"""A learner's state besides weights, by the names of the weights, for any number of ranks and any ZeRO stage.

``state/`` of a checkpoint holds:

- ``optimizer-00001-of-0000N.safetensors``: whole float32 tensors, named ``exp_avg/WEIGHT``, ``exp_avg_sq/WEIGHT``
  and, where the model is not float32, ``master/WEIGHT``: the float32 weight that the optimizer moves;
- ``generators.safetensors``: every rank's generators of torch, named ``RANK/torch`` and ``RANK/cuda``;
- ``learner.json``: the numbers of steps, the weights' shapes, and every rank's other generators.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mmrl.engine.policy import Policy
from mmrl.engine.weights import Failures, numel, shards, write_shards
from mmrl.errors import ConfigError, ResourceError
from mmrl.system import failpoints
from mmrl.system.rng_state import generators, set_generators

VERSION = 1
MASTER = "master"
FILE = "learner.json"
GENERATORS = "generators.safetensors"
OPTIMIZER = "optimizer-*-of-*.safetensors"


class OptimizerState:
    """The state of DeepSpeed's optimizer as whole tensors by weight; getting one is collective, setting one is not.

    DeepSpeed makes the state in its first step, and its public calls find it from then on. Without ZeRO they find
    nothing; the optimizer's own parameters are then in the order of the trained weights.
    """

    def __init__(self, engine: Any, policy: Policy) -> None:
        self._optimizer, self._stage = engine.optimizer, engine.zero_optimization_stage()
        self.weights = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        self._has_masters = policy.model.dtype != torch.float32
        owned = [p for group in self._optimizer.param_groups for p in group["params"]] if self._stage == 0 else []
        self._owned = dict(zip(self.weights, owned, strict=True)) if self._stage == 0 else {}

    @property
    def adam_step(self) -> int:
        """Adam's own count of steps; 0 before there is a state."""
        counts = {int(state["step"]) for state in self._optimizer.state.values() if "step" in state}
        assert len(counts) <= 1, f"weights have taken different numbers of steps: {counts}"
        return counts.pop() if counts else 0

    @adam_step.setter
    def adam_step(self, steps: int) -> None:
        for state in self._optimizer.state.values():
            state["step"].fill_(steps)

    def kinds(self, adam_step: int) -> tuple[str, ...]:
        """Kinds of tensors that each weight has."""
        masters = (MASTER,) if self._has_masters else ()
        return (*masters, "exp_avg", "exp_avg_sq") if adam_step else masters

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole float32 tensors by ``KIND/WEIGHT``, gathered one at a time."""
        kinds = self.kinds(self.adam_step)
        for name in self.weights:
            for kind in kinds:
                yield f"{kind}/{name}", self._get(name, kind)

    def sizes(self) -> dict[str, int]:
        """Bytes of each of ``tensors``, in that order."""
        kinds = self.kinds(self.adam_step)
        return {f"{kind}/{name}": 4 * numel(weight) for name, weight in self.weights.items() for kind in kinds}

    def shapes(self) -> dict[str, list[int]]:
        """Shapes of the trained weights."""
        return {name: list(getattr(weight, "ds_shape", weight.shape)) for name, weight in self.weights.items()}

    def _get(self, name: str, kind: str) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        weight = self.weights[name]
        if self._stage == 0:
            owned = self._owned[name]
            # A weight that never had a gradient has no state.
            value = owned.detach() if kind == MASTER else self._optimizer.state.get(owned, {}).get(kind)
            return torch.zeros_like(owned) if value is None else value
        found = safe_get_full_fp32_param(weight) if kind == MASTER else safe_get_full_optimizer_state(weight, kind)
        assert isinstance(found, torch.Tensor), f"DeepSpeed has no {kind} of {name}"
        return found

    @torch.no_grad()
    def set(self, name: str, kind: str, value: torch.Tensor) -> None:
        """Take over a whole tensor, or this rank's part of it."""
        import deepspeed.utils as public

        weight = self.weights[name]
        value = value.to(weight.device)
        if self._stage == 0:
            owned = self._owned[name]
            if kind == MASTER:
                owned.copy_(value)
            else:
                state = self._optimizer.state[owned]
                state.setdefault("step", torch.zeros((), device=value.device))  # where a fused step reads it
                state[kind] = value.clone()  # it lies in the mapped file
        elif self._stage < 3:
            if kind == MASTER:
                public.safe_set_full_fp32_param(weight, value)
            else:
                public.safe_set_full_optimizer_state(weight, value, kind)
        # The calls for whole tensors fail at stage 3 if a weight does not divide evenly.
        elif kind == MASTER:
            own = public.safe_get_local_fp32_param(weight)
            public.safe_set_local_fp32_param(weight, _part(value, own.numel()))
        else:
            own = public.safe_get_local_optimizer_state(weight, kind)
            public.safe_set_local_optimizer_state(weight, _part(value, own.numel()), kind)


def check_optimizer(settings: Mapping[str, Any]) -> None:
    """Check that the optimizer's state can be saved.

    Args:
        settings: DeepSpeed's settings.

    Raises:
        ConfigError: It cannot.
    """
    chosen = settings["optimizer"]
    name, by_torch = chosen["type"], chosen["params"].get("torch_adam")
    if name.lower() not in ("adam", "adamw") or not by_torch:
        raise ConfigError(
            f"no checkpoint can hold the state of the optimizer {name}{'' if by_torch else ' of DeepSpeed'}",
            where="learner.deepspeed: optimizer",
            possible="torch's Adam and AdamW",
            remedy="remove optimizer.type and optimizer.params.torch_adam from learner.deepspeed",
        )


def save_state(state: OptimizerState, steps: int, target: Path, failures: Failures) -> None:
    """Write ``state/``, the optimizer steps of the run included; collective."""
    from safetensors.torch import save_file

    files = shards(state.sizes())
    writes = torch.distributed.get_rank() == 0

    def write(number: int, tensors: dict[str, torch.Tensor]) -> None:
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, target / f"optimizer-{number:05d}-of-{len(files):05d}.safetensors")

    with failures.writing(target):
        if writes:
            target.mkdir(parents=True, exist_ok=True)
    write_shards(state.tensors(), files, write, target, failures)
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, (_device_generators(), generators()))
    if not writes or failures.first:
        return
    states = {f"{rank}/{name}": state for rank, (own, _) in enumerate(ranks) for name, state in own.items()}
    content = {
        "version": VERSION,
        "optimizer_steps": steps,
        "adam_step": state.adam_step,
        "tensors": sum(len(file) for file in files),
        "weights": state.shapes(),
        "generators": [others for _, others in ranks],
    }
    with failures.writing(target):
        save_file(states, target / GENERATORS)
        failpoints.reach("save.state")
        (target / FILE).write_text(json.dumps(content))


class SavedState:
    """A checkpoint's ``state/``, with only names and shapes in memory.

    Raises:
        ResourceError: A file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._folder = folder
        self._files: dict[Path, list[str]] = {}
        self.shapes: dict[str, list[int]] = {}
        try:
            content = json.loads((folder / FILE).read_text())
            if content["version"] != VERSION:
                raise ValueError(f"its version is {content['version']}, not {VERSION}")
            self.optimizer_steps, self.adam_step = int(content["optimizer_steps"]), int(content["adam_step"])
            self.weights: dict[str, list[int]] = dict(content["weights"])
            self._generators: list[Mapping[str, Any]] = list(content["generators"])
            for path in sorted(folder.glob(OPTIMIZER)):
                with safe_open(path, "pt") as file:
                    self._files[path] = list(file.keys())
                    self.shapes.update({key: list(file.get_slice(key).get_shape()) for key in file.keys()})  # noqa: SIM118
            if len(self.shapes) != content["tensors"]:
                raise ValueError(f"{len(self.shapes)} of {content['tensors']} tensors of the optimizer are there")
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise self._damaged(error) from error

    def check(self, state: OptimizerState) -> None:
        """Check that the state has all that a learner needs, and nothing else.

        Raises:
            ConfigError: It does not.
        """
        expected = state.shapes()
        different = sorted(name for name in {*self.weights, *expected} if self.weights.get(name) != expected.get(name))
        if different:
            raise ConfigError(
                f"the checkpoint was written with other trained weights: {len(different)} differ in name or shape",
                where=f"{self._folder}: {', '.join(different[:5])}",
                remedy="go on with the checkpoint's model.freeze, or start a new run from its model folder",
            )
        kinds = state.kinds(self.adam_step)
        if self.shapes != {f"{kind}/{name}": shape for name, shape in expected.items() for kind in kinds}:
            raise ConfigError(
                "the checkpoint was written with another model.dtype",
                where=str(self._folder),
                remedy="go on with the checkpoint's model.dtype, or start a new run from its model folder",
            )

    def restore(self, state: OptimizerState) -> None:
        """Hand the optimizer's tensors over, one at a time, and this rank's generators if it has any."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            for kind, name, value in self._tensors():
                state.set(name, kind, value)
            state.adam_step = self.adam_step
            rank = torch.distributed.get_rank()
            if rank < len(self._generators):
                _set_device_generators(load_file(self._folder / GENERATORS), rank)
                set_generators(self._generators[rank])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise self._damaged(error) from error

    def masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The float32 weights that the optimizer moves, by the weights' names; none if the model itself is float32.

        Raises:
            ResourceError: A file is damaged.
        """
        from safetensors import SafetensorError

        try:
            yield from ((name, value) for kind, name, value in self._tensors(MASTER))
        except (OSError, SafetensorError) as error:
            raise self._damaged(error) from error

    def _tensors(self, only: str = "") -> Iterator[tuple[str, str, torch.Tensor]]:
        """Kind, weight and value, one at a time; ``only`` of one kind."""
        from safetensors import safe_open

        for path, keys in self._files.items():
            with safe_open(path, "pt") as file:
                for key in keys:
                    kind, _, name = key.partition("/")
                    if only in ("", kind):
                        yield kind, name, file.get_tensor(key)

    def _damaged(self, error: Exception) -> ResourceError:
        return ResourceError(
            f"the checkpoint cannot be read: {type(error).__name__}: {error}",
            where=str(self._folder),
            remedy="go on from another checkpoint",
        )


def _part(value: torch.Tensor, size: int) -> torch.Tensor:
    """This rank's ``size`` elements of a tensor, whose end is filled up with zeros."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    flat = torch.nn.functional.pad(value.flatten(), (0, size * ranks - value.numel()))
    return flat[rank * size : (rank + 1) * size]


def _device_generators() -> dict[str, torch.Tensor]:
    """The states of torch's generators in this process."""
    found = {"torch": torch.get_rng_state()}
    return found | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_device_generators(states: Mapping[str, torch.Tensor], rank: int) -> None:
    torch.set_rng_state(states[f"{rank}/torch"])
    if (state := states.get(f"{rank}/cuda")) is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
