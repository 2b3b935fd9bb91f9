import errno
import fcntl
import io
import os
import pty
import select
import struct
import subprocess
import sys
import termios

import pytest

from mmrl.system.console import Console, visible
from mmrl.system.report import duration


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    """A terminal that can draw, on a machine that builds nothing for others."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)


def screen(text, width=200):
    """The lines of a terminal that has got the text."""
    lines, column = [""], 0
    for character in text:
        if character == "\n":
            lines.append("")
        if character in "\r\n":
            column = 0
            continue
        if column == width:
            lines.append("")
            column = 0
        lines[-1] = lines[-1][:column].ljust(column) + character + lines[-1][column + 1 :]
        column += 1
    return [line.rstrip() for line in lines]


def test_a_step_of_ranks_of_their_own_says_which_of_them_waited_and_how_old_its_tokens_were():
    stream = io.StringIO()
    metrics = {"perf/step_s": 2.0, "staleness/mean": 1.25, "staleness/max": 4.0}
    metrics |= {"perf/idle_sampler_fraction": 0.0, "perf/idle_learner_fraction": 0.218}
    Console(20, stream).step(3, metrics)
    assert stream.getvalue() == "step  3/20  stale 1.2  sampler idle 0%  learner idle 22%  2.0 s\n"


def test_a_step_is_one_line_of_the_metrics_that_are_there():
    stream = io.StringIO()
    metrics = {
        "perf/step_s": 1.84,
        "reward/mean": 0.534,
        "eval/accuracy": 0.61,
        "length/completion_mean": 6.2,
        "group/zero_signal_fraction": 0.21,
        "policy/grad_norm": 1.3,
        "lr": 1.0,
    }
    console = Console(200, stream)
    console.step(12, metrics)
    console.step(13, {"perf/step_s": 0.5})
    assert stream.getvalue() == (
        "step  12/200  reward 0.53  acc 0.61  len 6.2  zero 0.21  grad 1.3  1.8 s\nstep  13/200  0.5 s\n"
    )


def test_preferences_without_pairs_show_their_margin_and_a_loss_without_a_policys_part_is_shown_whole():
    console = Console(9, stream := io.StringIO(), accuracy="pref")
    console.step(1, {"eval/accuracy": 0.75, "eval/margin": 0.31, "loss/total": 0.5, "loss/policy": 0.25})
    console.step(2, {"eval/margin": 0.314, "loss/total": 0.5})
    assert stream.getvalue() == "step 1/9  pref 0.75  loss 0.25\nstep 2/9  margin 0.31  loss 0.5\n"


def test_the_bar_is_for_terminals_and_stays_below_the_lines():
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        console = Console(10, stream)
        console.progress("generate", 8, 8)
        console.step(1, {"perf/step_s": 2.0}, 340.0)
        console.progress("update", 1, 1)
        console.line("warning: a step was slow")
        shown = screen(stream.getvalue())
        console.close()
    lines = ["step  1/10  2.0 s  5 min 40 s left", "warning: a step was slow"]
    assert file.getvalue().splitlines() == lines
    assert shown[:2] == [] or shown[:2] == lines
    assert screen(terminal.getvalue()) == [*lines, ""]


def test_control_characters_are_shown_and_not_obeyed():
    assert visible("a\x1b[2J\r\n\u202eb\x9b\ud800é漢") == "a\\x1b[2J\\r\\n\\u202eb\\x9b\\ud800é漢"
    assert visible("a\nb\t", keep="\n") == "a\nb\\t"
    stream = io.StringIO()
    Console(1, stream).line("x\x1b]0;title\x07")
    assert stream.getvalue() == "x\\x1b]0;title\\x07\n"


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC, errno.EIO])
def test_a_stream_that_takes_nothing_any_more_stops_nothing(number):
    class Gone(Terminal):
        is_gone = False

        def write(self, text):
            if self.is_gone:
                raise OSError(number, os.strerror(number))
            return super().write(text)

    stream = Gone()
    console = Console(10, stream)
    console.progress("generate", 1, 8)
    stream.is_gone = True
    console.progress("generate", 2, 8)
    console.step(1, {"reward/mean": 1.0})
    console.progress("generate", 3, 8)
    console.close()
    stream.is_gone = False
    console.line("back")
    assert stream.getvalue().endswith("back\n") and "reward" not in stream.getvalue()


DIVERTING = """\
import os, sys
from pathlib import Path
from mmrl.system.console import diverted

with diverted(Path(sys.argv[1])):
    os.write(2, b"noise of a library\\n")
    print("from mmrl", file=sys.stderr)
    if len(sys.argv) > 2:
        raise OSError("it failed")
