"""Environment variables that change results or keep engines from starting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from mmrl.doctor.finding import Finding
from mmrl.redaction import names_a_secret

PREFIXES = ("NCCL_", "GLOO_", "VLLM_", "HF_", "TRANSFORMERS_", "DS_", "RAY_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "OMP_")
NAMES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "RANK",
    "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "LD_PRELOAD",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """A variable that matters.

    Attributes:
        matters: Whether this value does, given whether this machine has a GPU and whether the config uses Ray.
    """

    name: str
    matters: Callable[[str, bool, bool], bool]
    remedy: str


SETTINGS = (
    Setting(
        "RAY_ADDRESS",
        lambda value, gpu, ray: bool(value) and ray,
        "where cluster.address is null or auto, Ray joins that cluster: unset it unless you mean it",
    ),
    Setting(
        "HF_HUB_OFFLINE",
        lambda value, gpu, ray: value.lower() in ("1", "true", "yes", "on"),
        "nothing is downloaded: models and datasets must be in the cache, or unset it",
    ),
    Setting(
        "CUDA_VISIBLE_DEVICES",
        lambda value, gpu, ray: gpu and value.strip() in ("", "-1"),
        "it hides every GPU: unset it to train on one",
    ),
    Setting(
        "TORCHDYNAMO_DISABLE",
        lambda value, gpu, ray: gpu and value == "1",
        "vLLM then compiles nothing, and samples slowly on a GPU: unset it",
    ),
    Setting(
        "CUDA_LAUNCH_BLOCKING",
        lambda value, gpu, ray: gpu and value == "1",
        "every kernel is waited for: unset it unless you look for a fault",
    ),
)


def setting_findings(environ: Mapping[str, str], *, has_gpu: bool, uses_ray: bool) -> Iterator[Finding]:
    """One row of what is set, by name and value, and one for each that matters; of secrets the name only."""
    listed = {name: value for name, value in environ.items() if name in NAMES or name.startswith(PREFIXES)}
    shown = [f"{name}={'(set)' if names_a_secret(name) else value}" for name, value in sorted(listed.items())]
    yield Finding("settings", "environment", "ok", ", ".join(shown) or "nothing set")
    for setting in SETTINGS:
        value = environ.get(setting.name)
        if value is not None and setting.matters(value, has_gpu, uses_ray):
            yield Finding("settings", setting.name, "warn", f"is {value!r}", setting.remedy)
