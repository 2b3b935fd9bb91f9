"""A sleep that drops weights: vLLM's own allocator, backend and worker, over a device that is host memory.

What is unmapped is overwritten, as a device's next user would.
"""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmrl.config.sections import SamplerConfig
from mmrl.engine.sampler import sleep_backend
from mmrl.engine.sampler.sleep_backend import NAME, Discarding, discards_weights, install
from mmrl.errors import NumericsError

SEGMENT = 4096


class Device:
    """Segments of memory, in place of vLLM's C extension and of torch's pools."""

    def __init__(self, allocator: Any) -> None:
        self.allocator, self.mapped, self.segments = allocator, set[int](), list[dict[str, Any]]()
        self._buffers = dict[int, Any]()
        allocator.allocator_and_pools["weights"] = [(SimpleNamespace(snapshot=lambda: self.segments), None)]

    def hold(self, *numbers: int, tag: str = "weights") -> list[torch.Tensor]:
        """float32 tensors that share a segment, with a free block after them."""
        buffer = (ctypes.c_byte * SEGMENT)()
        address, blocks, tensors, place = ctypes.addressof(buffer), list[dict[str, Any]](), list[torch.Tensor](), 0
        for count in numbers:
            size = -(-4 * count // 512) * 512
            tensors.append(torch.frombuffer(buffer, dtype=torch.float32, count=count, offset=place))
            blocks.append({"size": size, "requested_size": 4 * count, "state": "active_allocated"})
            place += size
        blocks.append({"size": SEGMENT - place, "requested_size": 0, "state": "inactive"})
        self._buffers[address] = buffer
        self.segments.append({"address": address, "blocks": blocks})
        before, self.allocator.current_tag = self.allocator.current_tag, tag
        self.allocator._python_malloc_callback((0, SEGMENT, address, 0))
        self.allocator.current_tag = before
        self.map(0, SEGMENT, address, 0)
        return tensors

    def map(self, device: int, size: int, address: int, handle: int) -> None:
        assert address not in self.mapped
        self.mapped.add(address)

    def unmap(self, device: int, size: int, address: int, handle: int) -> None:
        self.mapped.remove(address)
        ctypes.memset(address, 0x55, size)

    def backups(self) -> int:
        """Bytes of copies in the host's memory."""
        found = [data.cpu_backup_tensor for data in self.allocator.pointer_to_data.values()]
        return sum(copy.nbytes for copy in found if copy is not None)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    """The device, under vLLM's allocator."""
    import vllm.device_allocator
    from vllm.device_allocator import cumem

    allocator = cumem.CuMemAllocator()
    found = Device(allocator)
    monkeypatch.setattr(cumem, "python_create_and_map", found.map)
    monkeypatch.setattr(cumem, "python_unmap_and_release", found.unmap)
    monkeypatch.setattr(cumem, "libcudart", SimpleNamespace(cudaMemcpy=ctypes.memmove))
    monkeypatch.setattr(cumem, "PIN_MEMORY", False)
    monkeypatch.setattr(cumem, "gc", SimpleNamespace(collect=lambda: 0))  # seconds, among vLLM's modules
    monkeypatch.setattr(vllm.device_allocator, "get_mem_allocator_instance", lambda: allocator)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (-len(found.mapped) * SEGMENT, 10**9))
    return found


class Model(torch.nn.Module):
    """Weights of all kinds: alone, two together, beside a buffer, and beside what is no part of the model."""

    def __init__(self, gpu: Device) -> None:
        super().__init__()
        (alone,), pair, (norm, rotary), (bias, self.state) = (
            gpu.hold(*sizes) for sizes in [(512,), (64, 128), (8, 64), (9, 9)]
        )
        for name, tensor in {"alone": alone, "left": pair[0], "right": pair[1], "norm": norm, "bias": bias}.items():
            self.register_parameter(name, torch.nn.Parameter(tensor))
        self.register_buffer("rotary", rotary, persistent=False)
        (self.runners,) = gpu.hold(200)
        for number, tensor in enumerate([*self.parameters(), self.rotary, self.state, self.runners]):
            tensor.data.fill_(number + 1)
        self.whole = ("alone", "left", "right")

    def values(self) -> dict[str, float]:
        kept = {"rotary": self.rotary, "state": self.state, "runners": self.runners}
        return {
            name: float(tensor.detach().mean()) for name, tensor in {**dict(self.named_parameters()), **kept}.items()
        }