os.write(2, b"after\\n")
print("later", file=sys.stderr)
"""


def diverting(*words: str) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, "-c", DIVERTING, *words)
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_noise_goes_to_a_file_and_messages_of_mmrl_do_not(tmp_path):
    done = diverting(str(tmp_path / "log"))
    assert done.stderr == "from mmrl\nafter\nlater\n" and done.returncode == 0
    assert (tmp_path / "log").read_text() == "noise of a library\n"


def test_noise_is_shown_after_all_where_the_block_fails(tmp_path):
    (tmp_path / "log").write_text("of an earlier attempt\n")
    done = diverting(str(tmp_path / "log"), "fail")
    assert done.stderr.startswith("from mmrl\nnoise of a library\n") and "it failed" in done.stderr
    assert "an earlier attempt" not in done.stderr and done.returncode == 1


def running(stream, num_steps=130, **options):
    """A console after the twelfth step, with its bar."""
    console = Console(num_steps, stream, **options)
    console.step(12, {"perf/step_s": 2.0}, 340.0)
    console.progress("generate", 64, 64)
    return console


def test_the_bar_tells_the_step_the_time_that_is_left_and_the_phase_and_is_gone_at_the_end(monkeypatch):
    terminal, now = Terminal(), [100.0]
    monkeypatch.setattr("mmrl.system.console.time.monotonic", lambda: now[0])
    console = running(terminal)
    assert screen(terminal.getvalue())[-1] == "step 12/130  5 min 40 s left |#8                  | generate 64/64"
    now[0] += 40.0  # within a step the time goes on
    console.progress("update", 1, 4)
    assert screen(terminal.getvalue())[-1] == "step 12/130  5 min left |#8                  | update 1/4"
    console.close()
    assert screen(terminal.getvalue()) == ["step  12/130  2.0 s  5 min 40 s left", ""]


def test_a_bar_below_the_line_of_a_step_is_of_that_step():
    terminal = Terminal()
    console = running(terminal)
    console.step(65, {}, 60.0)
    assert screen(terminal.getvalue())[-1] == "step 65/130  1 min left |##########          |"
    console.step(130, {}, 0.0)
    assert screen(terminal.getvalue())[-1] == "step 130/130 |####################|"
    console.close()


def test_the_bar_says_what_ends_the_run_earlier_and_the_last_step_has_no_time_left():
    stream = io.StringIO()
    console = running(stream, stops_at="eval/accuracy >= 0.9")
    console.step(130, {}, 0.0)
    until = "5 min 40 s left, or until eval/accuracy >= 0.9"
    assert stream.getvalue() == f"step  12/130  2.0 s  {until}\nstep 130/130\n"


@pytest.mark.parametrize("variable", ["TERM=dumb", "CI=true"])
def test_a_terminal_that_cannot_draw_a_line_again_gets_plain_lines(monkeypatch, variable):
    monkeypatch.setenv(*variable.split("="))
    terminal = Terminal()
    running(terminal).close()
    assert terminal.getvalue() == "step  12/130  2.0 s  5 min 40 s left\n"


def test_what_others_print_and_warn_of_comes_above_the_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    console = Console(130)
    with console.guarding():
        console.step(12, {"perf/step_s": 2.0}, 340.0)
        console.progress("generate", 64, 64)
        print("half a ", end="")
        print("line of a plugin")
        print("UserWarning: a library is old", file=sys.stderr)
        for count in (1, 2):
            print(f"\rloaded {count} of 2", end="", file=sys.stderr)
        print("\r\nno end", end="", file=sys.stderr)
        shown = screen(terminal.getvalue())
        console.close()
    bar = "step 12/130  5 min 40 s left |#8                  | generate 64/64"
    assert shown[0] == "step  12/130  2.0 s  5 min 40 s left" and shown[1] == "half a line of a plugin"
    assert shown[2:4] == ["UserWarning: a library is old", "loaded 2 of 2"] and shown[-1] == bar
    assert "loaded 1 of 2" not in terminal.getvalue()
    assert [line for line in shown if "#" in line] == [bar]
    assert sys.stdout is terminal and terminal.getvalue().endswith("no end")


RUNNING = """
import sys
from mmrl.system.console import Console

console = Console(130)
for step in (1, 2):
    console.step(step, {"perf/step_s": 2.0, "reward/mean": 0.5}, 340.0)
    console.progress("generate", 64, 64)
console.line("warning: told")
console.progress("update", 1, 1)
print("ready", file=sys.stderr)
input()
console.close()
"""


def test_a_terminal_without_columns_gets_plain_lines():
    ours, theirs = pty.openpty()  # its size is 0 x 0
    with open(theirs, "w", encoding="utf-8") as stream:
        running(stream).close()
        assert os.read(ours, 65536) == b"step  12/130  2.0 s  5 min 40 s left\r\n"
    os.close(ours)


@pytest.mark.parametrize("columns", [20, 34, 120])
def test_the_bar_is_one_line_of_a_narrow_terminal(columns):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    pipe = subprocess.PIPE
    run = subprocess.Popen([sys.executable, "-c", RUNNING], stdin=pipe, stdout=theirs, stderr=pipe)
    os.close(theirs)
    assert run.stderr.readline() == b"ready\n"
    shown = b""
    poll = select.poll()  # ``select.select`` takes no descriptor from 1,024 on
    poll.register(ours, select.POLLIN)
    while poll.poll(0):  # a terminal gives what it has in pieces
        shown += os.read(ours, 65536)
    text = shown.decode()
    assert "?" not in text
    bar = "step 2/130  5 min 40 s left |▎                   | update 1/1"
    step = "step   {}/130  reward 0.50  2.0 s  5 min 40 s left"
    wrapped = [piece for line in (step.format(1), step.format(2), "warning: told") for piece in wrap(line, columns)]
    assert screen(text, columns) == [*wrapped, bar[: columns - 1].rstrip()]
    run.communicate(b"\n")
    os.close(ours)
    assert run.returncode == 0


def wrap(line, columns):
    return [line[place : place + columns].rstrip() for place in range(0, len(line), columns)]


def test_a_duration_has_two_units_at_most():
    seconds = [0.4, 42.4, 60, 340, 3600, 7500, 90000]
    shown = ["0 s", "42 s", "1 min", "5 min 40 s", "1 h", "2 h 5 min", "1 d 1 h"]
    assert [duration(each) for each in seconds] == shown
