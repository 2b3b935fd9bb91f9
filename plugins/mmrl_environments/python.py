"""A Python interpreter for the policy, in a sandbox that you name.

    environment: {name: python, i_know_local_is_no_security_boundary: true, time_limit_s: 10}

The policy calls the tool ``python`` with its code; with ``action``, a regular expression, the code is a part of the
text. It reads what the code prints, the value of its last line if that is an expression, and the traceback if it
raises, all in ``max_characters``. Figures of matplotlib that are open at the end, and PNG files that the code writes
into its working folder, come back as images. The prompt's images lie there as ``image_1.png``, ``image_2.png``, ...

A sandbox keeps nothing, so a cell's predecessors are run again before it, silently (``state: replay``): names live on,
and so does what they printed into files, while random numbers and clocks differ unless the code seeds them. All of it
takes place within ``time_limit_s``. A cell that did not end in time, or that ended its interpreter, is not run again.
With ``state: fresh`` each cell is alone.

As for the reward ``code``, the sandbox that ships is no security boundary, and starts only when that is confirmed. What
the code can reach is up to the sandbox; the reply is text and image files, which are only ever decoded.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from mmrl.environments import Environment, Tool, ToolError
from mmrl.errors import DataError
from mmrl.types import Call, Observation, Prompt, RawImage, Turn
from mmrl_environments.actions import ActionPattern, last_action
from mmrl_environments.pictures import fitted, full_size
from mmrl_rewards.sandboxes import Outcome, SandboxOptions

_OUTPUT_BYTES = 2**24
"""Output of the local sandbox, images in base64 included."""
_LONGEST_CODE = 50_000
_MARK_BYTES = 8


class Python(Environment):
    """Runs the policy's code."""

    class Config(SandboxOptions):
        action: ActionPattern | None = None
        """Regular expression whose group is code, instead of calls of the tool python."""
        state: Literal["replay", "fresh"] = "replay"
        """replay: earlier cells are run again before each, so that names live on. fresh: each cell is alone."""
        time_limit_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
        """Seconds of a cell, the earlier ones included; environment.timeout_s must be longer."""
        max_characters: Annotated[int, Field(ge=100, le=10**6)] = 4000
        """Longest output; of a longer one the policy reads beginning and end."""
        max_plots: Annotated[int, Field(ge=0, le=64)] = 4
        """Most images of a cell; further ones are left out."""
        max_plot_pixels: Annotated[int, Field(ge=1, le=16_000_000)] = 262_144
        """Larger images are shrunk to it."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.sandbox == "local":
            options = {"output_bytes": _OUTPUT_BYTES, **config.sandbox_options}
            config = config.model_copy(update={"sandbox_options": options})
        self._sandbox = config.open_sandbox()
        self._cells: tuple[str, ...] = ()
        self._files: dict[str, str] = {}

    def tools(self) -> Sequence[Tool]:
        return [] if self.config.action is not None else [self.python]

    def reset(self, prompt: Prompt, seed: int) -> None:
        self._cells = ()
        self._files = {f"image_{number}.png": _png(image) for number, image in enumerate(prompt.images, 1)}

    async def step(self, turn: Turn) -> Observation:
        if self.config.action is None:
            return await self.run_calls(turn)
        code = last_action(self.config.action, turn.text)
        if code is None:
            return Observation(done=True)
        try:
            return Observation(self._run(code), role="user")
        except ToolError as error:
            return Observation(str(error), role="user")

    def call(self, call: Call) -> Any:
        if call.name == "python" and not isinstance((call.arguments or {}).get("code"), str):
            return "python: code is the program, as a text."
        return super().call(call)

    def python(self, code: str) -> Any:
        """Run Python code and read what it prints.

        Args:
            code: The program.
        """
        return Observation(self._run(code))

    def _run(self, code: str) -> list[Any]:
        """A cell's output for the policy: a text, then images."""
        if len(code) > _LONGEST_CODE:
            raise ToolError(f"The code has {len(code)} characters. It may have {_LONGEST_CODE}.")
        mark = secrets.token_hex(_MARK_BYTES)
        earlier = self._cells if self.config.state == "replay" else ()
        limits = {"characters": self.config.max_characters, "plots": self.config.max_plots}
        order = {"mark": mark, "earlier": earlier, "code": code, "files": self._files, **limits}
        outcome = self._sandbox.run(_DRIVER, json.dumps(order), self.config.time_limit_s)
        reply = _reply(outcome, mark)
        if reply is None:
            text = f"The code did not end within {self.config.time_limit_s:g} s."
            return [text if outcome.timed_out else "The code ended its interpreter."]
        self._cells = (*self._cells, code)
        return [self._clipped(reply[0]), *filter(None, map(self._picture, reply[1][: self.config.max_plots]))]

    def _clipped(self, text: str) -> str:
        limit = self.config.max_characters
        if len(text) <= limit:
            return text or "(no output)"
        return f"{text[: limit // 2]}\n... {len(text) - limit} characters left out ...\n{text[-(limit // 2) :]}"

    def _picture(self, file: str) -> Any:
        """The decoded image; None if it is none that can be read."""
        try:
            image = full_size(RawImage(base64.b64decode(file, validate=True), "an image of the policy's code"))
        except (DataError, binascii.Error):
            return None
        return fitted(image, 1, self.config.max_plot_pixels)


