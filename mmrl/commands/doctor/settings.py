"""Environment variables that change results or keep engines from starting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mmrl.commands.doctor.finding import Finding
from mmrl.config.cluster import ClusterConfig
from mmrl.engine.driver import hides_gpus
from mmrl.engine.machine.interfaces import check_interfaces, interfaces
from mmrl.errors import ResourceError
from mmrl.system.redaction import names_a_secret

PREFIXES = ("NCCL_", "GLOO_", "VLLM_", "HF_", "TRANSFORMERS_", "DS_", "RAY_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "OMP_")
NAMES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "RANK",
    "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "LD_PRELOAD",
)  # fmt: skip


def setting_findings(environ: Mapping[str, str], cluster: ClusterConfig, *, has_gpu: bool) -> Iterator[Finding]:
    """One row of all variables that are set, and one for each that matters; secrets show their name only."""
    listed = {name: value for name, value in environ.items() if name in NAMES or name.startswith(PREFIXES)}
    shown = [f"{name}={'(set)' if names_a_secret(name) else value}" for name, value in sorted(listed.items())]
    yield Finding("settings", "environment", "ok", ", ".join(shown) or "nothing set")
    try:
        check_interfaces(environ, interfaces(), "cuda" if has_gpu else "cpu")
    except ResourceError as error:
        yield Finding("settings", "network interface", "bad", f"{error.what}; there are {error.possible}", error.remedy)
    for name, remedy in _remedies(environ, cluster, has_gpu):
        yield Finding("settings", name, "warn", f"is {environ[name]!r}", remedy)


def _remedies(environ: Mapping[str, str], cluster: ClusterConfig, has_gpu: bool) -> Iterator[tuple[str, str]]:
    if environ.get("RAY_ADDRESS") and (cluster.name, cluster.address) == ("ray", "auto"):
        yield "RAY_ADDRESS", "cluster.address: auto joins that cluster: unset it unless you mean it"
    if environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        yield "HF_HUB_OFFLINE", "nothing is downloaded: models and datasets must be in the cache, or unset it"
    if has_gpu and hides_gpus(environ.get("CUDA_VISIBLE_DEVICES")):
        yield "CUDA_VISIBLE_DEVICES", "it hides every GPU: unset it to train on one"
    if has_gpu and environ.get("TORCHDYNAMO_DISABLE") == "1":
        yield "TORCHDYNAMO_DISABLE", "vLLM then compiles nothing, and samples slowly on a GPU: unset it"
    if has_gpu and environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield "CUDA_LAUNCH_BLOCKING", "every kernel is waited for: unset it unless you look for a fault"
