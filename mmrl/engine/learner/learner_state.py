"""A learner's state besides weights, by the names of the weights, for any number of ranks and any ZeRO stage.

``state/`` of a checkpoint holds:

- ``optimizer-RANK-NUMBER.safetensors``: what each rank holds of the optimizer's state, in float32: ranges of the
  flattened weights, named ``exp_avg/WEIGHT/START``, ``exp_avg_sq/WEIGHT/START`` and, where the model is not float32,
  ``master/WEIGHT/START``: the float32 weight that the optimizer moves. START is the range's first element;
- ``generators.safetensors``: every rank's generators of torch, named ``RANK/torch`` and ``RANK/cuda``;
- ``learner.json``: the numbers of steps, the weights' shapes, and every rank's other generators.

Version 1 had whole tensors, named ``exp_avg/WEIGHT``, which rank 0 had gathered. It is read too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmrl.engine.learner.optimizer_state import MASTER, OptimizerState
from mmrl.engine.network import weights
from mmrl.engine.network.weights import Failures, of_all_ranks, shards
from mmrl.errors import ConfigError, ResourceError
from mmrl.system import failpoints
from mmrl.system.rng_state import generators, set_generators

VERSION = 2
FILE = "learner.json"
GENERATORS = "generators.safetensors"
OPTIMIZER = "optimizer-*.safetensors"


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


def save_state(
    state: OptimizerState, steps: int, target: Path, failures: Failures, *, with_optimizer: bool = True
) -> None:
    """Write ``state/``, the optimizer steps of the run included; each rank writes its part of the optimizer's state.

    Collective: at the end the ranks wait for each other.

    Args:
        with_optimizer: False to leave the optimizer's state out.
    """
    from safetensors.torch import save_file

    kinds = state.kinds(state.adam_step) if with_optimizer else ()
    with failures.writing(target):
        target.mkdir(parents=True, exist_ok=True)
        _write_part(state, kinds, target)
        failpoints.reach("save.part")
    ranks = of_all_ranks((_device_generators(), generators()))
    if torch.distributed.get_rank() != 0 or failures.first:
        return
    states = {f"{rank}/{name}": state for rank, (own, _) in enumerate(ranks) for name, state in own.items()}
    content = {
        "version": VERSION,
        "optimizer_steps": steps,
        "adam_step": state.adam_step,
        "kinds": kinds if with_optimizer else None,
        "weights": state.shapes(),
        "generators": [others for _, others in ranks],
    }
    with failures.writing(target):
        save_file(states, target / GENERATORS)
        failpoints.reach("save.state")
        (target / FILE).write_text(json.dumps(content))


def _write_part(state: OptimizerState, kinds: tuple[str, ...], target: Path) -> None:
    """Write this rank's own elements of each weight, in files of bounded size."""
    from safetensors.torch import save_file

    most = max(weights.SHARD_BYTES // 4, 1)
    pieces = {
        f"{kind}/{name}/{start}": (name, kind, range(start, min(start + most, own.stop)))
        for name in state.weights
        for own in [state.own(name)]
        for kind in kinds
        for start in own[::most]
    }
    files = shards({key: 4 * len(elements) for key, (_, _, elements) in pieces.items()})
    rank = torch.distributed.get_rank()
    for number, keys in enumerate(files, 1):
        held = {key: state.get(*pieces[key]).cpu() for key in keys}
        failpoints.reach("save.shard")
        save_file(held, target / f"optimizer-{rank:05d}-{number:05d}.safetensors")


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some elements of a weight's tensor, as a file has them."""

    elements: range
    file: Path
    key: str
    shape: tuple[int, ...]

    def read(self, file: Any, elements: range) -> torch.Tensor:
        """Values of some of them; of a whole tensor, as version 1 has them, no row is read that has none."""
        first, last = elements.start - self.elements.start, elements.stop - self.elements.start
        width = math.prod(self.shape[1:])
        if not self.shape or not width:
            found: torch.Tensor = file.get_tensor(self.key)
            return found.flatten()[first:last]
        row = first // width
        rows = file.get_slice(self.key)[row : -(-last // width)]
        flat: torch.Tensor = rows.flatten()[first - row * width : last - row * width]
        return flat


class SavedState:
    """A checkpoint's ``state/``, with only names and shapes in memory.

    Raises:
        ResourceError: A file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._folder = folder
        self._pieces: dict[tuple[str, str], list[_Piece]] = {}
        try:
            content = json.loads((folder / FILE).read_text())
            if content["version"] not in (1, VERSION):
                raise ValueError(f"its version is {content['version']}, and this mmrl reads 1 and {VERSION}")
            self.optimizer_steps, self.adam_step = int(content["optimizer_steps"]), int(content["adam_step"])
            self.weights: dict[str, list[int]] = dict(content["weights"])
            self._generators: list[Mapping[str, Any]] = list(content["generators"])
            for path in sorted(folder.glob(OPTIMIZER)):
                with safe_open(path, "pt") as file:
                    for key in file.keys():  # noqa: SIM118
                        self._add(path, key, tuple(file.get_slice(key).get_shape()))
            self._kinds = self._kinds_of(content)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise self._damaged(error) from error

    def check(self, state: OptimizerState) -> None:
        """Check that the state has all that a learner needs, and nothing else.

        Raises:
            ConfigError: It does not.
        """
        if self._kinds is None:
            raise ConfigError(
                "the checkpoint was written without the optimizer's state",
                where=str(self._folder),
                remedy="start a new run from its model folder",
            )
        expected = state.shapes()
        different = sorted(name for name in {*self.weights, *expected} if self.weights.get(name) != expected.get(name))
        if different:
            raise ConfigError(
                f"the checkpoint was written with other trained weights: {len(different)} differ in name or shape",
                where=f"{self._folder}: {', '.join(different[:5])}",
                remedy="go on with the checkpoint's model.freeze, or start a new run from its model folder",
            )
        if self._kinds != {*state.kinds(self.adam_step)}:
            raise ConfigError(
                "the checkpoint was written with another model.dtype",
                where=str(self._folder),
                remedy="go on with the checkpoint's model.dtype, or start a new run from its model folder",
            )

    def restore(self, state: OptimizerState) -> None:
        """Hand over what this rank holds of the optimizer's state, and its generators if it has any."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            with ExitStack() as stack:
                files = self._open(stack)
                for name in state.weights:
                    if held := state.held(name):
                        for kind in state.kinds(self.adam_step):
                            state.set(name, kind, self._read(files, kind, name, held))
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
            with ExitStack() as stack:
                files = self._open(stack)
                for name, shape in self.weights.items() if MASTER in (self._kinds or ()) else ():
                    pieces = self._read(files, MASTER, name, range(math.prod(shape)))
                    yield name, torch.cat([values for _, values in pieces]).view(shape)
        except (OSError, SafetensorError) as error:
            raise self._damaged(error) from error

    def _add(self, path: Path, key: str, shape: tuple[int, ...]) -> None:
        kind, name, *start = key.split("/")
        first = int(start[0]) if start else 0
        piece = _Piece(range(first, first + math.prod(shape)), path, key, shape)
        self._pieces.setdefault((kind, name), []).append(piece)

    def _kinds_of(self, content: Mapping[str, Any]) -> set[str] | None:
        """The kinds of tensors that every weight has; None if the state was left out.

        Raises:
            ValueError: Elements are missing, or there twice.
        """
        if content["version"] == 1:
            kinds = {kind for kind, _ in self._pieces} | ({"exp_avg", "exp_avg_sq"} if self.adam_step else set())
        elif content["kinds"] is None:
            return None
        else:
            kinds = set(content["kinds"])
        expected = {(kind, name): math.prod(shape) for kind in kinds for name, shape in self.weights.items()}
        whole = 0
        for key, count in expected.items():
            pieces = sorted((each.elements for each in self._pieces.get(key, ())), key=lambda each: each.start)
            *starts, end = 0, *(each.stop for each in pieces)
            whole += [each.start for each in pieces] == starts and end == count
        if whole < len(expected) or len(self._pieces) > len(expected):
            raise ValueError(f"{whole} of {len(expected)} tensors of the optimizer are there, whole and once")
        return kinds

    def _open(self, stack: ExitStack) -> dict[Path, Any]:
        """The files of the optimizer's state; a file's bytes are read when they are asked for."""
        from safetensors import safe_open

        paths = dict.fromkeys(piece.file for pieces in self._pieces.values() for piece in pieces)
        return {path: stack.enter_context(safe_open(path, "pt")) for path in paths}

    def _read(
        self, files: Mapping[Path, Any], kind: str, name: str, elements: range
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Values of these elements, in pieces as they were written, each with its first element."""
        for piece in sorted(self._pieces[kind, name], key=lambda each: each.elements.start):
            first = max(elements.start, piece.elements.start)
            if first < (stop := min(elements.stop, piece.elements.stop)):
                yield first, piece.read(files[piece.file], range(first, stop))

    def _damaged(self, error: Exception) -> ResourceError:
        return ResourceError(
            f"the checkpoint cannot be read: {type(error).__name__}: {error}",
            where=str(self._folder),
            remedy="go on from another checkpoint",
        )


def _device_generators() -> dict[str, torch.Tensor]:
    """The states of torch's generators in this process."""
    found = {"torch": torch.get_rng_state()}
    return found | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_device_generators(states: Mapping[str, torch.Tensor], rank: int) -> None:
    torch.set_rng_state(states[f"{rank}/torch"])
    if (state := states.get(f"{rank}/cuda")) is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
