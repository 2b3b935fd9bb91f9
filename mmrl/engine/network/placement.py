"""Places of weights: sharded over the ranks, whole on the device, or in the host's memory between their uses.

Rank 0 alone has read them (see ``policy.load_policy``). Weights of other ranks have no content and take no memory until
rank 0 sends them, parameter by parameter, to their places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from mmrl.engine import device
from mmrl.engine.network.merged_linear import MergedLinear
from mmrl.engine.network.policy import Policy
from mmrl.engine.network.weights import numel, shards


def place(policy: Policy, settings: Mapping[str, Any], torch_device: str) -> None:
    """Bring a policy to the device; at ZeRO 3 each parameter stays there only while it is shared out among the ranks.

    Collective. Below ZeRO 3, DeepSpeed's engine sends rank 0's parameters to the others.

    Args:
        settings: DeepSpeed's settings.
    """
    if settings["zero_optimization"]["stage"] == 3:
        import deepspeed

        for buffer in policy.buffers():
            buffer.data = buffer.data.to(torch_device)
        # Not left to the engine, which moves a whole module to the device before it partitions it.
        deepspeed.zero.Init(module=policy, config_dict_or_path=dict(settings))
        for module in policy.modules():
            if isinstance(module, MergedLinear):  # DeepSpeed gathers a module's own parameters for it, not its parts'
                for parameter in module.parameters():
                    deepspeed.zero.register_external_parameter(module, parameter)
    else:
        policy.to(torch_device)
    for buffer in policy.buffers():
        buffer.data = _from_rank_0(buffer.data, torch_device)


def place_frozen(
    policy: Policy, settings: Mapping[str, Any], kind: device.DeviceKind
) -> tuple[Any, Callable[[], AbstractContextManager[object]]]:
    """Bring a policy that nothing trains to its place, as ranks do together.

    At ZeRO 3 it is sharded as the trained policy is, in an engine of its own, which gathers what it computes with.
    Below, it is on a GPU only while it is used; see ``device.reference_place``.

    Args:
        settings: DeepSpeed's settings for the trained policy.

    Returns:
        The module to call in the policy's place, and a block in which it can be called.
    """
    torch_device = device.torch_device(kind)
    where = device.reference_place(kind, settings["zero_optimization"]["stage"])
    if where == "sharded":
        import deepspeed

        own = _without_optimizer(settings)
        place(policy, own, torch_device)
        engine, *_ = deepspeed.initialize(model=policy, config=own)
        return engine, nullcontext
    for buffer in policy.buffers():
        buffer.data = _from_rank_0(buffer.data, torch_device)
    if where == "host":
        return policy, HostWeights(policy, torch_device, pinned=True).on_device
    for parameter in policy.parameters():
        parameter.data = _from_rank_0(parameter.data, torch_device)
    return policy, nullcontext


class HostWeights:
    """A frozen module's parameters, rank 0's on every rank, in host memory and for a while on a device.

    Args:
        pinned: True if the memory is page-locked, for faster copies to a GPU.
        piece_bytes: Parameters share pieces of memory of up to this size, as torch makes pinned ones as large as the
            next power of two.
    """

    def __init__(
        self, module: torch.nn.Module, torch_device: str, *, pinned: bool, piece_bytes: int | None = None
    ) -> None:
        self._device = torch_device
        self._host: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        named = dict(module.named_parameters())
        for names in shards({name: parameter.nbytes for name, parameter in named.items()}, piece_bytes):
            parameters = [named[name] for name in names]
            dtypes = {parameter.dtype for parameter in parameters}
            assert len(dtypes) == 1, f"a frozen policy of several types: {dtypes}"
            piece = torch.empty(sum(map(numel, parameters)), dtype=dtypes.pop(), pin_memory=pinned)
            for parameter, flat in zip(parameters, piece.split([*map(numel, parameters)]), strict=True):
                parameter.data = flat.view_as(parameter).copy_(_from_rank_0(parameter.data, torch_device))
                self._host.append((parameter, parameter.data))

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the parameters on the device in a block; nothing is copied back, as nothing changes them."""
        try:
            for parameter, host in self._host:
                parameter.data = host.to(self._device, non_blocking=True)
            yield
        finally:
            for parameter, host in self._host:
                parameter.data = host


def _from_rank_0(tensor: torch.Tensor, torch_device: str) -> torch.Tensor:
    """Rank 0's content, on the device; collective."""
    found = tensor.to(torch_device).contiguous()
    torch.distributed.broadcast(found, 0)
    return found


def _without_optimizer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's settings for weights that nothing trains; they are offloaded like the policy's."""
    zero = {key: value for key, value in settings["zero_optimization"].items() if key != "offload_optimizer"}
    return {key: value for key, value in settings.items() if key != "optimizer"} | {"zero_optimization": zero}