def worker_of(model: Model, **settings: Any) -> Any:
    """vLLM's own worker, without the device that it would open."""
    from vllm.v1.worker.gpu_worker import Worker

    known = {"sleep_mode_backend": "cumem", "enable_nccl_comm_suspend": False, "quantization": None}
    config = SimpleNamespace(**known | {"sleep_preserve_parameter_names": []} | settings)
    worker = object.__new__(Worker)
    worker.vllm_config = SimpleNamespace(model_config=config, speculative_config=None, lora_config=None)
    worker.model_config, worker._sleep_mode_backend = config, None
    worker._sleep_saved_parameters = worker._sleep_saved_buffers = worker._sleep_saved_draft_buffers = {}
    worker.model_runner = SimpleNamespace(get_model=lambda: model, model=model)
    worker.synchronize_device = lambda: None
    return worker


def installed(worker: Any) -> Discarding | None:
    return install(lambda method, args: [method(worker, *args)])


def sync(model: Model, *names: str) -> None:
    """What a weight sync does to vLLM's weights."""
    for name in names:
        model.get_parameter(name).data.fill_(7.0)


def test_a_sleep_drops_weights_and_keeps_whatever_shares_memory_with_anything_else(gpu):
    model = Model(gpu)
    before, worker = model.values(), worker_of(model)
    discarding = installed(worker)
    assert discarding is not None and worker.vllm_config.model_config.sleep_mode_backend == NAME
    assert not discarding.drops
    gpu.hold(5, tag="kv_cache")
    for _ in range(3):
        worker.sleep(1)
        assert discarding.drops and not gpu.mapped and gpu.backups() == 3 * SEGMENT  # of five with the tag of weights
        worker.wake_up(["weights"])
        assert len(gpu.mapped) == 5
        found = model.values()
        assert {name: found[name] for name in found if name not in model.whole} == {
            name: value for name, value in before.items() if name not in model.whole
        }
        assert all(found[name] != before[name] for name in model.whole)
        sync(model, "alone", "left", "right", "norm", "bias")
        discarding.check()
        worker.wake_up(["kv_cache"])
        assert len(gpu.mapped) == 6 and gpu.backups() == 0
        before = model.values()


@pytest.mark.parametrize("lacks", ["blocks", "address", "pools"])
def test_everything_is_backed_up_if_memory_is_described_in_another_way(lacks, gpu):
    model = Model(gpu)
    before, worker = model.values(), worker_of(model)
    discarding = installed(worker)
    assert discarding is not None
    if lacks == "pools":
        gpu.allocator.allocator_and_pools["weights"] = [object()]
    else:
        for segment in gpu.segments:
            del segment[lacks]
    worker.sleep(1)
    assert gpu.backups() == 5 * SEGMENT and not discarding.drops
    worker.wake_up(["weights"])
    assert model.values() == before
    discarding.check()


def test_vllms_own_sleep_backs_up_everything(gpu):
    """The comparison: twice the bytes, and a copy of each weight."""
    worker = worker_of(Model(gpu))
    worker.sleep(1)
    assert gpu.backups() == 5 * SEGMENT


