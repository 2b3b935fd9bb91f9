"""A Python interpreter for the policy, in a sandbox that you name.

    environment: {name: python, i_know_local_is_no_security_boundary: true, time_limit_s: 10}

The policy calls the tool ``python`` with its code; with ``action``, a regular expression, the code is a part of the
text. It reads what the code prints, the value of its last line if that is an expression, and the traceback if it
raises, all in ``max_characters``. Figures of matplotlib that are open at the end, and PNG files that the code writes
into its working folder, come back as images, as far as they are not too large or too many: the text says how many were
left out. The prompt's images lie there as ``image_1.png``, ``image_2.png``, ...

A sandbox keeps nothing, so a cell's predecessors are run again before it, silently (``state: replay``): names live on,
and so does what they printed into files, while random numbers and clocks differ unless the code seeds them. All of it
takes place within ``time_limit_s``, which all cells of a turn share. A cell that did not end in time, or that ended its
interpreter, is not run again. With ``state: fresh`` each cell is alone.

As for the reward ``code``, the sandbox that ships is no security boundary, and starts only when that is confirmed. What
the code can reach is up to the sandbox; the reply is text and image files, which are only ever decoded.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from mmrl.errors import ConfigError, DataError
from mmrl.interfaces import Environment, Tool, ToolError
from mmrl.types import Call, Observation, Prompt, RawImage, Turn
from mmrl_environments.actions import ActionPattern, last_action, text_of
from mmrl_environments.pictures import fitted, full_size
from mmrl_rewards.sandboxes import GRACE_S, Outcome, SandboxOptions

_IMAGE_BYTES = 2**24
"""Images of a cell, in base64."""
_CHARACTER_BYTES = 24
"""Bytes of output for a character of the limit: JSON escapes it in 12, and beginning and end are kept."""
_SPARE_BYTES = 2**12
_PIXELS = 16_000_000
"""Pixels of a cell's images, which an observation can hold."""
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
        """Seconds of a turn's cells, the earlier ones included; environment.timeout_s is more than 5 seconds longer."""
        max_characters: Annotated[int, Field(ge=100, le=10**6)] = 4000
        """Longest output; of a longer one the policy reads beginning and end."""
        max_plots: Annotated[int, Field(ge=0, le=64)] = 4
        """Most images of a cell; further ones are left out."""
        max_plot_pixels: Annotated[int, Field(ge=1, le=16_000_000)] = 262_144
        """Larger images are shrunk to it."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        text_bytes = _SPARE_BYTES + _CHARACTER_BYTES * config.max_characters
        self._image_bytes = _IMAGE_BYTES
        if config.sandbox == "local":
            options = {"output_bytes": _IMAGE_BYTES + text_bytes, **config.sandbox_options}
            config = config.model_copy(update={"sandbox_options": options})
            self._image_bytes = min(_IMAGE_BYTES, options["output_bytes"] - text_bytes)
        self._sandbox = config.open_sandbox()
        self._cells: tuple[str, ...] = ()
        self._files: dict[str, str] = {}
        self._deadline = 0.0

    def prepare(self) -> None:
        if self.config.time_limit_s + GRACE_S >= self.timeout_s:
            raise ConfigError(
                f"a turn's code may take {self.config.time_limit_s:g} s and {GRACE_S:g} s to be ended, but the "
                f"environment is given up after {self.timeout_s:g} s",
                where="environment.time_limit_s, environment.timeout_s",
                remedy=f"set environment.timeout_s to more than {self.config.time_limit_s + GRACE_S:g}",
            )

    def example(self) -> str:
        return "" if self.config.action is None else text_of(self.config.action, "print(1)")

    def tools(self) -> Sequence[Tool]:
        return [] if self.config.action is not None else [self.python]

    def reset(self, prompt: Prompt, seed: int) -> None:
        self._cells = ()
        self._files = {f"image_{number}.png": _png(image) for number, image in enumerate(prompt.images, 1)}

    async def step(self, turn: Turn) -> Observation:
        self._deadline = time.monotonic() + self.config.time_limit_s
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
        late = f"The code did not end within {self.config.time_limit_s:g} s."
        if (left_s := self._deadline - time.monotonic()) <= 0:
            return [late]
        mark = secrets.token_hex(_MARK_BYTES)
        earlier = self._cells if self.config.state == "replay" else ()
        limits = {
            "characters": self.config.max_characters,
            "plots": self.config.max_plots,
            "image_bytes": self._image_bytes,
        }
        order = {"mark": mark, "earlier": earlier, "code": code, "files": self._files, **limits}
        outcome = self._sandbox.run(_DRIVER, json.dumps(order), left_s)
        reply = _reply(outcome, mark)
        if reply is None:
            return [late if outcome.timed_out else "The code ended its interpreter."]
        self._cells = (*self._cells, code)
        text, files, left_out = reply
        images = self._pictures(files[: self.config.max_plots])
        left_out += len(files) - len(images)
        told = f"\n({left_out} {'image' if left_out == 1 else 'images'} left out: too large or too many.)"
        return [self._clipped(text) + told * bool(left_out), *images]

    def _clipped(self, text: str) -> str:
        limit = self.config.max_characters
        if len(text) <= limit:
            return text or "(no output)"
        return f"{text[: limit // 2]}\n... {len(text) - limit} characters left out ...\n{text[-(limit // 2) :]}"

    def _pictures(self, files: Sequence[str]) -> list[Any]:
        """Pictures that can be decoded, as many as an observation can hold."""
        found, pixels = list[Any](), 0
        for file in files:
            try:
                image = full_size(RawImage(base64.b64decode(file, validate=True), "an image of the policy's code"))
            except (DataError, binascii.Error):
                continue
            image = fitted(image, 1, self.config.max_plot_pixels)
            pixels += image.width * image.height
            if pixels <= _PIXELS:
                found.append(image)
        return found


def _reply(outcome: Outcome, mark: str) -> tuple[str, list[str], int] | None:
    """The text, the images and the number of those left out, by the driver; None if it has not come to an end."""
    lines = [line for line in outcome.output.splitlines() if line.startswith(mark)]
    try:
        reply = json.loads(lines[-1].removeprefix(mark)) if lines else None
    except ValueError:
        return None
    if not isinstance(reply, dict) or not isinstance(reply.get("text"), str):
        return None
    images, left_out = reply.get("images"), reply.get("left_out")
    images = [each for each in images if isinstance(each, str)] if isinstance(images, list) else []
    return reply["text"], images, min(max(left_out, 0), 10**6) if type(left_out) is int else 0


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


LARGEST = 2**22  # bytes of an image; of a larger one the size alone is known
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
                data = file.read(LARGEST + 1)
            found[name] = data if len(data) <= LARGEST else os.path.getsize(name)
    return found


def figures():
    plots = sys.modules.get("matplotlib.pyplot")
    for number in plots.get_fignums()[: order["plots"]] if plots else ():
        file = io.BytesIO()
        plots.figure(number).savefig(file, format="png", dpi=72)
        yield file.getvalue() if file.tell() <= LARGEST else file.tell()
    if plots:
        yield from [0] * (len(plots.get_fignums()) - order["plots"])
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
kept, room = [], order["image_bytes"]
for data in images:
    size = (len(data) + 2) // 3 * 4 + 4 if isinstance(data, bytes) else room + 1  # in base64 and quotes
    if len(kept) < order["plots"] and size <= room:
        kept.append(base64.b64encode(data).decode())
        room -= size
told = {"text": printed.text(), "images": kept, "left_out": len(images) - len(kept)}
reply.write("\n" + order["mark"] + json.dumps(told) + "\n")
reply.flush()
os._exit(0)
"""
"""The program in the sandbox: it runs the cells, and tells of the last one in a line that begins with the mark."""
