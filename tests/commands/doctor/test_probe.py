"""What torch says, and what it says when it cannot be imported."""

import dataclasses
import json

import pytest
import torch

from mmrl.commands.doctor.probe import GPU, Probe, probe


@pytest.mark.full
def test_torch_is_asked_in_another_process():
    found = probe()
    assert (found.error, found.torch, found.torchvision_error) == ("", torch.__version__, "")
    assert found.kind == ("cuda" if torch.cuda.is_available() else "cpu")
    assert len(found.gpus) == torch.cuda.device_count()


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise ImportError('libcudart.so.13: cannot open')", "exit status 1: ImportError: libcudart.so.13: cannot"),
        ("import os; os.abort()", "exit status -6: no message"),
    ],
)
def test_a_torch_that_fails_or_aborts_is_a_finding(code, error, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    assert probe().error.startswith(error)


@pytest.mark.full
def test_what_others_print_is_not_taken_for_the_answer(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import atexit; print('hello'); atexit.register(print, '[1]')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    assert (probe().error, probe().torch) == ("", torch.__version__)


FAKE_TORCH = """
import os
from types import SimpleNamespace
__version__, version, get_num_threads = "9", SimpleNamespace(cuda="13.0"), lambda: 1

def fail(*_):
    {fault}

cuda = SimpleNamespace(
    is_available=lambda: {available}, init=fail, mem_get_info=fail, device_count=lambda: 1,
    nccl=SimpleNamespace(version=lambda: (2, 28)),
)
"""


@pytest.mark.parametrize(
    ("available", "fault", "cuda_error", "gpus"),
    [
        (True, "raise MemoryError('CUDA error: out of memory')", "", (GPU(error="CUDA error: out of memory"),)),
        (False, "raise RuntimeError('driver too old\\nmore')", "driver too old", ()),
        (True, "os.abort()", "exit status -6: no message", ()),
    ],
)
def test_a_device_that_fails_is_no_torch_that_cannot_be_imported(
    available, fault, cuda_error, gpus, tmp_path, monkeypatch
):
    (tmp_path / "torch.py").write_text(FAKE_TORCH.format(available=available, fault=fault))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    found = probe()
    assert (found.error, found.torch, found.cuda_error, found.gpus) == ("", "9", cuda_error, gpus)


def test_a_torchvision_that_fails_is_named(tmp_path, monkeypatch):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    assert probe().torchvision_error == "RuntimeError: operator torchvision::nms does not exist"


def test_a_probe_survives_json():
    gpu = GPU("H200", 150, 140, (9, 0), True)
    whole = Probe("", torch="2.13.0", cuda="13.0", nccl="2.28.9", kind="cuda", threads=4, gpus=(gpu,))
    assert Probe.of(json.loads(json.dumps(dataclasses.asdict(whole)))) == whole
