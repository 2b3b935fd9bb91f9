"""Seconds to the first step and memory of a run over many rows with images, with the fake engine.

    python -m tests.benchmarks.many_rows FOLDER [ROWS [SCAN_ROWS]]

Writes a parquet file of ROWS (1,000,000) tiny images into FOLDER, with row groups of 1,000 rows, and trains two steps
on it in a process of its own, which is told SCAN_ROWS (100,000); then it reads rows at random.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GROUP = 1000
AT_RANDOM = 2000
RUN = """\
import sys, threading, time
from pathlib import Path
from mmrl.system import failpoints
from tests.faults.runs import Runs, fake

begun, folder = time.monotonic(), Path(sys.argv[1])

def most() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

reached = []
def inject(name):
    if name == "fake.update" and not reached:
        reached.append(name)
        print("FIRST", time.monotonic() - begun, flush=True)

failpoints.inject = inject
with fake(folder, Path(sys.argv[2])) as runs:
    code = runs.train(Path(sys.argv[3]))
print("MOST", most(), flush=True)
sys.exit(code)
"""


@dataclass(frozen=True)
class Measured:
    """A run of two steps.

    Attributes:
        first_step_s: From the start of the command, imports included, to the first update.
        most_bytes: Most resident memory.
    """

    first_step_s: float
    most_bytes: int
    seconds: float


def write(path: Path, num_rows: int) -> None:
    """Questions about 32x32 pictures, of which a thousand differ; one row in 500 has no answer."""
    import io

    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    rng, pictures = np.random.default_rng(0), list[bytes]()
    for _ in range(GROUP):
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(buffer, "JPEG", quality=80)
        pictures.append(buffer.getvalue())
    image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    schema = pa.schema({"problem": pa.string(), "images": pa.list_(image), "answer": pa.string()})
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_rows, GROUP):
            numbers = range(start, min(start + GROUP, num_rows))
            columns = {
                "problem": [f"<image>What is in picture {number}?" for number in numbers],
                "images": [[{"bytes": pictures[number % GROUP], "path": None}] for number in numbers],
                "answer": [None if number % 500 == 7 else str(number % 10) for number in numbers],
            }
            writer.write_table(pa.table(columns, schema), row_group_size=GROUP)


def measure(folder: Path, num_rows: int, scan_rows: int) -> Measured:
    """Train two steps of eight prompts on FOLDER/rows.parquet."""
    from mmrl.engine.aids.tiny_model import write_model

    model = folder / "model"
    if not model.exists():
        write_model(model, "qwen2_5_vl")
    run = folder / f"run-{num_rows}-{scan_rows}-{time.time_ns()}"
    config = {
        "model": {"path": str(model)},
        "data": {
            "train": {"name": "table", "path": str(folder / "rows.parquet"), "limit": num_rows},
            "scan_rows": scan_rows,
            "max_images": 1,
        },
        "rewards": [{"name": f"{ROOT / 'tests' / 'faults' / 'letters.py'}:letters"}],
        "algorithm": {"name": "grpo"},
        "sampler": {"group_size": 4, "max_new_tokens": 8},
        "trainer": {"steps": 2, "prompts_per_step": 8, "run_dir": str(run)},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    words = [sys.executable, "-c", RUN, str(folder), str(model), str(path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    begun = time.monotonic()
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    first, most = (re.search(rf"^{word} (\S+)", done.stdout, re.MULTILINE) for word in ("FIRST", "MOST"))
    assert first is not None and most is not None, done.stdout
    return Measured(float(first[1]), int(most[1]), time.monotonic() - begun)


def rows_per_second(path: Path) -> float:
    """Rows a second in a random order, in this process."""
    from mmrl_datasets.table import Table

    rows = Table(Table.Config(path=str(path))).load()
    picked = [number for number in random.Random(0).sample(range(len(rows)), AT_RANDOM) if number % 500 != 7]
    begun = time.perf_counter()
    for number in picked:
        _ = rows[number]
    return len(picked) / (time.perf_counter() - begun)


def main(folder: Path, num_rows: int, scan_rows: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.parquet"
    if not path.exists():
        begun = time.monotonic()
        write(path, num_rows)
        print(f"{path}: {path.stat().st_size / 2**20:.0f} MB, written in {time.monotonic() - begun:.0f} s", flush=True)
    found = measure(folder, num_rows, scan_rows)
    how = "scanned" if num_rows <= scan_rows else "measured ahead"
    print(f"{num_rows} rows, {how}: {found.first_step_s:.1f} s to the first step, {found.most_bytes / 1e6:.0f} MB")
    print(f"{rows_per_second(path):.0f} rows a second at random")


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[2:]]
    main(Path(sys.argv[1]), *[*numbers, *(1_000_000, 100_000)[len(numbers) :]])
