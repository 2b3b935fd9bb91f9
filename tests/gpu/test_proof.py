"""The GPU proof at sizes for a CPU: nothing is bad in sound code, something in broken code, and crashes are rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import bench, proof, vllm
from tests.gpu.proof import Section, main
from tests.gpu.row import Row, read

BROKEN_KERNEL = """
from mmrl.engine import attention
from tests.gpu import kernels

sound = attention.packed_sdpa
attention.KERNELS["mmrl_packed_sdpa"] = lambda *args, scaling, **options: sound(*args, scaling=1.1 * scaling, **options)
run = kernels.run
"""
CRASH = """
import os, signal

def run(bench):
    bench.emit(bench.row("before"))
    print("the last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
"""
HANG = """
import time

def run(bench):
    time.sleep(1000)
"""
NEEDS = ("torch",)


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """Exit code and folder of a proof whose sections crash, hang, go wrong, lack a package, and go well."""
    folder = tmp_path_factory.mktemp("proof")
    for name, code in {"broken_kernel": BROKEN_KERNEL, "crash": CRASH, "hang": HANG}.items():
        (folder / f"{name}.py").write_text(code)
    sections = (
        Section("crash", 60, NEEDS, "crash"),
        Section("hang", 1, NEEDS, "hang"),
        Section("kernels", 60, NEEDS, "broken_kernel"),
        Section("lacking", 60, ("torch", "no_such_package")),
        Section("sampling", 60, NEEDS),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "SECTIONS", sections)
        patch.setenv("PYTHONPATH", str(folder))
        patch.setattr(proof.Proof, "_deadline", lambda self, section: 1.0 if section.name == "hang" else 100.0)
        code = main([str(folder / "out"), "--small", "--device", "cpu"])
    return code, folder / "out"


def rows_of(out: Path, area: str) -> list[Row]:
    return [row for row in read(out / "proof.jsonl") if row.area == area]


@pytest.mark.full
def test_a_kernel_of_a_wrong_scale_is_bad_and_gives_exit_code_6(spoiled):
    code, out = spoiled
    wrong = {row.name for row in rows_of(out, "kernels") if row.status == "bad"}
    assert code == 6
    assert {"bfloat16, tiny", "float32, tiny", "bfloat16, 28/4 heads of 128, prompt shared"} <= wrong
    assert not any(name.startswith("time") for name in wrong)


@pytest.mark.full
def test_a_section_that_crashes_is_one_bad_row_with_its_last_words_and_keeps_what_it_had(spoiled):
    before, crash = rows_of(spoiled[1], "crash")
    assert (before.name, before.status) == ("before", "ok")
    assert crash.status == "bad" and "SIGSEGV" in crash.why and "the last words" in crash.why


@pytest.mark.full
def test_a_section_that_hangs_is_ended_at_its_deadline(spoiled):
    (hang,) = rows_of(spoiled[1], "hang")
    assert hang.status == "bad" and "still running after 1 s" in hang.why


@pytest.mark.full
def test_a_section_whose_packages_are_missing_is_skipped_and_names_them(spoiled):
    (lacking,) = rows_of(spoiled[1], "lacking")
    assert (lacking.status, lacking.why) == ("skipped", "not installed: no_such_package")


@pytest.mark.full
def test_what_comes_after_a_bad_section_is_looked_at_and_the_table_has_every_row(spoiled):
    out = spoiled[1]
    sampling = rows_of(out, "sampling")
    assert [row.status for row in sampling] == ["ok", "ok"]
    table = (out / "proof.md").read_text()
    assert table.count("\n| ") == len(read(out / "proof.jsonl")) + 1


def test_a_section_may_take_what_others_left_and_not_what_later_ones_are_promised(tmp_path):
    sections = [Section(name, seconds, ()) for name, seconds in (("one", 30), ("two", 60), ("three", 10))]
    whole = proof.Proof(tmp_path / "a", sections, "cpu", "small", 120)
    first = whole._left.pop(0)
    assert whole._deadline(first) == pytest.approx(50, abs=1)
    scarce = proof.Proof(tmp_path / "b", sections, "cpu", "small", 50)
    assert scarce._deadline(scarce._left.pop(0)) == pytest.approx(15, abs=1)


def test_a_transformers_that_drops_image_features_is_found_by_its_signature(monkeypatch):
    import transformers

    assert bench.lacks_image_features() == ""
    monkeypatch.setattr(transformers.Qwen2_5_VLModel, "forward", lambda self, input_ids, **kwargs: None)
    assert "5.18" in bench.lacks_image_features()


def test_the_trials_with_vllm_begin_in_bfloat16_and_leave_time_for_their_rows(monkeypatch, tmp_path):
    commands: list[tuple[str, float]] = []

    def record(command: list[str], environment: object, log: Path, timeout_s: float) -> str:
        commands.append((command[-2], timeout_s))
        log.touch()
        return "hangs"

    monkeypatch.setattr("mmrl.commands.doctor.selftest.run", record)
    monkeypatch.setattr("mmrl.commands.doctor.versions.Installed.vllm_is_for_cpu", False)
    rows: list[Row] = []
    vllm.run(bench.Bench("vllm", "cuda", False, tmp_path, rows.append))
    (section,) = [section for section in proof.SECTIONS if section.name == "vllm"]
    assert [precision for precision, _ in commands] == ["bfloat16", "float32"]
    assert sum(seconds for _, seconds in commands) < section.seconds == 600
    assert [(row.name, row.status) for row in rows] == [("bfloat16: process", "bad"), ("float32: process", "bad")]


def test_an_unknown_section_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--sections", "kernel"])
    assert "no such section: kernel; there are machine, kernels," in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_proof_finds_nothing_bad_on_a_cpu(tmp_path):
    sections = [section.name for section in proof.SECTIONS if section.name != "vllm"]  # tests/commands/doctor has it
    code = main([str(tmp_path), "--small", "--device", "cpu", "--sections", ",".join(sections), "--seconds", "1200"])
    found = read(tmp_path / "proof.jsonl")
    assert [row for row in found if row.status == "bad"] == []
    assert code == 0
    assert {row.area for row in found} == set(sections)
    assert {row.name for row in found if row.status == "skipped"} <= {"one call"}
