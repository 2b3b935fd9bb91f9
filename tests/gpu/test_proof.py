"""The GPU proof at sizes for a CPU: nothing is bad in sound code, something in broken code, and crashes are rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmrl.ops.parity import Gap
from tests.gpu import agreement, bench, endings, proof, sleep, vllm
from tests.gpu.proof import Section, main
from tests.gpu.row import Row, read
from tests.gpu.runs import End, Run

BROKEN_KERNEL = """
from mmrl.engine.network import attention
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


def test_one_gpu_without_vllm_takes_nine_minutes_and_two_ranks_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(proof, "_absent", lambda modules: [name for name in modules if name == "vllm"])
    whole = proof.Proof(tmp_path, proof.SECTIONS, "cuda", "whole", None)
    assert sum(section.seconds for section in whole._left) == 540
    skipped = {row.area: row.why for row in read(tmp_path / "proof.jsonl")}
    missing = "not installed: vllm"
    two = "2 GPUs are needed; here is 1"
    assert skipped == {"ranks": two, "split": two, "vllm": missing, "sleep": missing, "vllm-runs": missing}
    for kind, devices in (("cuda", 2), ("cpu", 0)):
        assert "ranks" in {
            section.name for section in proof.Proof(tmp_path, proof.SECTIONS, kind, "", 9, devices)._left
        }


def test_the_cases_of_a_sleep_ask_for_what_sampler_engine_may_hold():
    from mmrl.engine.sampler.vllm_arguments import check_engine_keys

    for case in sleep.CASES.values():
        check_engine_keys({**case.engine, "kv_cache_memory_bytes": 1})
    in_turn = sum(case.seconds for case in sleep.CASES.values())
    assert in_turn < next(section.seconds for section in proof.SECTIONS if section.name == "sleep")


@pytest.mark.parametrize(
    ("code", "stderr", "good", "why"),
    [
        (0, "", True, ""),
        (0, "a note\n\n", True, "a note"),
        (0, "a note\nCUDA Error: invalid argument at cumem.cpp:119\n", False, "CUDA Error: invalid argument at cumem"),
        (134, "terminate called without an active exception", False, "terminate called"),
        (5, "", False, ""),
    ],
)
def test_a_run_ended_well_if_its_code_is_0_and_stderr_has_no_error(code, stderr, good, why):
    value, found, said = endings.judged(End(code, "", stderr))
    assert found is good and said.startswith(why) and value.startswith(f"exit code {code}, ")


def test_a_run_that_ends_before_it_is_killed_is_told_with_its_last_words(tmp_path):
    run = Run(tmp_path, tmp_path / "none.yaml")
    with (
        run.started() as process,
        pytest.raises(RuntimeError, match="saved no step 2; it ended with 2: mmrl: cannot read"),
    ):
        endings._wait_for_checkpoint(run, process)


@pytest.mark.parametrize(
    ("base", "young", "kept", "good"),
    [
        (5e-4, 6e-4, 0.3, True),
        (5e-4, 2e-3, 0.3, False),
        (0.1, 0.1, 0.3, False),
        (5e-4, 5e-4, float("nan"), False),
        (5e-4, 5e-4, 0.0, False),
    ],
)
def test_a_young_adapter_is_held_to_the_base_models_gap_and_must_be_there(base, young, kept, good, tmp_path):
    gaps = [Gap(size, size, size, size) for size in (base, young)]
    rows = bench.Bench("agreement", "cuda", False, tmp_path, print)
    assert agreement.judged(rows, "LoRA", *gaps, kept).status == ("ok" if good else "bad")


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
    sections = [section.name for section in proof.SECTIONS if "vllm" not in section.needs]
    assert rehearsed(sections, tmp_path) <= {"one call", "a killed rank is started again"}


@pytest.mark.slow
def test_the_proof_with_vllm_finds_nothing_bad_on_a_cpu(tmp_path):
    sections = [section.name for section in proof.SECTIONS if "vllm" in section.needs]
    on_a_gpu = {"CUDA graphs given back", "expandable segments"}
    assert rehearsed(sections, tmp_path) <= {*on_a_gpu, "a killed rank is started again"}


def rehearsed(sections: list[str], folder: Path) -> set[str]:
    """Names of the rows that were skipped; none is bad, and every section has some."""
    code = main([str(folder), "--small", "--device", "cpu", "--sections", ",".join(sections), "--seconds", "1200"])
    found = read(folder / "proof.jsonl")
    assert [row for row in found if row.status == "bad"] == []
    assert code == 0
    assert {row.area for row in found} == set(sections)
    return {row.name for row in found if row.status == "skipped"}
