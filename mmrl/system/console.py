"""A run's output on the terminal: one line a step, and below the lines a bar that is drawn again while it works."""

from __future__ import annotations

import os
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from mmrl.system.redaction import Redactor
from mmrl.system.report import duration

_REWARD = [("reward/mean", "reward {:.2f}")]
_ONE_SET: Mapping[str, tuple[str, str | None]] = {"": ("eval/accuracy", None)}
_LOSS = [("loss/policy", "loss {:.3g}")]
_WHOLE_LOSS = [("loss/total", "loss {:.3g}")]
"""That of algorithms whose loss has no part of this name."""
_OTHERS = [
    ("length/completion_mean", "len {:.1f}"),
    ("group/zero_signal_fraction", "zero {:.2f}"),
    ("rollout/acceptance_rate", "kept {:.2f}"),
    ("policy/grad_norm", "grad {:.2g}"),
    ("critic/explained_variance", "expl {:.2f}"),
    ("staleness/mean", "stale {:.2g}"),
    ("perf/idle_sampler_fraction", "sampler idle {:.0%}"),
    ("perf/idle_learner_fraction", "learner idle {:.0%}"),
    ("perf/step_s", "{:.1f} s"),
]
_REDRAWN_S = 0.1
"""Least seconds from one drawing of the bar to the next."""
_RUN_BAR = "step {n_fmt}/{total_fmt}{desc} |{bar:20}| {unit}"


