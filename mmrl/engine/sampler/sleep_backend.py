"""A sleep of vLLM that drops the weights which the next sync brings, and backs up the rest.

vLLM's level 1 copies everything that was allocated while the model was loaded to page-locked memory and back. Its level
2 loses what no sync sends: Qwen3-VL's deepstack embeddings, which must be zero where no image is, and the second model
runner's rotary positions, input embeddings and sampling state, of which it reads more than it has written (vLLM 0.32:
``GPUModelRunner.load_model`` makes them, ``Worker.sleep`` saves ``named_buffers`` of the model). vLLM lets others
register ways to sleep (``SleepModeBackendFactory``). The one here looks at each allocation: it is dropped if all that
it holds are parameters of the model, else it is backed up.

After such a sleep the weights are undefined until a sync has brought all of them: ``VLLMSampler`` then has
``NO_VERSION``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mmrl.config.sections import SamplerConfig
from mmrl.errors import NumericsError

NAME = "mmrl"
"""The backend's name in vLLM's registry."""
DROPPED = "mmrl_dropped"
"""Tag of allocations while they are dropped; vLLM backs up those of its own tags."""
KEEP = "sleep_preserve_parameter_names"
"""vLLM's argument for parameters that a sleep must back up, as patterns of names."""
CHANGING = ("quantization", "speculative_config", "enable_lora")
"""vLLM's arguments with which a parameter may be more than the weight that a sync brings."""


def discards_weights(config: SamplerConfig) -> bool:
    """True if a sleeping vLLM drops its weights on a GPU, as far as its files tell; they are not imported."""
    spec = importlib.util.find_spec("vllm")
    folders = [] if spec is None else spec.submodule_search_locations or []
    known = any((Path(folder) / "device_allocator" / "sleep_mode_backend.py").is_file() for folder in folders)
    return (known or spec is None) and not any(config.engine.get(key) for key in CHANGING)


class Discarding:
    """The weights of a vLLM that drops them while it sleeps.

    Args:
        model: vLLM's model.
        kept: Patterns of names of parameters that are backed up all the same.
    """

    def __init__(self, model: torch.nn.Module, kept: Sequence[str] = ()) -> None:
        self._model, self._kept = model, tuple(kept)
        self._dropped = frozenset[int]()
        self._unproven = True

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters that a sync brings."""
        for name, parameter in self._model.named_parameters():
            if not any(fnmatch(name, pattern) for pattern in self._kept):
                yield name, parameter

    @contextmanager
    def dropping(self, allocator: Any) -> Iterator[None]:
        """Have allocations that hold nothing but them under a tag that vLLM does not back up, in a block."""
        marked = [allocator.pointer_to_data[address] for address in self._addresses(allocator)]
        tags = [allocation.tag for allocation in marked]
        try:
            for allocation in marked:
                allocation.tag = DROPPED
            yield
        finally:
            for allocation, tag in zip(marked, tags, strict=True):
                allocation.tag = tag

    @property
    def drops(self) -> bool:
        """True if the last sleep has dropped any."""
        return bool(self._dropped)

    def _addresses(self, allocator: Any) -> list[int]:
        """Addresses of these allocations; none if vLLM or torch describe them in another way than is known here."""
        try:
            found = list(self._held_alone(allocator))
        except (AttributeError, KeyError, TypeError, ValueError):
            found = []
        self._dropped = frozenset(storage for _, storages in found for storage in storages)
        return [address for address, _ in found]

    def _held_alone(self, allocator: Any) -> Iterator[tuple[int, Collection[int]]]:
        """Address and storages of each of torch's segments whose blocks are a parameter's whole storage each."""
        whole = {
            parameter.untyped_storage().data_ptr(): parameter.nbytes
            for _, parameter in self.parameters()
            if parameter.nbytes == parameter.untyped_storage().nbytes()
        }
        for pool, _ in allocator.allocator_and_pools.get("weights", ()):
            for segment in pool.snapshot():
                blocks = dict(_blocks(segment))
                if segment["address"] in allocator.pointer_to_data and blocks.items() <= whole.items():
                    yield segment["address"], blocks.keys()

    def woken(self) -> None:
        """Fill what was dropped with NaN before the first sync, which is to bring all of it."""
        if self._unproven:
            for _, parameter in self._floating():
                parameter.data.fill_(float("nan"))

    def check(self) -> None:
        """Check after the first sync that it has brought all weights.

        Raises:
            NumericsError: It has not.
        """
        if not self._unproven:
            return
        self._unproven = False
        missing = [name for name, parameter in self._floating() if bool(parameter.isnan().any())]
        if missing:
            raise NumericsError(
                f"a weight sync does not bring {len(missing)} of vLLM's weights, which it drops while it sleeps: "
                + ", ".join(missing[:3]),
                where="sampler",
                remedy=f"keep them: sampler.engine={{{KEEP}: [{', '.join(missing)}]}}; and report this",
            )

    def _floating(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in self.parameters():
            if parameter.is_floating_point() and parameter.untyped_storage().data_ptr() in self._dropped:
                yield name, parameter


def _blocks(segment: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Address and size, as it was asked for, of each block of a segment that is in use."""
    address = segment["address"]
    for block in segment["blocks"]:
        if block["state"] != "inactive":
            yield address, block["requested_size"]
        address += block["size"]


@cache
def backend() -> type:
    """The class of the backend, registered with vLLM.

    Raises:
        ImportError: vLLM has no such registry.
    """
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory

    class DiscardingBackend(CuMemBackend):
        def serve(self, discarding: Discarding) -> None:
            self._discarding = discarding

        def suspend(self, level: int = 1) -> None:
            from vllm.device_allocator import get_mem_allocator_instance

            with self._discarding.dropping(get_mem_allocator_instance()):
                super().suspend(level)

        def resume(self, tags: list[str] | None = None) -> None:
            super().resume(tags)
            if tags is None or "weights" in tags:
                self._discarding.woken()

    SleepModeBackendFactory.register_backend(NAME, __name__, "DiscardingBackend")
    return DiscardingBackend


def __getattr__(name: str) -> Any:
    if name == "DiscardingBackend":  # vLLM's registry asks this module for it
        return backend()
    raise AttributeError(name)


def install(rpc: Callable[..., Any]) -> Discarding | None:
    """Let a vLLM drop its weights while it sleeps; None if it keeps its own way to sleep.

    Args:
        rpc: vLLM's ``collective_rpc``, in whose process this runs.
    """
    try:
        own = backend()
    except ImportError:
        return None
    found: Sequence[Discarding | None] = rpc(_serve, args=(own,))
    return found[0]


def _serve(worker: Any, own: Any) -> Discarding | None:
    """Choose the backend in a worker of vLLM, which makes it at its first sleep."""
    config = worker.vllm_config.model_config
    if config.quantization or worker.vllm_config.speculative_config or worker.vllm_config.lora_config:
        return None
    if (before := getattr(config, "sleep_mode_backend", None)) is None:
        return None
    config.sleep_mode_backend = NAME
    served: Any = getattr(worker, "sleep_mode_backend", None)
    if type(served) is not own:
        config.sleep_mode_backend = before
        return None
    discarding = Discarding(worker.get_model(), getattr(config, KEEP, ()))
    served.serve(discarding)
    return discarding
