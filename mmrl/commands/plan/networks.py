"""The networks of a plan: the model part by part, and a critic beside it, for a program and for a person."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mmrl.config.sections import Config
from mmrl.engine.footprint import PlannedModel
from mmrl.engine.trained_sizes import TrainedSize
from mmrl.runs.budget import gigabytes
from mmrl.runs.setup import RunSetup
from mmrl.system.table import table


def model_of(setup: RunSetup, model: PlannedModel, kind: str) -> tuple[dict[str, Any], list[str]]:
    """Parameters of each part of the policy, or of the reward model that is trained.

    Args:
        kind: ``GPU`` or ``CPU``.
    """
    sizes, family, first = setup.part_sizes.items(), setup.folder.family.model_type, model.first
    parts = {part: {"trained": trained, "frozen": frozen} for part, (trained, frozen) in sizes}
    lines = table([(part, f"{_millions(own)} trained, {_millions(frozen)} frozen") for part, (own, frozen) in sizes])
    head = f"{family}, {_millions(first.trained + first.frozen)} parameters"
    lines = [f"{head}, {model.precision} on a {kind}", *lines]
    if first.quantized:
        method = setup.config.model.quantize
        lines.append(f"{_millions(first.quantized)} of them in 4 bits in the learner ({method})")
    return {"type": family, "precision": model.precision, "parts": parts, "quantized": first.quantized}, lines


def second_network(model: PlannedModel, network: TrainedSize, config: Config) -> tuple[dict[str, Any], list[str]]:
    """The bytes of a rank that a network beside the policy adds."""
    found, on_base = model.states_of(network, config), network.on_base(config)
    placed = "adapters and a score on the policy's weights" if on_base else "weights of its own"
    if config.model.lora is not None and not on_base and not network.is_own:
        placed += ", since ZeRO 3 cannot share the policy's"
    data = {"trained": network.trained, "frozen": network.frozen, "on_base": on_base, **asdict(found)}
    line = (
        f"of them the {network.role}, {placed}: weights {gigabytes(found.weights)}, float32 copies "
        f"{gigabytes(found.master)}, optimizer {gigabytes(found.optimizer)}"
    )
    kept = f", gradients {gigabytes(found.gradients)}, buckets {gigabytes(found.buckets)}"
    return data, [line + (kept if found.keeps_gradients else "; it steps before the policy does")]


def _millions(count: int) -> str:
    return f"{count / 1e9:.3g} G" if count >= 1e9 else f"{count / 1e6:.3g} M"
