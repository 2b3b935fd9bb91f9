"""The command line: commands, exit codes, messages, and what it must not import."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmrl
from mmrl.commands.cli import main
from mmrl.commands.doctor.finding import Finding
from mmrl.errors import DataError, MMRLError, NumericsError
from mmrl.plugin_host import registry
from mmrl.plugin_host.registry import list_plugins
from mmrl.runs.directory import RunDirectory
from mmrl.system.report import Report
from mmrl.system.version import DISTRIBUTION
from mmrl.testing import make_rollouts
from mmrl.types import CreditedGroup, RolloutGroup, ScoredGroup

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
    """Stands in for what the commands train and check run: records what it is called with."""

    calls: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def train(self, loaded: Any, interruption: Any, **options: Any) -> int:
        self.calls.append(("train", loaded.config))
        self.options = options
        if self.error:
            raise self.error
        return 0

    def check(self, loaded: Any) -> Any:
        self.calls.append(("check", loaded.config))
        errors = [self.error] if isinstance(self.error, MMRLError) else []
        return Report(lines=["4 rows", "fine"], data={"rows": 4}, errors=errors)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    fake = FakeRun()
    monkeypatch.setattr("mmrl.commands.train.train", fake.train)
    monkeypatch.setattr("mmrl.commands.check.command.check", fake.check)
    return fake


def test_train_gets_the_resolved_config(config: str, run: FakeRun) -> None:
    assert main(["train", config]) == 0
    ((command, loaded),) = run.calls
    assert (command, loaded.algorithm.name) == ("train", "grpo")


def test_overrides_files_and_options_come_in_any_order(config: str, run: FakeRun, tmp_path: Path) -> None:
    more = tmp_path / "more.yaml"
    more.write_text("sampler: {group_size: 5}\n")
    words = ["train", "--learner.lr", "1e-5", config, "trainer.seed=7", "--dry-run", "--sampler.top_k=-1", str(more)]
    assert main([*words, "--sampler.top_k", "-1", "trackers=[]"]) == 0
    ((command, loaded),) = run.calls
    assert command == "check"
    assert (loaded.learner.lr, loaded.trainer.seed, loaded.sampler.group_size) == (1e-5, 7, 5)


def test_check_prints_its_report_or_json(config: str, run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", config]) == 0
    assert capsys.readouterr().out == "4 rows\nfine\n"
    assert main(["check", "--json", config]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"rows": 4, "warnings": [], "errors": [], "notes": []}


def test_check_shows_what_is_wrong_after_its_report(
    config: str, run: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.error = DataError("no reference can be matched", where="data.train")
    assert main(["check", config]) == DataError.exit_code
    out, err = capsys.readouterr()
    assert out == "4 rows\nfine\n" and err == "mmrl: no reference can be matched\n  where:    data.train\n"
    assert main(["check", config, "--json"]) == DataError.exit_code
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["exit_code"] == DataError.exit_code and error["message"].startswith("no reference")


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for the doctor's checks, which find one thing bad; records what they are called with."""
    calls: list[Any] = []

    def examine(config: Any, device: str | None, *, audits: bool) -> list[Finding]:
        calls.append((config, device, audits))
        return [Finding("machine", "ninja", "bad", "none", "install it")]

    monkeypatch.setattr("mmrl.commands.doctor.examination.examine", examine)
    return calls


