"""A run's output on the terminal: one line a step, and a live bar within the step if someone is watching."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from mmrl.system.redaction import Redactor

_MEAN = "mean"
_COLUMNS = [
    ("reward/mean", "reward {:.2f}"),
    (_MEAN, "eval {:.2f}"),
    ("eval/accuracy", "acc {:.2f}"),
    ("loss/policy", "loss {:.3g}"),
    ("length/completion_mean", "len {:.1f}"),
    ("group/zero_signal_fraction", "zero {:.2f}"),
    ("rollout/acceptance_rate", "kept {:.2f}"),
    ("policy/grad_norm", "grad {:.2g}"),
    ("perf/step_s", "{:.1f} s"),
]


class Console:
    """Lines on a stream; ``step 12/200  reward 0.53  acc 0.61  loss 0.012  len 6.2  zero 0.21  grad 1.3  1.8 s``.

    Where what tells right from wrong has other values than 0 and 1, ``eval`` is their mean; ``acc`` is the share of
    value 1.

    The bar exists on a terminal only; other streams get whole lines and nothing else. A stream that nobody reads any
    more, or that has no room, ends no run: its lines are dropped.

    Args:
        mean: The metric that is the mean of what tells right from wrong.
    """

    def __init__(self, num_steps: int, stream: TextIO | None = None, *, mean: str | None = None) -> None:
        self._num_steps, self._mean = num_steps, mean
        self._is_graded = False
        self._stream = stream or sys.stdout
        self._is_terminal = self._stream.isatty()
        self._bar: tqdm[None] | None = None
        self._redact = Redactor()

    def line(self, text: str) -> None:
        """Print a text, its further lines indented; control characters are shown, secrets are not."""
        self.close()
        shown = visible(self._redact(text), keep="\n").replace("\n", "\n  ")
        with suppress(OSError):
            print(shown, file=self._stream, flush=True)

    def lines(self, lines: Iterable[str]) -> None:
        """Print a block."""
        for line in lines:
            self.line(line)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a step's metrics, as far as they are there."""
        width = len(str(self._num_steps))
        if self._mean is not None and (mean := metrics.get(self._mean)) is not None and "eval/accuracy" in metrics:
            self._is_graded |= mean != metrics["eval/accuracy"]
            metrics = {**metrics, **({_MEAN: mean} if self._is_graded else {})}
        shown = [form.format(metrics[name]) for name, form in _COLUMNS if name in metrics]
        self.line("  ".join([f"step {step:{width}}/{self._num_steps}", *shown]))

    def progress(self, phase: str, done: int, total: int) -> None:
        """Move the live bar; on a terminal only."""
        if not self._is_terminal:
            return
        with suppress(OSError):
            if self._bar is None:
                self._bar = tqdm(file=self._stream, leave=False, dynamic_ncols=True)
            self._bar.set_description_str(visible(phase), refresh=False)
            self._bar.total, self._bar.n = total, done
            self._bar.refresh()

    def close(self) -> None:
        """Take the live bar away."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(OSError):
                bar.close()


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
