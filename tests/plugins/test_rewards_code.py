"""Programs of a model run in the sandbox that was asked for, within its limits."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from mmrl.errors import ConfigError
from mmrl.rollout.rewards.worker import call
from mmrl.types import EncodedPrompt, Prompt, Rollout
from mmrl_rewards.code import Code, read_tests
from mmrl_rewards.sandboxes import LocalSandbox, Outcome

LOCAL = {"i_know_local_is_no_security_boundary": True}
DOUBLE = "def f(x):\n    return 2 * x"


def score(program, answer, columns=None, fenced=True, **options):
    row = Prompt("p", (), answer=answer, columns=columns or {})
    prompt = EncodedPrompt(prompt=row, text="", token_ids=np.zeros(0, np.int32), images=())
    text = f"Here it is:\n```python\n{program}\n```\nDone." if fenced else program
    reward = Code(Code.Config(**(LOCAL | options)))
    return call(reward, [Rollout(prompt, (), 0, text, "stop", 1)])[0]


def test_the_local_sandbox_starts_only_when_it_is_confirmed():
    with pytest.raises(ValidationError, match="the sandbox local is no security boundary"):
        Code.Config()
    with pytest.raises(ConfigError, match="cannot be made"):
        Code(Code.Config(sandbox="no_such_package:Box"))
    assert "NOT a security boundary" in (LocalSandbox.__doc__ or "")


def test_asserts_and_pairs_count_by_share_or_all_together():
    assert score(DOUBLE, "assert f(2) == 4") == 1
    assert score(DOUBLE, ["assert f(2) == 4", "assert f(2) == 5"]) == 0.5
    assert score(DOUBLE, ["assert f(2) == 4", "assert f(2) == 5"], all_or_nothing=True) == 0
    adder = "a, b = map(int, input().split())\nprint(a + b)"
    pairs = {"inputs": ["1 2\n", "3 4\n", "5 5"], "outputs": ["3\n", "7", "11"]}
    assert score(adder, pairs) == pytest.approx(2 / 3)
    assert score(adder, None, {"tests": '[{"input": "1 2", "output": "3"}]'}, tests_column="tests") == 1


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "def f(x): return 5", "1 +", "",
        "print('passed')\nimport os; os._exit(0)", "import time\ntime.sleep(60)", "while True: pass",
        "x = ' ' * 2**34", "open('a', 'wb').write(b'x' * 2**24)", "while True: print('x' * 10**5)", "\0",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os\nfor name in os.listdir(): print(open(name).read().split('\\n')[-2])\nos._exit(0)",
        "import os\nprint(open('program.py').read().rpartition('passed')[2]); os._exit(0)",
        "import os, sys\nopen('f', 'w').write('def f(x): return 5')\n"
        "os.execv(sys.executable, [sys.executable, '-O', 'f'])",
        "import os\ntry: print(os.read(os.open(f'/proc/{os.getppid()}/fd/0', 0), 9999))\nfinally: os._exit(0)",
    ],
)  # fmt: skip
def test_a_program_that_ends_early_fails_hangs_or_takes_too_much_fails(program):
    start = time.perf_counter()
    assert score(program, "assert f(2) == 4", time_limit_s=1.0) == 0
    assert time.perf_counter() - start < 40


def test_a_hanging_program_costs_one_limit_and_leaves_no_process(tmp_path):
    note = tmp_path / "pid"
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)"
    )
    start = time.perf_counter()
    assert score(program, ["assert 1"] * 10, time_limit_s=1.5) == 0
    assert time.perf_counter() - start < 40
    state, deadline = Path(f"/proc/{int(note.read_text())}/stat"), time.monotonic() + 30
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":  # Z: nobody has waited for it yet
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_descendant_in_a_session_of_its_own_is_killed_too(tmp_path):
    note = tmp_path / "pid"
    program = (
        "import os, time\n"
        "if not os.fork():\n"
        "    os.setsid()\n"
        "    if not os.fork():\n"
        f"        open({str(note)!r}, 'w').write(str(os.getpid()))\n"
        "        time.sleep(60)\n"
        "    os._exit(0)\n"
        f"while not os.path.exists({str(note)!r}): time.sleep(0.01)\n"
        "def f(x): return 2 * x"
    )
    assert score(program, "assert f(2) == 4", time_limit_s=5.0) == 1
    assert not Path("/proc", note.read_text()).exists()


def test_a_test_finds_neither_itself_nor_its_mark_in_the_programs_files_and_parent():
    looks = (
        "import os\n"
        "def seen():\n"
        "    found = ''.join(open(name).read() for name in os.listdir())\n"
        "    pid = os.getppid()\n"
        "    for _ in range(2):\n"  # its driver and the driver's supervisor
        "        try: found += open(f'/proc/{pid}/fd/0').read()\n"
        "        except OSError: pass\n"
        "        pid = open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1]\n"
        "    return found"
    )
    assert score(looks, "assert 'needle-' + str(7) not in seen()  # needle-7") == 1


def test_the_program_sees_neither_environment_nor_folder_of_the_user(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "1")
    program = "import os\nseen = dict(os.environ); here = os.getcwd()"
    assert score(program, f"assert 'MY_SECRET' not in seen and here != {os.getcwd()!r}") == 1


def test_what_has_no_tests_is_unscorable_and_what_has_no_program_is_wrong():
    assert [read_tests(value) for value in (None, "", [], {}, 7, "{}", '["', float("nan"))] == [[]] * 8
    assert score(DOUBLE, None) is None
    assert score("no program here", "assert True", fenced=False) == 0
    assert score("```python\nx = 1", "assert True", fenced=False) == 0
    assert score(f"```\nwrong\n```\nno:\n```python\n{DOUBLE}\n```", "assert f(1) == 2", fenced=False) == 1


def test_a_sandbox_of_ones_own_is_named_by_its_class(tmp_path, monkeypatch):
    (tmp_path / "boxes.py").write_text(
        "from mmrl_rewards.sandboxes import Outcome\n"
        "class Echo:\n"
        "    def __init__(self, output): self.output = output\n"
        "    def run(self, program, stdin, time_limit_s): return Outcome(True, self.output)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = {"sandbox": "boxes:Echo", "i_know_local_is_no_security_boundary": False}
    tests = {"inputs": ["", ""], "outputs": ["3", "4"]}
    assert score("x", tests, sandbox_options={"output": "3\n"}, **options) == 0.5
    with pytest.raises(ConfigError, match="cannot be made"):
        score("x", tests, **options)
    assert Outcome(True, "").timed_out is False
    assert sys.modules["boxes"].Echo