def test_doctor_needs_no_config_prints_a_table_and_exits_with_5(
    examined: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 5
    assert capsys.readouterr().out == "bad  machine  ninja  none\n                     -> install it\n"
    assert examined == [(None, None, False)]


def test_doctor_takes_a_config_with_overrides_and_one_device(
    config: str, examined: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", config, "--gpu", "--json", "trainer.run_dir=runs/x"]) == 5
    loaded, device, audits = examined[0]
    assert (loaded.trainer.run_dir, device, audits) == ("runs/x", "cuda", True)
    out, err = capsys.readouterr()
    assert json.loads(out)["findings"][0]["remedy"] == "install it"
    assert "that takes minutes" in err and "--quick" in err
    assert main(["doctor", "--cpu"]) == 5
    assert examined[1] == (None, "cpu", False)


def test_doctor_starts_no_engine_of_a_config_if_it_is_to_be_quick(
    config: str, examined: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", config, "--quick"]) == 5
    assert examined[0][2] is False and capsys.readouterr().err == ""
    assert main(["doctor", "--quick"]) == 5 and examined[1] == (None, None, False)


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


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "is_late"),
    [
        ("SIGTERM", False),
        ("SIGINT", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("SIGTERM", True), ("SIGINT", False))),
        *(pytest.param("SIGUSR1", is_late, marks=pytest.mark.slow) for is_late in (False, True)),
    ],
)
def test_a_signal_while_the_interpreter_is_taken_down_keeps_the_exit_code(number: str, is_late: bool) -> None:
    """Before its exit functions, or when Python has given its handlers up and destroys the modules."""
    script = f"""if True:
        import os, signal, sys
        from mmrl.commands.cli import main
        class Last:
            def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.{number}):
                kill(pid, number)
        sys.last = Last() if {is_late} else None
        code = main()
        {is_late} or Last()
        sys.exit(code)"""
    command = [sys.executable, "-c", script, "show", "missing.yaml"]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 2


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
        (["plugins", "--check", "exact"], 2, "--check cannot be 'exact'"),
        (["plugins", "--check", "reward:exat"], 4, "did you mean exact?"),
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
    assert ["algorithm", "grpo", DISTRIBUTION, mmrl.__version__, "installed"] in [
        line.split() for line in capsys.readouterr().out.split("\n")
    ]
    assert main(["plugins", "--json"]) == 0
    row = next(row for row in json.loads(capsys.readouterr().out) if row["name"] == "grpo")
    assert row["target"] == "mmrl_algorithms.grpo:GRPO"
    assert (row["status"], row["note"]) == ("installed", "")


PLUGINS = """
import os
import sys
from mmrl.interfaces import DatasetLoader, PluginConfig, Reward, Tracker

class Fine(Reward):
    def score(self, rollouts):
        return [0.0] * len(rollouts)

class Demanding(Fine):
    class Config(PluginConfig):
        model: str
        low: int

class Contradictory(Fine):
    class Config(PluginConfig):
        def model_post_init(self, context):
            raise ValueError("give one of low and high")

class Wrong(Fine):
    def score(self, rollouts):
        return [0.0]

class Reads(Fine):
    def score(self, rollouts):
        return [rollout.columns["difficulty"] for rollout in rollouts]

class Contains(Fine):
    def score(self, rollouts):
        print("{", flush=True)
        os.write(1, b"}")
        return [float(rollout.answer in rollout.text) for rollout in rollouts]

class Hangs(Fine):
    def score(self, rollouts):
        while True:
            pass

class Leaves(Fine):
    def score(self, rollouts):
        sys.exit(3)

class Dies(Fine):
    def score(self, rollouts):
        os._exit(3)

class Empty(DatasetLoader):
    def load(self):
        return []

class Quiet(Tracker):
    def start(self, run_dir, config): ...
    def log(self, step, metrics): ...
    def finish(self): ...
"""
ENTRIES = """\
fine = {module}:Fine
demanding = {module}:Demanding
contradictory = {module}:Contradictory
wrong = {module}:Wrong
reads = {module}:Reads
contains = {module}:Contains
hangs = {module}:Hangs
leaves = {module}:Leaves
dies = {module}:Dies
absent = {module}:Absent
[mmrl.datasets]
empty = {module}:Empty
[mmrl.trackers]
quiet = {module}:Quiet
"""


