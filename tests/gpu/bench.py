"""What a section of the proof works with: a kind of device, sizes, a folder; and how it measures."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.gpu.row import Row, Status

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bench:
    """A section's own.

    Attributes:
        area: Its name.
        kind: ``cpu`` or ``cuda``.
        small: Whether only the code is to be tried, at sizes for a CPU.
        folder: An empty one, which is removed when the section has ended.
        emit: Takes each row as soon as it is known.
    """

    area: str
    kind: Any
    small: bool
    folder: Path
    emit: Callable[[Row], None]

    @property
    def device(self) -> str:
        """The torch device."""
        from mmrl.engine import device

        return device.torch_device(self.kind)

    def pick(self, whole: T, small: T) -> T:
        """A size."""
        return small if self.small else whole

    def row(self, name: str, value: str = "", *, good: bool = True, why: str = "") -> Row:
        """A row of this section."""
        status: Status = "ok" if good else "bad"
        return Row(self.area, name, status, value, why)

    def skip(self, name: str, why: str) -> None:
        self.emit(Row(self.area, name, "skipped", "", why))

    def attempt(self, name: str, measure: Callable[[str], Row]) -> None:
        """Emit the row that ``measure`` makes under a name; a bad one if it raises."""
        from mmrl.commands.doctor.finding import failure

        try:
            found = measure(name)
        except Exception as error:
            found = self.row(name, good=False, why=failure(error))
        self.emit(found)
        self.free()  # not in the handler: the error's traceback holds tensors

    def free(self) -> None:
        """Give memory back that nothing refers to any more."""
        from mmrl.engine import device

        gc.collect()
        device.free_cache(self.kind)

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.kind == "cuda":
            import torch

            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], Any], repeats: int = 5) -> float:
        """Median seconds of a call, after one that is not counted."""
        return statistics.median(self.all_seconds(call, repeats + 1)[1:])

    def all_seconds(self, call: Callable[[], Any], repeats: int) -> list[float]:
        """Seconds of each call, to the end of what it gave the device."""
        found = []
        for _ in range(repeats):
            self.wait()
            begin = time.perf_counter()
            call()
            self.wait()
            found.append(time.perf_counter() - begin)
        return found

    def peak_bytes(self, call: Callable[[], Any]) -> int | None:
        """The most that is allocated on the device during a call, what was there before included; None on a CPU."""
        if self.kind == "cpu":
            call()
            return None
        import torch

        self.free()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.wait()
        return int(torch.cuda.max_memory_allocated())


def gigabytes(size: float | None) -> str:
    """GB of 10^9 bytes; a CPU tells no peak."""
    return "not told on a CPU" if size is None else f"{size / 1e9:.2f} GB"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def lacks_image_features() -> str:
    """Why the learner cannot be given images by this transformers; empty if it can."""
    import transformers

    from mmrl.engine.network.image_needs import trains_on_images

    if trains_on_images():
        return ""
    return (
        f"transformers {transformers.__version__}: the model's forward takes no mm_encoder_outputs, and would drop the "
        "images without a word; 5.18 and later take them"
    )
