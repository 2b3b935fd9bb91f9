import errno
import io
import os
import subprocess
import sys

import pytest

from mmrl.system.console import Console, visible


class Terminal(io.StringIO):
    def isatty(self):
        return True


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


def test_the_bar_is_for_terminals_and_goes_away_before_a_line():
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        console = Console(10, stream)
        console.progress("generate", 3, 8)
        console.line("done")
        console.close()
    assert file.getvalue() == "done\n"
    assert "generate" in terminal.getvalue()
    assert "3/8" in terminal.getvalue()
    assert terminal.getvalue().endswith("\rdone\n")


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