@pytest.fixture
def only(package: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes mmrl see two distributions, ``these`` and ``others``, and no other; returns the module of ``these``.

    Both have a reward called fine.
    """
    module = package(PLUGINS, ENTRIES, name="these")
    package(PLUGINS, "fine = {module}:Fine", name="others")
    ours = [info for info in list_plugins() if info.distribution in ("these", "others")]
    monkeypatch.setattr("mmrl.plugin_host.registry.list_plugins", lambda: ours)
    return module


def test_plugins_shows_names_that_are_taken_twice_and_imports_nothing(
    only: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 13 + 1
    assert next(line for line in lines if "  others " in line).endswith("installed: name taken twice, use others:fine")
    assert next(line for line in lines if " absent " in line).endswith("installed")
    assert only not in sys.modules


@pytest.mark.full
def test_plugins_check_says_which_can_be_used_and_why_not(
    only: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever one does to its process, the others are tried, and the answer is whole."""
    monkeypatch.setattr("mmrl.testing.installed.TIMEOUT_S", 10.0)  # a busy machine imports for some seconds
    assert main(["plugins", "--check", "--json"]) == 4
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out) if row["distribution"] == "these"}
    assert {name: row["status"] for name, row in rows.items()} == {
        **{"fine": "ok", "demanding": "loaded", "contradictory": "loaded", "wrong": "bad", "absent": "bad"},
        **{"reads": "loaded", "contains": "ok", "hangs": "bad", "leaves": "bad", "dies": "bad"},
        **{"empty": "bad", "quiet": "loaded"},
    }
    assert rows["fine"]["note"] == "name taken twice, use these:fine"
    assert "no default for model, low" in rows["demanding"]["note"]
    assert "give one of low and high" in rows["contradictory"]["note"]
    assert "raised KeyError: 'difficulty'" in rows["reads"]["note"]
    assert "is not done with its checks within 10 s" in rows["hangs"]["note"]
    assert "SystemExit: 3" in rows["leaves"]["note"]
    assert "ended the process (exit code 3)" in rows["dies"]["note"]
    assert "has no attribute 'Absent'" in rows["absent"]["note"]
    assert "a dataset has rows" in rows["empty"]["note"]


