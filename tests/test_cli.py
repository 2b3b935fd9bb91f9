"""The command line: commands, exit codes, messages, and what it must not import."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mmrl
from mmrl.cli import main
from mmrl.doctor.finding import Finding
from mmrl.errors import DataError, NumericsError

CONFIG = """\
model: {path: some/model}
data: {train: {name: table, path: rows.json}}
rewards: [{name: exact}]
algorithm: {name: grpo}
"""
HEAVY = {"torch", "transformers", "vllm", "deepspeed", "datasets", "pyarrow", "PIL", "sklearn"}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return str(path)


@dataclass
class FakeRun:
    """Stands in for ``mmrl.run``: records what it is called with."""

    calls: list[Any] = field(default_factory=list)
    error: BaseException | None = None

    def train(self, loaded: Any, dry_run: bool) -> int:
        self.calls.append(("train", loaded.config, dry_run))
        if self.error:
            raise self.error
        return 0

    def check(self, loaded: Any) -> Any:
        self.calls.append(("check", loaded.config))
        return SimpleNamespace(lines=["4 rows", "fine"], data={"rows": 4})

    def evaluate(self, loaded: Any, model: Path | None) -> dict[str, Any]:
        self.calls.append(("eval", loaded.config, model))
        return {"eval/accuracy": 0.5}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    fake = FakeRun()
    monkeypatch.setitem(sys.modules, "mmrl.run", fake)
    monkeypatch.setattr(mmrl, "run", fake, raising=False)
    return fake


def test_train_gets_the_resolved_config(config: str, run: FakeRun) -> None:
    assert main(["train", config]) == 0
    ((_, loaded, dry_run),) = run.calls
    assert loaded.algorithm.name == "grpo"
    assert not dry_run


def test_overrides_files_and_options_come_in_any_order(config: str, run: FakeRun, tmp_path: Path) -> None:
    more = tmp_path / "more.yaml"
    more.write_text("sampler: {group_size: 5}\n")
    words = ["train", "--learner.lr", "1e-5", config, "trainer.seed=7", "--dry-run", "--sampler.top_k=-1", str(more)]
    assert main([*words, "--sampler.top_k", "-1", "trackers=[]"]) == 0
    ((_, loaded, dry_run),) = run.calls
    assert (loaded.learner.lr, loaded.trainer.seed, loaded.sampler.group_size) == (1e-5, 7, 5)
    assert dry_run


def test_check_prints_its_report_or_json(config: str, run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", config]) == 0
    assert capsys.readouterr().out == "4 rows\nfine\n"
    assert main(["check", "--json", config]) == 0
    assert json.loads(capsys.readouterr().out) == {"rows": 4}


def test_eval_takes_another_model(config: str, run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", config, "--model", "out/model", "--json"]) == 0
    assert run.calls[0][2] == Path("out/model")
    assert json.loads(capsys.readouterr().out) == {"eval/accuracy": 0.5}
    assert main(["eval", config]) == 0
    assert run.calls[1][2] is None
    assert "eval/accuracy: 0.5" in capsys.readouterr().out


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for the doctor's checks, which find one thing bad; records what they are called with."""
    calls: list[Any] = []

    def examine(config: Any, device: str | None) -> list[Finding]:
        calls.append((config, device))
        return [Finding("machine", "ninja", "bad", "none", "install it")]

    monkeypatch.setattr("mmrl.doctor.examination.examine", examine)
    return calls