class Console:
    """Lines on a stream; ``step 12/200  reward 0.53  acc 0.61  loss 0.012  len 6.2  zero 0.21  grad 1.3  1.8 s  6 min
    left``.

    Where what tells right from wrong has other values than 0 and 1, ``eval`` is their mean; ``acc`` is the share of
    value 1. Of several evaluation sets each has its own, with its name: ``acc geometry 0.61``.

    A terminal that can draw a line again has a bar: of the run from its first step on, and before it or without a run
    of what is done at the moment. Other streams get whole lines and nothing else. A stream that nobody reads any more,
    or that has no room, ends no run: its lines are dropped.

    Args:
        num_steps: Steps of the run; 0 without one.
        evaluated: For each evaluation set, by its name, the metrics that are the share of value 1 and the mean of what
            tells right from wrong.
        stops_at: The condition that ends the run earlier, such as ``eval/accuracy >= 0.9``.
        accuracy: The word for the share: ``acc`` of right answers, ``pref`` of comparisons that the policy decides as
            the dataset does. Where an evaluation has no such share, ``margin`` is the difference of mean rewards.
    """

    def __init__(
        self,
        num_steps: int,
        stream: TextIO | None = None,
        *,
        evaluated: Mapping[str, tuple[str, str | None]] = _ONE_SET,
        stops_at: str | None = None,
        accuracy: str = "acc",
    ) -> None:
        self._num_steps, self._evaluated, self._stops_at = num_steps, evaluated, stops_at
        self._accuracy = accuracy
        self._graded = set[str]()
        self._stream = stream or sys.stdout
        self._draws = _draws(self._stream)
        self._bar: tqdm[None] | None = None
        self._step, self._drawn_at = 0, 0.0
        self._ends_at: float | None = None
        self._redact = Redactor()
        self._lock = threading.RLock()  # a thread may sample beside the one that learns

    def line(self, text: str) -> None:
        """Print a text, its further lines indented; control characters are shown, secrets are not."""
        shown = visible(self._redact(text), keep="\n").replace("\n", "\n  ")
        with suppress(OSError), self._lock, self._above():
            print(shown, file=self._stream, flush=True)

    def lines(self, lines: Iterable[str]) -> None:
        """Print a block."""
        for line in lines:
            self.line(line)

    def step(self, step: int, metrics: Mapping[str, float], seconds_left: float | None = None) -> None:
        """Print a step's metrics, as far as they are there, and the time that is left."""
        width = len(str(self._num_steps))
        loss = _LOSS if _LOSS[0][0] in metrics else _WHOLE_LOSS
        columns = [*_REWARD, *self._evaluation_columns(metrics), *loss, *_OTHERS]
        shown = [form.format(metrics[name]) for name, form in columns if name in metrics]
        is_known = seconds_left is not None and step < self._num_steps
        self._step, self._ends_at = step, time.monotonic() + (seconds_left or 0.0) if is_known else None
        if self._bar is not None:  # it is drawn again below the line
            self._bar.n, self._bar.unit = step, ""
            self._bar.set_description_str(self._told_left(), refresh=False)
        self.line("  ".join([f"step {step:{width}}/{self._num_steps}", *shown, *self._left()]))

    def _left(self) -> list[str]:
        """The time that is left, if that is known."""
        if self._ends_at is None:
            return []
        left = duration(max(0.0, self._ends_at - time.monotonic()))
        return [f"{left} left, or until {self._stops_at}" if self._stops_at else f"{left} left"]

    def _told_left(self) -> str:
        """The time that is left, in the bar."""
        return "".join(f"  {each}" for each in self._left())

    def _evaluation_columns(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Metrics of the evaluation sets, each with its form."""
        for name, (share, mean) in self._evaluated.items():
            label = f" {name}" if name else ""
            if mean is not None and share in metrics and metrics.get(mean, metrics[share]) != metrics[share]:
                self._graded.add(name)
            if mean is not None and name in self._graded:
                yield mean, f"eval{label} {{:.2f}}"
            yield share, f"{self._accuracy}{label} {{:.2f}}"
            if share not in metrics:  # of completions that are no pairs
                yield f"{share.removesuffix('accuracy')}margin", f"margin{label} {{:.2g}}"

    def progress(self, phase: str, done: int, total: int) -> None:
        """Tell how far a phase is; on a terminal only."""
        now = time.monotonic()
        if not self._draws or (done < total and now - self._drawn_at < _REDRAWN_S):
            return
        self._drawn_at = now
        with suppress(OSError), self._lock:
            texts = self._texts(visible(phase), done, total)
            if self._bar is None:
                shape = {"bar_format": _RUN_BAR} if self._num_steps else {}
                self._bar = tqdm(file=self._stream, leave=False, position=0, dynamic_ncols=True, **shape, **texts)
            self._bar.total, self._bar.n, self._bar.unit = texts["total"], texts["initial"], texts["unit"]
            self._bar.set_description_str(texts["desc"], refresh=True)

    def _texts(self, phase: str, done: int, total: int) -> dict[str, Any]:
        """The bar's count and texts: of the run, where it is one's, else of the phase."""
        if self._num_steps:
            texts = {"desc": self._told_left(), "unit": f"{phase} {done}/{total}"}
            return {"total": self._num_steps, "initial": self._step, **texts}
        return {"total": total, "initial": done, "desc": phase, "unit": "it"}

    def close(self) -> None:
        """Take the bar away."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(OSError):
                bar.close()

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Prints of others in this block, such as a warning, come above the bar."""
        with ExitStack() as stack:
            if self._draws:
                for redirect, stream in ((redirect_stdout, sys.stdout), (redirect_stderr, sys.stderr)):
                    if stream.isatty():
                        beside = _Beside(stream, self._above)
                        stack.callback(beside.release)
                        stack.enter_context(redirect(beside))
            yield

    @contextmanager
    def _above(self) -> Iterator[None]:
        """The bar is away in this block, and drawn again after it."""
        if self._bar is None:
            yield
        else:
            with tqdm.external_write_mode(file=self._stream):
                yield


class _Beside:
    """A stream of a terminal that has a bar. It gets whole lines, each in a block in which the bar is away.

    Args:
        above: Such a block.
    """

    def __init__(self, stream: TextIO, above: Callable[[], AbstractContextManager[None]]) -> None:
        self._stream, self._above, self._held = stream, above, ""

    def write(self, text: str) -> int:
        """Hold what is no whole line yet; of a bar that others draw again and again, its last state."""
        lines, end, rest = text.rpartition("\n")
        if end:
            with self._above():
                self._stream.write(self._held + lines + end)
        held = rest if end else self._held + rest
        drawn = held.rstrip("\r")
        self._held = drawn.rpartition("\r")[2] + held[len(drawn) :]
        return len(text)

    def release(self) -> None:
        """Write what is held."""
        held, self._held = self._held, ""
        with suppress(OSError, ValueError):
            self._stream.write(held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _draws(stream: TextIO) -> bool:
    """True for a terminal that someone watches, that can draw a line again and that does not say it has no columns."""
    is_able = stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown") and not os.environ.get("CI")
    with suppress(OSError, ValueError):
        return is_able and os.get_terminal_size(stream.fileno()).columns > 0
    return is_able


@contextmanager
def diverted(log: Path) -> Iterator[None]:
    """Send what libraries write to the process's standard error in a block to a file; ``sys.stderr`` stays.

    If the block raises, the file's text is written to standard error after all.
    """
    sys.stderr.flush()
    kept, before = os.dup(2), sys.stderr
    with log.open("a+b") as file:
        begin = file.seek(0, os.SEEK_END)
        os.dup2(file.fileno(), 2)
        if _writes_to(before, 2):
            sys.stderr = os.fdopen(os.dup(kept), "w", buffering=1, errors="backslashreplace")
        try:
            yield
        except BaseException:
            file.seek(begin)
            os.write(kept, file.read())
            raise
        finally:
            if sys.stderr is not before:
                sys.stderr.close()
                sys.stderr = before
            os.dup2(kept, 2)
            os.close(kept)


def _writes_to(stream: TextIO, descriptor: int) -> bool:
    with suppress(OSError, ValueError):
        return stream.fileno() == descriptor
    return False


def visible(text: str, keep: str = "") -> str:
    """The text with control, format and line-break characters, except those in ``keep``, written out as ``\\x1b``."""
    return "".join(c if c in keep or not _is_control(c) else _escape(c) for c in text)


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"}


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
