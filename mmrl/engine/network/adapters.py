"""LoRA: a product of two thin matrices beside frozen linear layers (Hu et al., 2021, arXiv:2106.09685, section 4.1).

An adapted layer answers ``x W^T + (alpha / rank) x A^T B^T``. ``A`` starts at random and ``B`` at zero: a policy begins
as the model that it adapts, and is that model again without its adapters. The sampler gets the merged weights
``W + (alpha / rank) B A`` of every layer, the vision tower's included. In a type narrower than float32 the learner
computes with these too: see ``merged_linear``.

A folder with an adapter holds, as peft writes and reads it, ``adapter_config.json`` and ``adapter_model.safetensors``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from mmrl.config.sections import LoraConfig
from mmrl.engine.network.family import SCORE_WEIGHT, Family
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.merged_linear import NAME, Kept, MergedLinear, merged
from mmrl.engine.network.quantization import whole
from mmrl.errors import ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""peft's prefix of the names of a model's own modules."""
_SCORE = f"{_PREFIX}{SCORE_WEIGHT}"
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, "gaussian"),
    **dict.fromkeys(("use_dora", "use_rslora", "fan_in_fan_out", "lora_bias", "use_qalora"), (False, None)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({}, None)),
    **dict.fromkeys(("trainable_token_indices", "target_parameters", "layer_replication"), (None,)),
    "modules_to_save": (None, ["score"]),
}  # fmt: skip
"""Settings of peft, and the values that mean an adapter as this module computes it."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter beside one linear layer.

    Attributes:
        name: The layer's name in the model without adapters.
        layer: peft's layer, or what takes its place.
    """

    name: str
    layer: Any

    @property
    def weight(self) -> torch.nn.Parameter:
        """(out, in), frozen; (bytes,) if the layer is quantised."""
        found: torch.nn.Parameter = self.layer.base_layer.weight
        return found

    @property
    def factors(self) -> dict[str, torch.nn.Parameter]:
        """A (rank, in) and B (out, rank), by the ends of their names in files."""
        return {"lora_A.weight": self.layer.lora_A[NAME].weight, "lora_B.weight": self.layer.lora_B[NAME].weight}

    def merged(self, dtype: torch.dtype, kept: Kept | None = None) -> torch.Tensor:
        """(out, in) ``W + (alpha / rank) B A``; partitioned parameters must be gathered."""
        a, b = (factor.detach() for factor in self.factors.values())
        return merged(whole(self.layer.base_layer), a, b, self.layer.scaling[NAME], dtype, kept)


def linear_layers(model: Any) -> dict[str, torch.nn.Linear]:
    """A transformers model's linear layers by name, its head excepted."""
    heads = (model.get_output_embeddings(), getattr(model, "score", None))
    modules = model.named_modules()
    return {name: each for name, each in modules if isinstance(each, torch.nn.Linear) and each not in heads}


def chosen_layers(names: Sequence[str], family: Family, targets: Sequence[str]) -> list[str]:
    """The layers that targets name: parts (``language``, ``vision``, ``projector``), names, ends of names or patterns.

    Raises:
        ConfigError: A target names no layer.
    """
    chosen, names = set[str](), [name for name in names if family.uses(name)]
    for target in targets:
        if target in family.parts:
            found = {name for name in names if family.part_of(f"{name}.") == target}
        else:
            found = {name for name in names if fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")}
        if not found:
            ends = sorted({name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdecimal()})
            raise ConfigError(
                f"no linear layer of the model is meant by {target!r}",
                where="model.lora.targets",
                possible=f"{', '.join(family.parts)}; ends of names, such as {', '.join(ends)}; patterns with *",
                remedy="see `mmrl check` for the model's family; its head, embeddings and mixed experts are "
                "not adapted",
            )
        chosen |= found
    return [name for name in names if name in chosen]


def attach(model: Any, names: Sequence[str], lora: LoraConfig, seed: int) -> list[Adapter]:
    """Put adapters beside the layers; only they are trained from now on, and a reward model's head.

    The same seed gives the same adapters.
    """
    import peft
    from peft.tuners.tuners_utils import BaseTunerLayer

    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(names))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model)
    found = [Adapter(name, layer) for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)]
    assert [adapter.name for adapter in found] == list(names), "peft adapted other layers"
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == SCORE_WEIGHT)
    for adapter in found:
        for factor in adapter.factors.values():
            factor.data = factor.data.to(model.dtype)  # peft takes the weight's, which packed ones do not have
            factor.requires_grad_(True)
    return [_in_type_of(model, adapter) for adapter in found]


def share_frozen(model: Any, base: Any) -> None:
    """Give a model the frozen parameters of another one with the same body and adapters, in place of its own.

    Both compute with them from then on, each with the adapters of its own.
    """
    others = dict(base.named_parameters())
    for name, parameter in list(model.named_parameters()):
        if not parameter.requires_grad:
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, others[name])


def _in_type_of(model: Any, adapter: Adapter) -> Adapter:
    """The adapter as it computes in the model's element type."""
    if model.dtype.itemsize >= torch.float32.itemsize:
        return adapter
    layer = MergedLinear(adapter.layer)
    model.set_submodule(adapter.name, layer)
    return Adapter(adapter.name, layer)


@contextmanager
def switched_off(adapters: Sequence[Adapter]) -> Iterator[None]:
    """The model without its adapters."""
    for adapter in adapters:
        adapter.layer.enable_adapters(False)
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.layer.enable_adapters(True)