def test_doctor_needs_no_config_prints_a_table_and_exits_with_5(
    examined: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 5
    assert capsys.readouterr().out == "bad  machine  ninja  none\n                     -> install it\n"
    assert examined == [(None, None)]


def test_doctor_takes_a_config_with_overrides_and_one_device(
    config: str, examined: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", config, "--gpu", "--json", "trainer.run_dir=runs/x"]) == 5
    loaded, device = examined[0]
    assert (loaded.trainer.run_dir, device) == ("runs/x", "cuda")
    assert json.loads(capsys.readouterr().out)["findings"][0]["remedy"] == "install it"
    assert main(["doctor", "--cpu"]) == 5
    assert examined[1] == (None, "cpu")


def test_doctor_refuses_two_devices_and_overrides_of_nothing(examined: list[Any]) -> None:
    assert main(["doctor", "--cpu", "--gpu"]) == 2
    assert main(["doctor", "trainer.run_dir=runs/x"]) == 2
    assert examined == []


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DataError("row 3 has no image", where="rows.json", remedy="drop it"), 3, "mmrl: row 3 has no image\n  where:"),
        (NumericsError("sampler and learner disagree"), 6, "mmrl: sampler and learner disagree"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_expected_error_is_a_message_and_an_exit_code(
    config: str, run: FakeRun, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, message: str
) -> None:
    run.error = error
    assert main(["train", config]) == code
    complaint = capsys.readouterr().err
    assert message in complaint
    assert "Traceback" not in complaint


def test_a_bug_keeps_its_traceback_and_exits_with_1(
    config: str, run: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.error = ZeroDivisionError("a bug")
    assert main(["train", config]) == 1
    complaint = capsys.readouterr().err
    assert "Traceback" in complaint
    assert "ZeroDivisionError: a bug" in complaint


def test_a_secret_does_not_reach_the_message(
    config: str, run: FakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "very-secret-token")
    run.error = DataError("cannot fetch https://user:very-secret-token@hub")
    assert main(["train", config]) == 3
    assert "very-secret-token" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "required: COMMAND"),
        (["trian"], 2, "invalid choice: 'trian'"),
        (["train"], 2, "required: CONFIG"),
        (["train", "CONFIG", "--fast"], 2, "unrecognized arguments: --fast"),
        (["plugins", "extra"], 2, "unrecognized arguments: extra"),
        (["train", "absent.yaml"], 2, "cannot read the config: No such file"),
        (["train", "CONFIG", "--learner.lr"], 2, "--learner.lr needs a value"),
        (["train", "CONFIG", "learner.lrr=1"], 2, "did you mean lr?"),
        (["check", "CONFIG", "algorithm.clip_hihg=1"], 2, "did you mean clip_high?"),
        (["show", "CONFIG", "algorithm={name: grop}"], 4, "did you mean grpo?"),
        (["train", "CONFIG", "algorithm={name: grop}", "learner.lr=-1"], 2, "2 errors in the config"),
        (["schema", "--plugin", "reward"], 2, "--plugin cannot be 'reward'"),
        (["schema", "--plugin", "reward:nothing"], 4, "no installed package has a reward plugin called 'nothing'"),
        (["init", "config", "/nowhere/at/all.yaml"], 2, "cannot write the config"),
    ],
)
def test_bad_input_is_a_message_without_traceback(
    config: str, run: FakeRun, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    assert main([config if word == "CONFIG" else word for word in words]) == code
    complaint = capsys.readouterr().err
    assert message in complaint
    assert "Traceback" not in complaint
    assert run.calls == []


def test_show_prints_a_config_that_loads_again_with_origins(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", config, "learner.lr=1e-5"]) == 0
    shown = capsys.readouterr().out
    assert "lr: 1.0e-05  # override learner.lr=1e-5\n" in shown
    assert f"name: grpo  # {config}:4\n" in shown
    assert "clip_low: 0.2  # default\n" in shown
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    outputs = []
    for words in (["show", "--json", config, "learner.lr=1e-5"], ["show", "--json", str(again)]):
        assert main(words) == 0
        outputs.append(json.loads(capsys.readouterr().out))
    assert outputs[0]["config"] == outputs[1]["config"]
    assert outputs[0]["origins"]["learner.lr"] == "override learner.lr=1e-5"


def test_plugins_lists_the_installed_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    assert ["algorithm", "grpo", "mmrl", mmrl.__version__] in [
        line.split() for line in capsys.readouterr().out.split("\n")
    ]
    assert main(["plugins", "--json"]) == 0
    row = next(row for row in json.loads(capsys.readouterr().out) if row["name"] == "grpo")
    assert row["target"] == "mmrl_algorithms.grpo:GRPO"


def test_plugins_check_says_which_cannot_be_used(
    capsys: pytest.CaptureFixture[str], package: Callable[..., str]
) -> None:
    package("", "bad = not_there_at_all:Bad", name="broken")
    assert main(["plugins", "--check"]) == 4
    lines = capsys.readouterr().out.splitlines()
    assert "No module named 'not_there_at_all'" in next(line for line in lines if " broken " in line)
    assert next(line for line in lines if " grpo " in line).endswith("ok")


def test_schema_describes_the_config_and_a_plugins_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["required"]) == {"model", "data", "algorithm"}
    assert schema["$defs"]["LearnerConfig"]["properties"]["lr"]["exclusiveMinimum"] == 0
    assert "Completions per prompt" in schema["$defs"]["SamplerConfig"]["properties"]["group_size"]["description"]
    assert main(["schema", "--plugin", "algorithm:grpo"]) == 0
    assert "clip_high" in json.loads(capsys.readouterr().out)["properties"]


def test_init_writes_a_config_that_loads_and_leaves_existing_files_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new.yaml"
    named = ["--model", "m", "--dataset", "table", "--data", "rows.json", "--algorithm", "grpo", "--reward", "exact"]
    assert main(["init", "config", str(path), *named]) == 0
    assert main(["show", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out.partition("\n")[2])["config"]
    assert shown["data"]["train"]["path"] == "rows.json"
    assert shown["rewards"][0]["name"] == "exact"
    before = path.read_text()
    assert main(["init", "config", str(path)]) == 2
    assert "the file exists" in capsys.readouterr().err
    assert path.read_text() == before


def test_a_fresh_starter_config_says_what_is_to_be_filled_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new.yaml"
    assert main(["init", "config", str(path)]) == 0
    assert main(["check", str(path)]) == 4
    complaint = capsys.readouterr().err
    assert "'<algorithm>'" in complaint
    assert "'<dataset>'" in complaint


def imported_by(*words: str) -> tuple[int, set[str]]:
    """The exit code of a command in a process of its own, and the top-level modules that it imported."""
    code = (
        "import json, sys\nfrom mmrl.cli import main\ncode = main(sys.argv[1:])\n"
        "print('MODULES', json.dumps([code, sorted({name.partition('.')[0] for name in sys.modules})]))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=True
    )
    code_, modules = json.loads(process.stdout.rpartition("MODULES ")[2])
    return code_, set(modules)


def test_help_imports_nothing_but_the_standard_library() -> None:
    code, modules = imported_by("train", "--help")
    assert code == 0
    assert not modules & (HEAVY | {"pydantic", "numpy", "yaml"})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["show"], 0),
        (["check", "learner.lr=-1"], 2),
        (["train", "algorithm.clip_high=x"], 2),
        (["train", "rewards=[{name: nothing}]"], 4),
    ],
)
def test_a_config_is_judged_before_anything_heavy_is_imported(config: str, words: list[str], expected: int) -> None:
    code, modules = imported_by(words[0], config, *words[1:])
    assert code == expected
    assert "pydantic" in modules
    assert not modules & HEAVY


def test_no_first_party_plugin_imports_anything_heavy() -> None:
    code, modules = imported_by("plugins", "--check")
    assert code == 0
    assert "mmrl_algorithms" in modules
    assert not modules & HEAVY


def test_a_reader_that_stops_early_gets_no_complaint() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "mmrl", "schema"]
    process = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writing)
    assert process.returncode == 0
    assert process.stderr == ""
