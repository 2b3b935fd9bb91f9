"""The memory that a run's ranks need, for the check before anything is fetched or loaded."""

from __future__ import annotations

from mmrl.commands.plan.footprint import PlannedModel
from mmrl.commands.plan.proposal import least_memory
from mmrl.config.sections import Config
from mmrl.engine.device import DeviceKind
from mmrl.engine.machine.host_memory import HostMemory
from mmrl.runs.setup import RunSetup


class PlannedNeeds:
    """Implements ``cluster.launch.MemoryNeeds``: what a plan counts."""

    def __init__(self, config: Config, setup: RunSetup) -> None:
        self._config, self._setup = config, setup

    def gpu_bytes(self) -> int:
        return least_memory(self._config, self._setup)

    def host_memory(self, kind: DeviceKind) -> HostMemory:
        config, setup = self._config, self._setup
        if kind == "cpu" and config.learner.offload == "none":
            return HostMemory()  # host and device are one
        model = PlannedModel(config, setup.folder, setup.part_sizes, setup.algorithm, kind)
        return model.host(config, samples=setup.with_sampler and config.sampler.name == "vllm")