def test_a_sync_that_leaves_a_dropped_weight_out_ends_the_run_at_its_first(gpu):
    model = Model(gpu)
    worker = worker_of(model)
    discarding = installed(worker)
    assert discarding is not None
    worker.sleep(1)
    worker.wake_up(["weights"])
    sync(model, "alone", "left")
    with pytest.raises(NumericsError, match=r"does not bring 1 of vLLM's weights.*: right") as caught:
        discarding.check()
    assert "sleep_preserve_parameter_names: [right]" in str(caught.value.remedy)


def test_weights_that_the_user_wants_to_keep_are_backed_up_with_what_shares_their_memory(gpu):
    model = Model(gpu)
    worker = worker_of(model, sleep_preserve_parameter_names=["ri*"])
    discarding = installed(worker)
    assert discarding is not None
    before = model.values()
    worker.sleep(1)
    assert gpu.backups() == 4 * SEGMENT
    worker.wake_up(None)
    sync(model, "alone")
    discarding.check()
    assert {**model.values(), "alone": before["alone"]} == before


def test_a_sleep_in_the_middle_of_waking_keeps_what_it_must(gpu):
    """A sync fails: the cache still sleeps, and the weights are half there."""
    model = Model(gpu)
    worker = worker_of(model)
    assert installed(worker) is not None
    gpu.hold(5, tag="kv_cache")
    kept = {name: value for name, value in model.values().items() if name not in model.whole}
    worker.sleep(1)
    worker.wake_up(["weights"])
    sync(model, "alone")
    worker.sleep(1)
    worker.sleep(1)
    worker.wake_up(["weights"])
    assert model.values().items() >= kept.items()


@pytest.mark.parametrize(
    "settings", [{"quantization": "fp8"}, {"sleep_mode_backend": None}], ids=["quantised weights", "older interface"]
)
def test_other_vllms_sleep_in_their_own_way(settings, gpu):
    model = Model(gpu)
    worker = worker_of(model, **settings)
    assert installed(worker) is None
    assert worker.vllm_config.model_config.sleep_mode_backend == settings.get("sleep_mode_backend", "cumem")


def test_a_vllm_without_the_registry_sleeps_in_its_own_way(gpu, monkeypatch):
    monkeypatch.setattr(sleep_backend, "backend", sleep_backend.backend.__wrapped__)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.sleep_mode_backend", None)
    assert installed(worker_of(Model(gpu))) is None


def test_a_plan_knows_how_vllm_sleeps_without_importing_it(tmp_path, monkeypatch):
    assert discards_weights(SamplerConfig())
    assert not discards_weights(SamplerConfig(engine={"quantization": "fp8"}))
    old = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: old)
    assert not discards_weights(SamplerConfig())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # a driver without engines
    assert discards_weights(SamplerConfig())


def test_vllm_still_has_what_the_backend_uses():
    import inspect

    from vllm import EngineArgs
    from vllm.config import ModelConfig
    from vllm.device_allocator import DEFERRABLE_TAGS, AllocationData
    from vllm.device_allocator.cumem import CuMemAllocator
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory
    from vllm.v1.worker.gpu_worker import Worker

    assert list(inspect.signature(SleepModeBackendFactory.register_backend).parameters) == [
        "name", "module_path", "class_name",
    ]  # fmt: skip
    assert list(inspect.signature(CuMemBackend.suspend).parameters) == ["self", "level"]
    assert list(inspect.signature(CuMemBackend.resume).parameters) == ["self", "tags"]
    assert isinstance(Worker.sleep_mode_backend, property) and "weights" in DEFERRABLE_TAGS
    assert {"tag", "cpu_backup_tensor"} <= AllocationData.__dataclass_fields__.keys()
    assert vars(CuMemAllocator()).keys() >= {"pointer_to_data", "allocator_and_pools"}
    for name in ("sleep_mode_backend", "sleep_preserve_parameter_names"):
        assert hasattr(ModelConfig, name) or name in ModelConfig.__dataclass_fields__
    assert "sleep_preserve_parameter_names" in EngineArgs.__dataclass_fields__
