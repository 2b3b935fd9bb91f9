"""Models of the networks that are trained, as they are read: from their folders, or from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mmrl.config.sections import Config
from mmrl.engine import device
from mmrl.engine.learner.learner_settings import check_overlap
from mmrl.engine.network import adapters
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.placement import place
from mmrl.engine.network.policy import Loading, Policy, load_policy
from mmrl.engine.network.weights import Failures
from mmrl.engine.spec import EngineSpec
from mmrl.engine_api import NetworkFiles
from mmrl.errors import ConfigError


def read_trained(
    spec: EngineSpec,
    role: str,
    folder: ModelFolder,
    config: Config,
    loading: Loading | None,
    kind: device.DeviceKind,
    precision: str,
    *,
    base: Policy | None = None,
) -> Policy:
    """Read a network's model on rank 0, and build it without content on the others; see ``placement``.

    Args:
        folder: The folder that it begins from.
        config: The run's, with the network's own settings.
        loading: Reads the folder as another class of model than a policy's.
        base: A model with the same body and adapters, already in its place: the frozen weights are its own then, and
            no rank reads others.

    Raises:
        MMRLError: A rank cannot; raised on all of them.
    """
    lora, reads = config.model.lora, torch.distributed.get_rank() == 0
    saved = _saved_model(spec.checkpoint, role, has_adapters=lora is not None)
    with Failures().raising():
        model = load_policy(
            folder if lora or saved is None else replace(folder, path=str(saved)),
            kind,
            precision,
            freeze=config.model.freeze,
            temperature=config.sampler.temperature,
            entropy_gradient=spec.algorithm is not None and spec.algorithm.needs().entropy_gradient,
            lora=lora,
            adapter=saved if base is None else None,
            seed=config.trainer.seed,
            with_weights=reads and base is None,
            quantize=lora is not None and config.model.quantize is not None,
            loading=loading,
        )
        if base is not None:
            adapters.share_frozen(model.model, base.model)
            if saved is not None and reads:
                adapters.load(model.adapted, saved, model.score)
    return model


def place_trained(model: Policy, settings: dict[str, Any], kind: device.DeviceKind) -> None:
    """As ``placement.place``, of a model that DeepSpeed can train with these settings.

    Raises:
        ConfigError: It cannot.
    """
    check_overlap(kind, settings, max((p.numel() for p in model.parameters() if p.requires_grad), default=0))
    place(model, settings, device.torch_device(kind))


def _saved_model(checkpoint: Path | None, role: str, *, has_adapters: bool) -> Path | None:
    """The folder of a network in a checkpoint; None without a checkpoint.

    Raises:
        ConfigError: There is none, or it holds adapters where the run trains weights, or the other way round.
    """
    if checkpoint is None:
        return None
    saved = checkpoint / NetworkFiles.of(role).model
    if not saved.is_dir():
        raise ConfigError(
            f"the checkpoint has no {role}",
            where=f"{checkpoint}: {NetworkFiles.of(role).model}",
            possible="a checkpoint of a run that trains the same networks",
            remedy="go on with the checkpoint's algorithm, or start a new run from its model folder",
        )
    if adapters.is_adapter(saved) != has_adapters:
        raise ConfigError(
            "the checkpoint holds " + ("a whole model" if has_adapters else "an adapter"),
            where=f"model.lora; {checkpoint}",
            remedy="go on with the checkpoint's model.lora, or export it and start a new run from that folder",
        )
    return saved
