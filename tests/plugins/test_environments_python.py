"""The environment `python`: code of the policy in a sandbox, its output and pictures back."""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from mmrl.errors import ConfigError
from mmrl.types import Call, Message, Observation, Prompt, RawImage, Turn
from mmrl_environments.python import Python
from mmrl_rewards.sandboxes import Outcome
from tests.canary import Canary

LOCAL = {"i_know_local_is_no_security_boundary": True}


def begin(prompt: Prompt | None = None, **options) -> Python:
    python = Python(Python.Config(**(LOCAL | options)))
    python.prepare()
    python.reset(prompt or Prompt("p", (Message("user", "?"),)), 0)
    return python


def ask(python: Python, *calls: Call, text: str = "") -> Observation:
    return asyncio.run(python.step(Turn(text, calls, 0, "stop", 100)))


def run(python: Python, code: str) -> list:
    found = ask(python, Call("python", {"code": textwrap.dedent(code)}))
    assert not found.done and found.reward == 0
    return list(found.content)


def test_it_starts_only_in_a_sandbox_that_is_named_and_confirmed():
    with pytest.raises(ValidationError, match="the sandbox local is no security boundary"):
        Python.Config()
    with pytest.raises(ConfigError, match="cannot be made"):
        Python(Python.Config(sandbox="no_such_package:Box"))


def test_names_live_on_and_output_errors_and_the_last_value_come_back():
    python = begin()
    assert run(python, "x = 20\nprint('hi')\nx + 1") == ["hi\n21\n"]
    assert run(python, "x += 2\nimport sys; print('err', file=sys.stderr); x") == ["err\n22\n"]
    assert run(python, "y = x") == ["(no output)"]
    (text,) = run(python, "def f():\n    return 1 / 0\nx = 5\nf()")
    assert text.endswith("ZeroDivisionError: division by zero\n") and "cell" in text and "/tmp" not in text
    assert run(python, "x, y") == ["(5, 22)\n"]
    assert "SyntaxError" in run(python, "1 +")[0]
    assert "KeyboardInterrupt" in run(python, "raise KeyboardInterrupt")[0]
    assert run(python, "import sys; print(1); sys.exit(3)") == ["1\n"]
    assert ask(python).done


def test_sets_have_one_order_in_every_cell_and_every_run():
    words = "{'apple', 'bread', 'cheese', 'dates', 'eggs'}"
    found = {tuple(run(begin(), f"list({words})")) for _ in range(3)}
    python = begin()
    found |= {tuple(run(python, f"names = list({words}); names")), tuple(run(python, "names"))}
    assert len(found) == 1
    assert run(python, "import sys; sys.flags.no_user_site, sys.flags.safe_path") == ["(1, True)\n"]


def test_fresh_cells_know_nothing_of_each_other():
    python = begin(state="fresh")
    run(python, "x = 1")
    assert "NameError" in run(python, "x")[0]


def test_episodes_share_nothing():
    python = begin()
    run(python, "x = 1")
    python.reset(Prompt("p", ()), 0)
    assert "NameError" in run(python, "x")[0]


def test_pictures_come_back_bounded_and_those_of_the_prompt_are_there():
    file = io.BytesIO()
    Image.new("RGB", (60, 40), (1, 2, 3)).save(file, "PNG")
    prompt = Prompt("p", (Message("user", "<image>?"),), (RawImage(file.getvalue(), "x"),))
    python = begin(prompt, max_plots=2, max_plot_pixels=600)
    text, image = run(
        python,
        """
        from PIL import Image
        image = Image.open("image_1.png").crop((0, 0, 30, 20))
        image.save("part.png")
        image.size
        """,
    )
    assert text == "(30, 20)\n" and image.size == (30, 20)
    np.testing.assert_array_equal(np.asarray(image), np.full((20, 30, 3), (1, 2, 3)))
    assert run(python, "1") == ["1\n"]  # a picture of before is none of this cell
    _, *images = run(python, "for n in range(5): Image.new('RGB', (100, 60), (n, 0, 0)).save(f'{n}.png')")
    assert [each.size for each in images] == [(32, 19), (32, 19)]


MATPLOTLIB = """
import sys, types, io
from PIL import Image
class Figure:
    def savefig(self, file, format, dpi): Image.new("RGB", (8, 6), "red").save(file, format)
plots = types.ModuleType("matplotlib.pyplot")
plots.numbers = []
plots.get_fignums = lambda: list(plots.numbers)
plots.figure = lambda number: Figure()
plots.close = lambda which: plots.numbers.clear()
sys.modules["matplotlib.pyplot"] = plots
"""


