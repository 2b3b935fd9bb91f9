"""DeepSpeed in a rank's process: its group of ranks, and an engine around each network that is trained."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from mmrl.engine import device
from mmrl.engine.learner.learner_settings import compiles
from mmrl.engine.network.policy import Policy
from mmrl.errors import ConfigError


def join_deepspeed(kind: device.DeviceKind) -> None:
    """Let DeepSpeed use the group of ranks that have met, before it places weights."""
    import deepspeed

    if kind == "cpu":
        # DeepSpeed would compile a shared-memory collective for a minute before it makes the group. Its
        # inference_all_reduce alone uses it, which nothing here calls. DeepSpeed keeps edits of this table.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=device.process_group_backend(kind), verbose=False)


def deepspeed_engine(policy: Policy, settings: dict[str, Any], *, checkpoints: bool) -> Any:
    """DeepSpeed's engine around a policy, with an optimizer; ``checkpoints``: activations are computed again."""
    import deepspeed

    if checkpoints:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        policy.model.disable_input_require_grads()  # it is on now, and would take a gradient through a frozen tower
    trained = [p for p in policy.parameters() if p.requires_grad]
    try:
        engine, *_ = deepspeed.initialize(model=policy, model_parameters=trained, config=settings)
    except ValidationError as error:  # DeepSpeed's own check of its settings
        first = error.errors()[0]
        key, value = ".".join(map(str, first["loc"])), first["input"]
        raise ConfigError(
            f"DeepSpeed does not take {key}: {first['msg']} (it is {value!r})",
            where="learner.deepspeed",
            remedy="write it as DeepSpeed's documentation does, or remove it",
        ) from error
    if compiles(engine.device.type, settings):
        engine.compile()  # else DeepSpeed leaves it at a notice
    return engine
