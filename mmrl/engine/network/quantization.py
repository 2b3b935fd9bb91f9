"""NF4: weights of linear layers in 4 bits each (QLoRA: Dettmers et al., 2023, arXiv:2305.14314, section 3).

64 weights in a row are stored as their largest absolute value and, of each, the nearest of sixteen fractions of it.
256 of those largest values are stored in 8 bits each in the same manner ("double quantisation"). That makes 0.516 bytes
a weight. bitsandbytes computes both ways.

One tensor of bytes holds all of a weight, so that DeepSpeed sends, shards and gathers it like any other frozen weight,
and has nothing to round. Weights are always quantised by the host's processor, on rank 0 alone: a GPU, an evaluation
and an export have the same bytes.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mmrl.engine.network.family import Family
from mmrl.errors import ConfigError, ResourceError, first_line
from mmrl.ops.memory import NF4_BLOCK, NF4_BLOCKS

PART = "language"
"""The part of a model whose linear layers are quantised: a vision tower is small, and loses more by it."""
FILE = "quantization_config.json"
"""The file beside an adapter that says how the model that it adapts is quantised, as transformers'
``BitsAndBytesConfig`` takes it."""
_SETTINGS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
INSTALL = "pip install 'mmrl-train[quantize]', or pip install 'bitsandbytes>=0.49'"


class QuantizedLinear(torch.nn.Linear):
    """A frozen linear layer whose ``weight`` is packed: (bytes,) uint8. peft adapts it like any other linear layer.

    Args:
        linear: The layer; its bias is kept as it is.
        dtype: Element type in which the layer computes.
        with_weights: False to leave the content open.
    """

    weight: torch.nn.Parameter

    def __init__(self, linear: torch.nn.Linear, dtype: torch.dtype, *, with_weights: bool = True) -> None:
        torch.nn.Module.__init__(self)  # that of Linear would make a whole weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = dtype
        size = sum(_sizes(self.in_features * self.out_features))
        packed = pack(linear.weight.detach()) if with_weights else torch.empty(size, dtype=torch.uint8)
        assert len(packed) == size
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        shape = self.out_features, self.in_features
        found: torch.Tensor = _Product.apply(input, self.weight, self.bias, shape)  # type: ignore[no-untyped-call]
        return found

    def unpacked(self, packed: torch.Tensor | None = None) -> torch.Tensor:
        """(out, in) the weight as the layer computes with it; a partitioned one must be gathered."""
        packed = self.weight.detach() if packed is None else packed
        return unpack(packed, (self.out_features, self.in_features), self.dtype)


class _Product(torch.autograd.Function):
    """``F.linear`` of a packed weight, which is unpacked again for the backward pass and not kept until then."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, shape: tuple[int, int]
    ) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = shape
        return F.linear(input, unpack(packed, shape, input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (gradient,) = gradients
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        (packed,) = ctx.saved_tensors
        return gradient @ unpack(packed, ctx.shape, gradient.dtype), None, None, None


def quantizable(layers: Mapping[str, torch.nn.Linear], family: Family) -> list[str]:
    """Names of the layers that are quantised, of a model's linear layers without its head."""
    # Two weights of a row share a byte.
    return [name for name, layer in layers.items() if family.part_of(f"{name}.") == PART and layer.in_features % 2 == 0]


def quantize(model: Any, names: Sequence[str], dtype: torch.dtype, *, with_weights: bool = True) -> None:
    """Quantise a model's layers, one after the other; each whole weight is dropped before the next one.

    Args:
        dtype: Element type in which the model computes.
        with_weights: False for a model whose weights have no content yet.
    """
    for name in names:
        model.set_submodule(name, QuantizedLinear(model.get_submodule(name), dtype, with_weights=with_weights))


@torch.no_grad()
def round_weights(model: Any, names: Sequence[str], dtype: torch.dtype) -> None:
    """Give a model's layers the weights that they have once they are quantised; the weights stay whole.

    Args:
        dtype: Element type as which they are unpacked.
    """
    for name in names:
        layer = model.get_submodule(name)
        layer.weight.copy_(unpack(pack(layer.weight), (layer.out_features, layer.in_features), dtype))


def packed_layers(model: torch.nn.Module) -> Iterator[QuantizedLinear]:
    """A model's quantised layers."""
    return (module for module in model.modules() if isinstance(module, QuantizedLinear))


def whole(layer: torch.nn.Linear, stored: torch.Tensor | None = None) -> torch.Tensor:
    """(out, in) a linear layer's weight, packed or not; a partitioned one must be gathered.

    Args:
        stored: The layer's ``weight``, if a pass has kept it.
    """
    stored = layer.weight.detach() if stored is None else stored
    return layer.unpacked(stored) if isinstance(layer, QuantizedLinear) else stored


def pack(weight: torch.Tensor) -> torch.Tensor:
    """(bytes,) a weight in 4 bits; the same for a weight of any element type, with any number of threads."""
    functional = _bitsandbytes()
    weight = weight.detach().float().contiguous()
    codes, state = functional.quantize_4bit(weight, blocksize=NF4_BLOCK, quant_type="nf4")
    # As ``compress_statistics`` does, whose mean in float32 depends on the number of threads.
    offset = state.absmax.double().mean().float()
    scales, of_scales = functional.quantize_blockwise(state.absmax - offset, blocksize=NF4_BLOCKS)
    parts = (codes, scales, of_scales.absmax, offset)
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])