def _reply(outcome: Outcome, mark: str) -> tuple[str, list[str]] | None:
    """The text and the images that the driver tells of; None if it has not come to an end."""
    lines = [line for line in outcome.output.splitlines() if line.startswith(mark)]
    try:
        reply = json.loads(lines[-1].removeprefix(mark)) if lines else None
    except ValueError:
        return None
    if not isinstance(reply, dict) or not isinstance(reply.get("text"), str):
        return None
    images = reply.get("images")
    return reply["text"], [each for each in images if isinstance(each, str)] if isinstance(images, list) else []


def _png(image: RawImage) -> str:
    file = io.BytesIO()
    full_size(image).save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


_DRIVER = r"""
import ast, base64, io, json, os, sys, traceback

order = json.load(sys.stdin)
reply = os.fdopen(os.dup(1), "w")  # the code's own output goes elsewhere, that of its children too
null = os.open(os.devnull, os.O_RDWR)
for descriptor in (0, 1, 2):
    os.dup2(null, descriptor)
os.environ["MPLBACKEND"] = "Agg"
for name, data in order["files"].items():
    with open(name, "wb") as file:
        file.write(base64.b64decode(data))


class Printed(io.TextIOBase):
    '''Keeps the beginning and the end of what is printed.'''

    def __init__(self):
        self.first, self.last, self.left_out = "", "", 0

    def writable(self):
        return True

    def write(self, text):
        room = order["characters"] - len(self.first)
        self.first, rest = self.first + text[:room], text[room:]
        last = self.last + rest
        self.last = last[-order["characters"]:]
        self.left_out += len(last) - len(self.last)
        return len(text)

    def text(self):
        gap = "\n... %d characters left out ...\n" % self.left_out if self.left_out else ""
        return self.first + gap + self.last


names = {"__name__": "__main__"}


def run(code, printed):
    sys.stdout = sys.stderr = printed
    try:
        tree = ast.parse(code, "cell")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), names)
        if last is not None and (value := eval(compile(ast.Expression(last.value), "cell", "eval"), names)) is not None:
            print(repr(value))
    except SystemExit:
        pass
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(error, limit=-5, file=printed)


def pictures():
    found = {}
    for name in sorted(os.listdir()):
        if name.lower().endswith(".png") and os.path.isfile(name) and not os.path.islink(name):
            with open(name, "rb") as file:
                found[name] = file.read(2**22)
    return found


def figures():
    plots = sys.modules.get("matplotlib.pyplot")
    for number in plots.get_fignums()[: order["plots"]] if plots else ():
        file = io.BytesIO()
        plots.figure(number).savefig(file, format="png", dpi=72)
        yield file.getvalue()
    if plots:
        plots.close("all")


for earlier in order["earlier"]:
    run(earlier, Printed())
list(figures())
before, printed = pictures(), Printed()
run(order["code"], printed)
images = []
try:
    images += figures()
except BaseException as error:
    printed.write("The figure cannot be drawn: %r" % error)
images += [data for name, data in pictures().items() if before.get(name) != data]
images = [base64.b64encode(data).decode() for data in images[: order["plots"]]]
reply.write("\n" + order["mark"] + json.dumps({"text": printed.text(), "images": images}) + "\n")
reply.flush()
os._exit(0)
"""
"""The program in the sandbox: it runs the cells, and tells of the last one in a line that begins with the mark."""
