"""The arguments that ``sampler.engine`` may hold, found without importing vLLM, which takes seconds."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mmrl.config.problems import suggestion
from mmrl.config.yaml_tree import join_errors
from mmrl.errors import ConfigError, MMRLError

OWNED_KEYS: Mapping[str, str] = {
    "model": "model.path",
    "dtype": "model.dtype",
    "max_model_len":
        "data.max_prompt_tokens + sampler.max_new_tokens, or with an environment an episode's limits",
    "seed": "trainer.seed",
    "tensor_parallel_size": "sampler.tensor_parallel_size",
    "pipeline_parallel_size": "sampler.pipeline_parallel_size",
    "gpu_memory_utilization": "sampler.gpu_memory_utilization",
    "trust_remote_code": "model.trust_remote_code",
    "limit_mm_per_prompt":
        "the most images of a row of data.train and data.eval (data.max_images bounds them), and with an environment "
        "environment.max_images",
    "mm_processor_kwargs": "data.min_pixels and data.max_pixels: images are resized before vLLM sees them",
    "distributed_executor_backend": "cluster: each rank is a process that mmrl has started",
    "load_format": "the model's folder, whose weights are in safetensors",
    "enable_sleep_mode": "the device: on a GPU the sampler gives its memory to the learner while that works",
    "logprobs_mode": "the learner: its log-probs are those of the distribution that was sampled from",
    "generation_config":
        "sampler.temperature alone: the folder's own sampling defaults would change the distribution that is learned "
        "from",
    "logits_processors": "the model's vocabulary: tokens that stand for images are never sampled",
}  # fmt: skip
"""vLLM arguments that mmrl decides, and from what."""


def check_engine_keys(engine: Mapping[str, Any], known: Collection[str] | None = None) -> None:
    """Check that vLLM knows the arguments, and that none of them is mmrl's own.

    Args:
        known: vLLM's arguments; by default those in its source. If none are found there, unknown names pass.

    Raises:
        ConfigError: Some are not possible; it names all of them.
    """
    known = written_arguments() if known is None else known
    errors: list[MMRLError] = []
    for key in (key for key in OWNED_KEYS if key in engine):
        remedy = f"change that, and remove {key} here (`sampler.engine={{}}` removes all that a file has here)"
        what = f"mmrl decides {key}, from {OWNED_KEYS[key]}"
        errors.append(ConfigError(what, where=f"sampler.engine.{key}: {engine[key]!r}", remedy=remedy))
    for key in sorted(engine.keys() - known) if known else ():
        hint = suggestion(key, [name for name in known if name not in OWNED_KEYS])
        what = f"vLLM has no argument {key}"
        errors.append(ConfigError(what, where="sampler.engine", remedy=hint or "check the name"))
    if errors:
        raise join_errors(errors)


@cache
def written_arguments() -> frozenset[str]:
    """The fields of ``EngineArgs`` in vLLM's source; empty if vLLM is not installed, or its source looks different."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return frozenset()
    try:
        tree = ast.parse((Path(found.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return frozenset()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs" and not node.bases:
            fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
            return frozenset(target.id for target in fields if isinstance(target, ast.Name))
    return frozenset()