def unpack(packed: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """A weight of this shape from its bytes."""
    functional, (fractions, steps) = _bitsandbytes(), _tables(str(packed.device))
    codes, scales, *rest = packed.split(_sizes(math.prod(shape)))
    of_scales, offset = (part.clone().view(torch.float32) for part in rest)  # the clone is aligned
    scale = functional.QuantState(of_scales, code=steps, blocksize=NF4_BLOCKS, dtype=torch.float32)
    state = functional.QuantState(
        scales,
        shape=torch.Size(shape),
        code=fractions,
        blocksize=NF4_BLOCK,
        quant_type="nf4",
        dtype=dtype,
        offset=offset[0],
        state2=scale,
    )
    found: torch.Tensor = functional.dequantize_4bit(codes[:, None], state)
    return found


def check_installed() -> None:
    """Check that bitsandbytes is installed, without importing it: it would look for GPUs.

    Raises:
        ResourceError: It is not.
    """
    if find_spec("bitsandbytes") is None:
        raise ResourceError("bitsandbytes is not installed", where="model.quantize: nf4", remedy=INSTALL)


def check_device(torch_device: str) -> None:
    """Check that bitsandbytes has kernels for a device, and that they compute what they should.

    Raises:
        ResourceError: They do not.
    """
    check_installed()
    weight = torch.linspace(-3, 3, 4 * NF4_BLOCK * NF4_BLOCKS).view(NF4_BLOCK, -1).sin()
    try:
        packed = pack(weight)
        found = unpack(packed.to(torch_device), (weight.shape[0], weight.shape[1]), torch.float32).cpu()
        reason = "" if float((found - weight).abs().max()) < 0.2 else "it gives wrong values"
    except Exception as error:  # its native library's: it raises whatever a missing function ends in
        reason = first_line(error)
    if reason:
        raise ResourceError(
            f"bitsandbytes cannot compute on this device: {reason}",
            where=f"model.quantize: nf4 on {torch_device}",
            possible="a build of bitsandbytes with a backend for it; `python -m bitsandbytes` examines it",
            remedy=f"{INSTALL}; or remove model.quantize",
        )


def write(model: torch.nn.Module, target: Path) -> None:
    """Write ``FILE`` for a model with adapters, if it is quantised."""
    dtypes = {layer.dtype for layer in packed_layers(model)}
    if not dtypes:
        return
    linear = (name for name, module in model.named_modules() if type(module) is torch.nn.Linear)
    left = [name.removesuffix(".base_layer") for name in linear if ".lora_" not in name]
    compute = str(dtypes.pop()).removeprefix("torch.")
    content = {**_SETTINGS, "bnb_4bit_compute_dtype": compute, "llm_int8_skip_modules": left}
    (target / FILE).write_text(json.dumps(content, indent=2) + "\n")


def read(folder: Path) -> bool:
    """True if the model that a folder's adapter adapts is quantised.

    Raises:
        ConfigError: ``FILE`` cannot be read, or means another quantisation than this module's.
    """
    path = folder / FILE
    if not path.exists():
        return False
    try:
        found: Mapping[str, Any] = json.loads(path.read_text())
        strange = [f"{key} is {found.get(key)!r}" for key, value in _SETTINGS.items() if found.get(key) != value]
    except (OSError, ValueError, AttributeError) as error:
        strange = [f"{type(error).__name__}: {error}"]
    if strange:
        raise ConfigError(
            f"the model that the adapter adapts is quantised in an unknown way: {', '.join(strange)}",
            where=str(path),
            possible="nf4 with double quantisation, as a run with model.quantize: nf4 writes it",
        )
    return True


def _sizes(count: int) -> tuple[int, int, int, int]:
    """Bytes of a packed weight's parts: codes, scales, scales of the scales, and what is added to the scales."""
    blocks = -(-count // NF4_BLOCK)
    return -(-count // 2), blocks, 4 * -(-blocks // NF4_BLOCKS), 4


@cache
def _bitsandbytes() -> Any:
    # It offers to fetch a kernel from the hub that nothing here uses.
    said = logging.getLogger("bitsandbytes.backends.cpu.ops")
    said.setLevel(logging.ERROR)
    from bitsandbytes import functional

    return functional


@cache
def _tables(torch_device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The sixteen fractions of a block's scale, and the 256 of a scale's."""
    functional = _bitsandbytes()
    fractions: torch.Tensor = functional.get_4bit_type("nf4", device=torch_device)
    steps: torch.Tensor = functional.create_dynamic_map().to(torch_device)
    return fractions, steps
