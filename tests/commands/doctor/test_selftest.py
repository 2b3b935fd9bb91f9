"""The self-test for real on the CPU; and what is made of processes that abort, hang or lie."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from mmrl.commands.doctor.finding import Finding, exit_code
from mmrl.commands.doctor.selftest import run, self_test, trial_variables

ROW = Finding("numbers", "fp32 attention", "ok", "fine")

COMPARED = [
    "attention", "before = after sleep", "sampler = learner, step 1", "packed = one by one, step 1", "update 1 moved",
    "sampler = learner, step 2", "packed = one by one, step 2", "update 2 moved", "sampler = learner, after step 2",
    "packed = one by one, after step 2", "weight sync",
]  # fmt: skip

KEEPS_OLD_WEIGHTS = """
import sys
from mmrl.commands.doctor import tiny_run, trial
from mmrl.engine.sampler.hf_sampler import HFSampler

def load(self, weights, version):
    list(weights)
    self.weight_version = version

HFSampler.load = load
tiny_run.Installed.vllm = property(lambda self: "")
trial.main(*sys.argv[1:])
"""

PACKS_ONE_SEQUENCE = """
import sys
from mmrl.commands.doctor import tiny_run, trial
from mmrl.engine.network.layout import PackedLayout
from mmrl.ops.packing import Span

sound = PackedLayout.__init__
PackedLayout.__init__ = lambda self, spans, *args: sound(self, [Span(0, sum(s.length for s in spans))], *args)
tiny_run.Installed.vllm = property(lambda self: "")
trial.STEPS = 1
trial.main(*sys.argv[1:])
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], list[str]]:
    """The command that runs code with a device, a precision and a file as arguments; ``row()`` writes one row."""

    def write(code: str) -> list[str]:
        path = tmp_path / "script.py"
        line = json.dumps(asdict(ROW))
        path.write_text(
            f"import os, sys, time\ndef row():\n    open(sys.argv[3], 'a').write({line!r} + chr(10))\n{code}"
        )
        return [sys.executable, str(path)]

    return write


@pytest.mark.full
def test_two_steps_on_the_cpu_agree_in_every_number():
    rows = list(self_test("cpu", ["float32"]))
    assert [row.check.removeprefix("fp32 ") for row in rows if row.area == "numbers"] == COMPARED
    assert [row for row in rows if row.status != "ok"] == []
    about = {row.check: row.found for row in rows if row.area == "engine"}
    assert "DeepSpeedLearner, mmrl_packed_sdpa" in about["fp32 engines"]
    assert "sampled tokens/s" in about["fp32 speed"]


@pytest.mark.full
def test_a_sampler_that_keeps_its_old_weights_is_found_out(tmp_path):
    script = tmp_path / "old_weights.py"
    script.write_text(KEEPS_OLD_WEIGHTS)
    rows = {row.check: row for row in self_test("cpu", ["float32"], command=[sys.executable, str(script)])}
    assert "HFSampler" in rows["fp32 engines"].found
    assert rows["fp32 sampler = learner, step 1"].status == "ok"
    assert rows["fp32 sampler = learner, step 2"].status == "bad"
    assert rows["fp32 packed = one by one, step 2"].status == "ok"
    assert exit_code(list(rows.values())) == 6


@pytest.mark.slow
def test_a_packed_row_whose_samples_see_each_other_is_found_out(tmp_path):
    script = tmp_path / "one_sequence.py"
    script.write_text(PACKS_ONE_SEQUENCE)
    rows = {row.check: row for row in self_test("cpu", ["float32"], command=[sys.executable, str(script)])}
    assert rows["fp32 attention"].status == "bad"
    assert rows["fp32 packed = one by one, step 1"].status == "bad"
    assert exit_code(list(rows.values())) == 6


def test_a_process_that_aborts_leaves_its_rows_and_its_last_words(script):
    kept, ended = self_test(
        "cpu", ["float32"], command=script("row(); print('CUDA error: device-side assert', flush=True); os.abort()")
    )
    assert kept == ROW
    assert (ended.check, ended.status) == ("float32: process", "bad")
    assert "SIGABRT" in ended.found and "device-side assert" in ended.found


def test_no_half_of_a_token_is_left_where_last_words_are_cut(script, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "sesame-street")
    (ended,) = self_test("cpu", ["float32"], command=script("print('sesame-street' + '.' * 1195); sys.exit(1)"))
    assert ended.found.endswith("." * 1195) and "street" not in ended.found


def test_each_precision_runs_even_if_one_before_it_fails(script):
    rows = list(self_test("cpu", command=script("row(); sys.exit(3 if sys.argv[2] == 'float32' else 0)")))
    assert [row.status for row in rows] == ["ok", "bad", "ok"]
    assert "exit status 3; its last words: none" in rows[1].found


def test_a_process_that_hangs_is_ended_with_its_children(script, tmp_path):
    code = f"row()\nif os.fork() == 0:\n    time.sleep(1.5); open({str(tmp_path / 'late')!r}, 'w')\ntime.sleep(60)"
    begin = time.monotonic()
    kept, ended = self_test("cpu", ["float32"], command=script(code), timeout_s=1)
    assert kept == ROW and "still running after 1 s" in ended.found
    time.sleep(max(0, begin + 2.5 - time.monotonic()))
    assert not (tmp_path / "late").exists()


def test_a_trial_on_the_cpu_sees_no_gpu_and_one_on_the_gpu_sees_what_this_process_sees():
    environ = {"CUDA_VISIBLE_DEVICES": "3", "OMP_WAIT_POLICY": "active"}
    assert trial_variables(environ, "cpu") == environ | {"CUDA_VISIBLE_DEVICES": "", "GOMP_SPINCOUNT": "0"}
    assert trial_variables(environ, "cuda")["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_trial_never_moves_to_another_device_than_asked_for():
    (row,) = self_test("cuda", ["bfloat16"])
    assert (row.check, row.status) == ("bf16 device", "bad")
    assert row.found == "asked for cuda, and torch offers cpu in a new process"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_two_steps_on_the_gpu_agree_in_every_number():
    assert [row for row in self_test("cuda") if row.status == "bad"] == []


def test_something_can_be_done_while_a_process_runs(tmp_path):
    seen: list[str] = []
    log = tmp_path / "log"
    code = "import time; print('begun', flush=True); time.sleep(1.5)"
    assert run([sys.executable, "-c", code], {}, log, 20, lambda: seen.append(log.read_text())) == ""
    assert seen[-1] == "begun\n" and len(seen) >= 2