def test_plugins_check_of_some_tries_no_other(only: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--check", "reward:wrong", "tracker:quiet"]) == 4
    shown = capsys.readouterr()
    header, wrong, quiet = shown.out.splitlines()
    assert f"bad: {only}.Wrong breaks a rule: score answers 6 scores, one per rollout" in wrong
    assert " quiet " in quiet and header.split()[-1] == "status"
    assert "it answered 1 score" in shown.err and "  do:  " in shown.err
    assert main(["plugins", "--check", "reward:contains", "reward:reads"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["plugins", "--json", "--check", "reward:others:fine"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["distribution"] == "others" and row["status"] == "ok"


def test_plugins_check_of_sound_plugins_exits_with_0(
    only: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = [info for info in registry.list_plugins() if info.name in ("fine", "quiet", "demanding")]
    monkeypatch.setattr("mmrl.plugin_host.registry.list_plugins", lambda: sound)
    assert main(["plugins", "--check"]) == 0
    assert capsys.readouterr().err == ""


REWARD = """
import os, time

def right(rollouts, bonus: float = 0.0):
    return [act(rollout) + bonus for rollout in rollouts]

def act(rollout):
    if "hang" in rollout.text: time.sleep(60)
    if "die" in rollout.text: os._exit(3)
    if "raise" in rollout.text: raise ValueError("no such colour")
    return float(rollout.answer in rollout.text) if rollout.columns["unit"] == "cm" else float("nan")
"""


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Writes completions as a run does, and a reward; returns the run's folder and the reward's name."""

    def write(*texts: str, unit: str = "cm", sources: Sequence[str] = ()) -> tuple[str, str]:
        (tmp_path / "reward.py").write_text(REWARD)
        run, groups = RunDirectory.create(tmp_path / "run"), []
        for text, source in zip_longest(texts, sources, fillvalue=""):
            rollouts = make_rollouts([text], answer="7", columns={"unit": unit}, question=f"question {text}")
            rollouts = [
                replace(each, prompt=replace(each.prompt, prompt=replace(each.prompt.prompt, source=source)))
                for each in rollouts
            ]
            one, values = RolloutGroup(rollouts[0].prompt, tuple(rollouts)), np.array([1.0])
            groups.append(ScoredGroup(one, values, np.ones(1, bool), {"right": values, "other": np.array([np.nan])}))
        credited = [CreditedGroup(group, [np.zeros(9)], [np.zeros(0)]) for group in groups]
        run.write_rollouts(1, credited)
        run.release()
        return str(tmp_path / "run"), f"{tmp_path / 'reward.py'}:right"

    return write


def test_rewards_test_says_what_a_reward_answers_and_where_the_record_disagrees(
    recorded: Callable[..., tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    run, reward = recorded("it is 7", "8\x1b[31m", "a 7")
    assert main(["rewards", "test", reward, "--rollouts", run]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["prompt", "rollout", "value", "recorded", "time", "completion"]
    assert re.search(r" 0 +1 +1 +\S+ ms  it is 7$", lines[1])
    assert "8\\x1b[31m" in lines[2] and "\x1b" not in "".join(lines)
    assert "3 rollouts: 3 scored, mean 0.6667, 0 unscored, 0 failed" in lines
    assert "record: 1 of 3 disagree with 'right'" in lines
    assert any(
        re.fullmatch(r"time per rollout: p50 .* ms, p95 .* ms, max .* ms \(.*step-000001.parquet:\d\)", x)
        for x in lines
    )
    assert main(["rewards", "test", reward, "--rollouts", run, "--set", "bonus=1", "--limit", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["value"] for each in report["samples"]] == [2.0, 1.0] and report["disagreements"] == 1
    assert report["samples"][0]["agrees"] is False and report["samples"][0]["recorded"] == 1.0
    assert report["max_s"] >= report["p95_s"] >= report["p50_s"] >= 0 and report["recorded_components"] == [
        "right",
        "other",
    ]
    # Another component, which no reward was asked for: nothing to compare.
    assert main(["rewards", "test", reward, "--rollouts", f"{run}/rollouts", "--set", "label=other", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compared"] == 0
    assert main(["rewards", "test", reward, "--rollouts", run, "--set", "label=new"]) == 0
    assert "no 'new' to compare with, but right, other" in capsys.readouterr().out


def test_rewards_test_shows_why_a_reward_cannot_score(
    recorded: Callable[..., tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = recorded("it is 7", "8", "9")
    (tmp_path / "picky.py").write_text(
        "from mmrl import Unscored\n\n"
        "def picky(rollouts):\n"
        "    return [1.0 if '7' in r.text else Unscored(f'found no 7, \x1b[31m{\"x\" * 600}') for r in rollouts]\n"
    )
    words = ["rewards", "test", f"{tmp_path / 'picky.py'}:picky", "--rollouts", run]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "3 rollouts: 1 scored, mean 1, 2 unscored, 0 failed" in lines
    (line,) = [each for each in lines if each.startswith("unscored: ")]
    assert line.startswith("unscored: 2 x found no 7, \\x1b[31mxxx") and ".parquet:2)" in line and len(line) < 800
    assert main([*words, "--json"]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    assert [len(each["why"]) for each in samples] == [0, 500, 500]


def test_rewards_test_leaves_rows_of_other_sources_aside(
    recorded: Callable[..., tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    run, reward = recorded("a 7", "8", "7 too", sources=["dots", "charts", "dots"])
    words = ["rewards", "test", reward, "--rollouts", run, "--set"]
    assert main([*words, "sources=[dots]", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["completion"] for each in report["samples"]] == ["a 7", "7 too"]
    # The record has 1 for all three: "8" would disagree.
    assert (report["other_sources"], report["compared"], report["disagreements"]) == (1, 2, 0)
    assert main([*words, "sources=[charts]", "--limit", "1"]) == 0
    out = capsys.readouterr().out
    assert "1 rollout: 1 scored, mean 0, 0 unscored, 0 failed; 1 of other sources" in out
    assert main([*words, "sources=[figures]"]) == 3
    assert "no recorded rollouts of figures" in (err := capsys.readouterr().err) and "'dots' (2), 'charts' (1)" in err


def test_rewards_test_groups_failures_by_cause(
    recorded: Callable[..., tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    run, reward = recorded("7", "raise", "die", "raise it")
    assert main(["rewards", "test", reward, "--rollouts", run]) == 4
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed: ")]
    assert len(failed) == 2
    assert re.fullmatch(
        r"failed: 2 x raised ValueError: no such colour at .*reward.py:\d+ in act \(first: .*step-000001.parquet:2\)",
        failed[0],
    )
    assert failed[1].startswith("failed: 1 x ") and "exit code 3" in failed[1] and failed[1].endswith(".parquet:3)")


@pytest.mark.parametrize("body", ["rollout.answer", "rollout['answer']", "float(rollout)"])
def test_a_function_of_a_single_rollout_is_told_that_it_gets_a_list(
    body: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.py").write_text(f"def one(rollout):\n    return {body}\n")
    assert main(["rewards", "test", f"{tmp_path / 'one.py'}:one", "--limit", "1"]) == 4
    assert "given a list of rollouts and returns one number for each) at " in capsys.readouterr().out


def test_rewards_test_counts_failures_and_exits_with_4(
    recorded: Callable[..., tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    run, reward = recorded("hang", "7", "die", "raise")
    assert main(["rewards", "test", reward, "--rollouts", run, "--timeout", "0.5", "--json"]) == 4
    report = json.loads(capsys.readouterr().out)
    assert (report["scored"], report["failed"], report["unscored"]) == (1, 3, 0)
    failures = [each["failure"] for each in report["samples"]]
    for place, part in ((0, "within 0.5 s"), (1, ""), (2, "exit code 3"), (3, "raised ValueError: no such colour")):
        assert part in failures[place] and bool(part) == bool(failures[place])


def test_rewards_test_stops_at_what_would_stop_a_run(
    recorded: Callable[..., tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    run, reward = recorded("7", unit="mm")
    assert main(["rewards", "test", reward, "--rollouts", run]) == 4
    captured = capsys.readouterr()
    assert "answered nan" in captured.err and "1 failed" in captured.out


def test_rewards_test_needs_no_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewards", "test", "exact"]) == 0
    out = capsys.readouterr().out
    assert "9 rollouts: 9 scored" in out and "record" not in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["exact", "--set", "extrac=whole"], 2, "did you mean extract?"),
        (["exact", "--set", "labl=right"], 2, "did you mean label?"),
        (
            ["exact", "--set", "nothing_like_it=1"],
            2,
            "weight, timeout_s, sources, on_error, workers, style, weights, label",
        ),
        (["exact", "--set", "weight=much"], 2, "weight should be a number"),
        (["exact", "--limit", "0"], 2, "--limit is 0"),
        (["exact", "--timeout", "-1"], 2, "timeout_s"),
        (["exact", "--rollouts", "no/such/run"], 3, "there are no recorded rollouts"),
        (["no_such_reward"], 4, "no_such_reward"),
        (["no_file.py:right"], 4, "no_file.py"),
    ],
)
def test_rewards_test_refuses_what_cannot_be_tried(
    words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rewards", "test", *words]) == code
    assert message in capsys.readouterr().err


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


def test_a_fresh_starter_config_says_at_once_all_that_is_to_be_filled_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new.yaml"
    assert main(["init", "config", str(path)]) == 0
    text = path.read_text()
    assert "    name: table  # installed: chartqa," in text, "the loader of one's own files needs no choice"
    assert "    # image_root: null\n" in text and "    # images: null\n" in text
    assert "  - name: <reward>  # installed: anls," in text and "path/to/file.py:function" in text
    assert main(["check", str(path)]) == 2
    complaint = capsys.readouterr().err
    keys = ("model.path", "data.train.path", "rewards.0.name", "algorithm.name")
    values = ("<model>", "<path>", "<reward>", "<algorithm>")
    for key, value in zip(keys, values, strict=True):
        assert f"    {key}: {value}\n" in complaint
        text = text.replace(value, {"<reward>": "exact", "<algorithm>": "grpo"}.get(value, "there"))
    assert "errors in the config" not in complaint and "install the package" not in complaint
    assert "replace each placeholder" in complaint and f"{path}:" in complaint
    path.write_text(text)
    assert main(["show", str(path)]) == 0, "nothing else is missing"


def test_init_plugin_writes_a_package_and_says_what_is_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "plugin", "my-rl"]) == 0
    said = capsys.readouterr().out
    assert "wrote my-rl/src/my_rl/algorithm.py\n" in said
    check = "mmrl plugins --check algorithm:my_rl reward:my_rl environment:my_rl monitor:my_rl"
    assert f'next: pip install -e "./my-rl[test]" && {check} && python -m pytest my-rl' in said
    project = tomllib.loads(Path("my-rl/pyproject.toml").read_text())
    assert project["project"]["name"] == "my-rl"
    entries = project["project"]["entry-points"]
    assert entries["mmrl.rewards"] == {"my_rl": "my_rl.reward:RightAndShort"}
    assert entries["mmrl.environments"] == {"my_rl": "my_rl.environment:HigherLower"}
    assert entries["mmrl.monitors"] == {"my_rl": "my_rl.monitor:EmptyAnswers"}
    files = [path for path in Path("my-rl").rglob("*") if path.is_file()]
    assert {"README.md", "pyproject.toml", ".gitignore", "test_reward.py", "__init__.py"} <= {f.name for f in files}
    for file in files:
        assert not re.search("new.plugin", file.read_text() + str(file), re.IGNORECASE)
    assert main(["init", "plugin", "my-rl"]) == 2
    assert "the folder exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My-Rl", "a package cannot be called 'My-Rl'"),
        ("my rl", "a package cannot be called 'my rl'"),
        ("../up", "a package cannot be called '../up'"),
        ("1st", "a package cannot be called '1st'"),
        ("class", "no Python keyword"),
        ("json", "taken by Python module 'json'"),
        ("grpo", "taken by algorithm plugin 'grpo' of mmrl"),
    ],
)
def test_init_plugin_refuses_names_that_cannot_be_or_are_taken(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "plugin", name]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def imported_by(*words: str) -> tuple[int, set[str]]:
    """The exit code of a command in a process of its own, and the top-level modules that it imported."""
    code = (
        "import json, sys\nfrom mmrl.commands.cli import main\ncode = main(sys.argv[1:])\n"
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
    code = (
        "import sys; from mmrl.plugin_host.registry import list_plugins, resolve\n"
        "for info in list_plugins(): resolve(info.kind, f'{info.distribution}:{info.name}')\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    modules = set(done.stdout.split())
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


UNREAD = """
import os, signal, sys
from pathlib import Path
from tests.faults.runs import at, fake

reading, writing = os.pipe()
os.close(reading)  # as when Ctrl-C has ended the tee that both streams went to
for number in (1, 2):
    os.dup2(writing, number)
folder, model, way = sys.argv[1:]
with fake(Path(folder), Path(model)) as runs:
    if way == "interrupted":
        with at("fake.update", 2, lambda: signal.raise_signal(signal.SIGINT)):
            code = runs.train(runs.config())
    else:
        code = runs.train(runs.config(**({} if way == "done" else {"trainer": {"run_dir": __file__}})))
sys.exit(code)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("way", "code", "steps"),
    [pytest.param("done", 0, 4, marks=pytest.mark.slow), ("interrupted", 130, 2), ("refused", 2, None)],
)
def test_a_run_whose_output_nobody_reads_goes_on_and_has_its_own_exit_code(way, code, steps, models, tmp_path) -> None:
    script = tmp_path / "unread.py"
    script.write_text(UNREAD)
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(script), str(tmp_path), str(models("qwen2")), way]
    assert subprocess.run(command, timeout=120, check=False, env=environment).returncode == code
    metrics = tmp_path / "run" / "metrics.jsonl"
    if steps is not None:
        assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(steps + 1))
        assert (tmp_path / "run" / "checkpoints" / f"step-{steps:06d}").exists()


def test_a_broken_pipe_within_training_is_no_success(monkeypatch, tmp_path, capsys) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise BrokenPipeError("a worker is gone")

    monkeypatch.setattr("mmrl.commands.train.load", fail)
    assert main(["train", "x.yaml"]) == 1
    assert "a worker is gone" in capsys.readouterr().err
    assert main(["train", "--dry-run", "x.yaml"]) == 0
