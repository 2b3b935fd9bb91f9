"""Memory that this process may use: the machine's, or less in a container or a batch job."""

from __future__ import annotations

import psutil
import pytest

from mmrl.system import machine_memory


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "7000"}, 7000),  # a container
        ("0::/job/step\n", {"job/memory.max": "5000\n", "job/step/memory.max": "max\n"}, 5000),
        ("0::/job/step\n", {"job/memory.max": "5000\n", "job/step/memory.max": "4000\n"}, 4000),
        ("5:cpu:/x\n4:memory:/job\n", {"memory/job/memory.limit_in_bytes": "6000", "cpu/x/memory.max": "1"}, 6000),
        ("4:memory:/job\n", {"memory/job/memory.limit_in_bytes": str(2**63 - 4096)}, None),  # no limit
        ("0::/\n", {}, None),
        (None, {"memory.max": "7000"}, None),
    ],
)
def test_the_least_of_the_machines_memory_and_the_limits_of_its_groups(groups, files, expected, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    own = tmp_path / "own"
    if groups is not None:
        own.write_text(groups)
    monkeypatch.setattr(machine_memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine_memory, "OWN", own)
    assert machine_memory.total_bytes() == (expected or psutil.virtual_memory().total)