def test_open_figures_come_back_once():
    """matplotlib is no dependency: a module with the functions that are called stands in for it."""
    python = begin(max_plots=3)
    run(python, MATPLOTLIB)
    _, *images = run(python, "plots.numbers += [1, 2, 3, 4]")
    assert [each.size for each in images] == [(8, 6)] * 3
    assert run(python, "0") == ["0\n"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import time; time.sleep(60)", "did not end within 1.5 s"),
        ("while True: pass", "did not end within 1.5 s"),
        ("import os; os._exit(0)", "ended its interpreter"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended its interpreter"),
        ("x = ' ' * 2**34", "MemoryError"),
        ("open('big', 'wb').write(b'x' * 2**26)", ""),
        ("open('bomb.png', 'wb').write(b'no image')", "8"),
        ("print('x' * 10**7)", "characters left out"),
        ("import os\nos.write(1, b'direct')\nos.system('echo child')", ""),
        ("print('\\ud800 \\x1b[2J <|im_end|>')", "<|im_end|>"),
        ("\0", ""),
    ],
)
def test_code_that_misbehaves_is_answered_with_a_bounded_text(code, said):
    python = begin(time_limit_s=1.5, max_characters=500)
    start = time.perf_counter()
    (text,) = run(python, code)
    assert said in text and len(text) < 600 and time.perf_counter() - start < 60
    assert run(python, "7") == ["7\n"]  # what did not end is not run again


def test_the_cells_of_a_turn_share_its_time():
    limits = list[float]()

    class Box:
        """Its programs take 0.2 s and come to no end."""

        def run(self, program: str, stdin: str, time_limit_s: float) -> Outcome:
            limits.append(time_limit_s)
            time.sleep(0.2)
            return Outcome(False, "", timed_out=True)

    python = begin(time_limit_s=0.5)
    python._sandbox = Box()
    found = ask(python, *[Call("python", {"code": "x"})] * 64).content
    assert [text.strip() for text in found] == ["The code did not end within 0.5 s."] * 64
    assert 1 <= len(limits) <= 3 and limits == sorted(limits, reverse=True) and limits[0] <= 0.5
    count = len(limits)
    ask(python, Call("python", {"code": "x"}))  # the next turn has its own time
    assert len(limits) == count + 1


def test_a_limit_that_the_environments_own_would_cut_is_refused():
    with pytest.raises(ConfigError, match="given up after 60 s") as caught:
        begin(time_limit_s=55)
    assert "more than 60" in caught.value.remedy
    begin(time_limit_s=54)


def test_images_that_are_too_large_or_no_longer_fit_are_left_out_and_told():
    python = begin(max_plots=8, sandbox_options={"output_bytes": 2**18})
    code = """
    import os
    from PIL import Image
    for n in range(4):  # 0.12 MB each in base64
        Image.frombytes("RGB", (170, 170), os.urandom(3 * 170 * 170)).save(f"{n}.png", compress_level=0)
    Image.new("RGB", (9, 9)).save("small.png")
    """
    text, *images = run(python, code)
    assert [each.size for each in images] == [(170, 170), (9, 9)]
    assert text == "(no output)\n(3 images left out: too large or too many.)"
    text, *images = run(begin(), "open('large.png', 'wb').write(b'x' * (2**22 + 1))")
    assert images == [] and text == "4194305\n\n(1 image left out: too large or too many.)"


def test_a_text_of_any_characters_fits_the_output():
    (text,) = run(begin(max_characters=10**6, time_limit_s=40), "print('\U0001f600' * 3_000_000)")
    assert len(text) > 10**6 and "left out" in text


def test_code_that_does_not_end_is_answered_and_not_run_again():
    python = begin(time_limit_s=1)
    assert run(python, "x = 1\nwhile True: pass") == ["The code did not end within 1 s."]
    assert "NameError" in run(python, "x")[0]


def test_a_call_that_does_not_fit_is_answered():
    python = begin()
    for arguments in ({}, None, {"code": 3}, {"code": "1", "x": 2}, {"code": "1" * 60_000}):
        (text,) = ask(python, Call("python", arguments)).content
        assert "code" in text or "unexpected" in text


def test_code_in_a_text_is_found_by_its_pattern():
    python = begin(action="```python\n(.*?)```")
    assert python.tools() == []
    found = ask(python, text="So\n```python\nx = 3\nprint(x)\n```\n")
    assert found.content == ["3\n"] and found.role == "user"
    assert ask(python, text="It is 3.").done


def test_what_the_code_writes_stays_in_a_folder_that_is_removed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DB_PASSWORD", "canary-password")
    python = begin(max_characters=10**5)
    assert "canary-password" not in run(python, "import os; dict(os.environ)")[0]
    (folder,) = run(python, "open('note', 'w').write('x')\nimport os; print(os.getcwd())")
    assert not Path(folder.splitlines()[0]).exists()
    assert not list(tmp_path.iterdir()) and os.getcwd() == str(tmp_path)


def test_what_the_code_answers_is_only_decoded_as_an_image(tmp_path):
    mark = tmp_path / "mark"
    (tmp_path / "secret.png").write_bytes(b"")
    attack = pickle.dumps(Canary(mark))
    code = f"""
    import os
    open("a.png", "wb").write({attack!r})
    os.symlink({str(tmp_path / "secret.png")!r}, "b.png")
    os.mkdir("c.png")
    """
    assert len(run(begin(), code)) == 1 and not mark.exists()
    pickle.loads(attack)
    assert mark.exists(), "the canary works"
