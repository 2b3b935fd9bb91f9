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

OWNED_KEYS = frozenset(
    {
        "model", "dtype", "max_model_len", "seed", "distributed_executor_backend", "logprobs_mode",
        "generation_config", "logits_processors", "limit_mm_per_prompt", "tensor_parallel_size",
        "pipeline_parallel_size", "load_format", "gpu_memory_utilization", "enable_sleep_mode",
        "trust_remote_code", "mm_processor_kwargs",
    }
)  # fmt: skip
"""vLLM arguments that mmrl decides, or that have a key of their own in the config."""


def check_engine_keys(engine: Mapping[str, Any], known: Collection[str] | None = None) -> None:
    """Check that vLLM knows the arguments, and that none of them is mmrl's own.

    Args:
        known: vLLM's arguments; by default those in its source. If none are found there, unknown names pass.

    Raises:
        ConfigError: Some are not possible; it names all of them.
    """
    known = written_arguments() if known is None else known
    errors: list[MMRLError] = []
    if owned := sorted(OWNED_KEYS & engine.keys()):
        remedy = "remove it; see `mmrl schema` for the keys of the sampler section"
        errors.append(ConfigError(f"mmrl decides {', '.join(owned)}", where="sampler.engine", remedy=remedy))
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