def file_names(adapters: Sequence[Adapter], score: torch.nn.Parameter | None = None) -> dict[str, torch.nn.Parameter]:
    """Every trained matrix under its name in ``adapter_model.safetensors``; a reward model's ``score`` is one."""
    found = {f"{_PREFIX}{each.name}.{end}": factor for each in adapters for end, factor in each.factors.items()}
    return found if score is None else found | {_SCORE: score}


def write_config(
    folder: ModelFolder, adapters: Sequence[Adapter], lora: LoraConfig, target: Path, *, scores: bool
) -> None:
    """Write ``adapter_config.json``, by which peft and transformers' ``from_pretrained`` find the model itself."""
    import peft

    base = folder.name if folder.commit else str(Path(folder.path).resolve())
    task = "SEQ_CLS" if scores else None if folder.family.vision else "CAUSAL_LM"
    peft.LoraConfig(
        task_type=task,
        modules_to_save=["score"] if scores else None,
        base_model_name_or_path=base,
        revision=folder.commit,
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=[adapter.name for adapter in adapters],
        inference_mode=True,
    ).save_pretrained(str(target))


def read(adapters: Sequence[Adapter], folder: Path, score: torch.nn.Parameter | None = None) -> list[torch.Tensor]:
    """The matrices of a folder, in the order of ``file_names``.

    Raises:
        ConfigError: The folder holds other matrices, or other shapes.
    """
    own, saved = file_names(adapters, score), _read(folder)
    different = sorted(
        name
        for name in own.keys() | saved.keys()
        if name not in own or name not in saved or own[name].shape != saved[name].shape
    )
    if different:
        raise ConfigError(
            f"the checkpoint's adapter is another one: {len(different)} matrices differ in name or shape",
            where=f"{folder / WEIGHTS}: {', '.join(different[:3])}",
            remedy="go on with the checkpoint's model.lora",
        )
    return [saved[name] for name in own]


@torch.no_grad()
def load(adapters: Sequence[Adapter], folder: Path, score: torch.nn.Parameter | None = None) -> None:
    """Take over the matrices of a folder; errors as of ``read``."""
    saved = read(adapters, folder, score)
    for parameter, values in zip(file_names(adapters, score).values(), saved, strict=True):
        parameter.copy_(values)


def is_adapter(folder: Path) -> bool:
    """True if a folder holds an adapter, and no whole model."""
    return (folder / CONFIG).exists()


def read_config(folder: Path) -> tuple[LoraConfig, str, str | None]:
    """A folder's adapter, with its layers as targets, and name and revision of the model that it adapts.

    Raises:
        ConfigError: It is no plain LoRA, or cannot be read.
    """
    try:
        config = json.loads((folder / CONFIG).read_text())
        strange = sorted(key for key, values in _PLAIN.items() if config.get(key, values[0]) not in values)
        base = str(config["base_model_name_or_path"]), config.get("revision")
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"the adapter's config cannot be read: {type(error).__name__}: {error}"
        raise ConfigError(what, where=str(folder / CONFIG), possible="a LoRA as peft writes it") from error
    if strange:
        raise ConfigError(
            f"the adapter is no plain LoRA: {', '.join(f'{key} is {config[key]!r}' for key in strange)}",
            where=str(folder / CONFIG),
            remedy="merge it with peft",
        )
    # Unchecked: peft takes any alpha.
    return LoraConfig.model_construct(rank=rank, alpha=alpha, targets=tuple(_layers(_read(folder), folder))), *base


@torch.no_grad()
def merge(model: Any, folder: Path) -> None:
    """Add a folder's adapter to the weights of a model without adapters.

    Raises:
        ConfigError: The adapter is no plain LoRA, or belongs to another model.
    """
    lora, *_ = read_config(folder)
    saved, weights = _read(folder), dict(model.named_parameters())
    if strangers := [name for name in lora.targets if f"{name}.weight" not in weights]:
        raise ConfigError(
            f"the adapter is that of another model: {len(strangers)} of its layers are not in this one",
            where=f"{folder / WEIGHTS}: {', '.join(strangers[:3])}",
            remedy="name the model that was adapted",
        )
    for name in lora.targets:
        a, b = (saved[f"{_PREFIX}{name}.lora_{letter}.weight"] for letter in "AB")
        weight = weights[f"{name}.weight"]
        weight.copy_(merged(weight, a, b, lora.alpha / lora.rank, weight.dtype))
    if _SCORE in saved:
        weights[SCORE_WEIGHT].copy_(saved[_SCORE])


def dtype(folder: Path) -> torch.dtype:
    """The element type of a folder's adapter, in which the run that wrote it computed."""
    return next(iter(_read(folder).values())).dtype


def _read(folder: Path) -> dict[str, torch.Tensor]:
    """The matrices of a folder's adapter."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"the adapter's weights cannot be read: {error}",
            where=str(folder / WEIGHTS),
            possible="safetensors; formats that hold Python objects are not read",
        ) from error


def _layers(saved: Mapping[str, torch.Tensor], folder: Path) -> list[str]:
    """Names of the layers that matrices are for."""
    ends = {f".lora_{letter}.weight" for letter in "AB"}
    found = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in saved if name != _SCORE}
    expected = {f"{_PREFIX}{name}{end}" for name in found for end in ends} | ({_SCORE} & saved.keys())
    if not saved or (strange := sorted(expected ^ saved.keys())):
        raise ConfigError(
            "the adapter is no LoRA of linear layers" + (f": {', '.join(strange[:3])}" if saved else ""),
            where=str(folder / WEIGHTS),
            remedy="merge it with peft",
        )
    return sorted(found)
