"""Start time and memory of the table loader on 100,000 rows with small images, beside Hugging Face ``datasets``.

    python tests/benchmarks/load_table.py FOLDER [ROWS]

Writes two parquet files into FOLDER, with row groups of 1,000 rows and with a single one, and reads each in fresh
processes: to the first row, then every row in order, then 1,000 rows at random.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

HOW_MANY_AT_RANDOM = 1000


def write(path: Path, num_rows: int, group: int) -> None:
    """A file of ``num_rows`` questions about a noisy digit each, which compress as badly as photographs."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image
    from sklearn.datasets import load_digits

    digits, rng, rows = load_digits(), np.random.default_rng(0), []
    schema = pa.schema(
        {
            "problem": pa.string(),
            "images": pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()})),
            "answer": pa.string(),
        }
    )
    for index in range(num_rows):
        pixels = np.kron(255 - digits.images[index % 1797] * 15, np.ones((4, 4))) - rng.integers(0, 16, (32, 32))
        buffer = io.BytesIO()
        Image.fromarray(pixels.clip(0).astype(np.uint8)).convert("RGB").save(buffer, "PNG", compress_level=0)
        images = [{"bytes": buffer.getvalue(), "path": None}]
        answer = str(digits.target[index % 1797])
        rows.append({"problem": f"<image>Digit {index}?", "images": images, "answer": answer})
    pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=group)


def read(how: str, path: str) -> None:
    """Read a file in this process, which does nothing else, and print what it took."""
    started = time.perf_counter()
    if how == "table":
        from mmrl_datasets.table import Table

        rows = Table(Table.Config(path=path)).load()
    else:
        import datasets

        datasets.disable_progress_bars()
        rows = datasets.load_dataset("parquet", data_files=path, split="train").with_format("arrow")
    first = rows[0]
    took = [f"{time.perf_counter() - started:.1f} s to the first row, {memory()} MB"]
    del first
    started = time.perf_counter()
    for index in range(len(rows)):
        rows[index]
    took.append(f"{(time.perf_counter() - started) / len(rows) * 1e3:.3f} ms a row in order")
    picked = random.Random(0).choices(range(len(rows)), k=HOW_MANY_AT_RANDOM)
    started = time.perf_counter()
    for index in picked:
        rows[index]
    took.append(f"{(time.perf_counter() - started) / len(picked) * 1e3:.2f} ms at random, {memory()} MB at the end")
    print(f"{how:9} {Path(path).name:14} {'; '.join(took)}; at most {memory('VmHWM')} MB", flush=True)


def memory(kind: str = "VmRSS") -> int:
    """Resident megabytes of this process, now or (VmHWM) at most so far."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind)]
    return int(line.split()[1]) // 1024


def main(folder: Path, num_rows: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    cache = folder / "cache"
    for name, group in (("groups.parquet", 1000), ("one.parquet", num_rows)):
        path = folder / name
        if not path.exists():
            write(path, num_rows, group)
        print(f"{name}: {path.stat().st_size / 2**20:.0f} MB")
        shutil.rmtree(cache, ignore_errors=True)
        for how in ("table", "table", "datasets", "datasets"):
            environment = {**os.environ, "HF_HOME": str(cache / how), "HF_DATASETS_CACHE": str(cache / how)}
            subprocess.run([sys.executable, __file__, how, str(path)], check=True, env=environment)
        for how in ("table", "datasets"):
            copied = sum(file.stat().st_size for file in (cache / how).rglob("*") if file.is_file())
            print(f"{how:9} {name:14} copied {copied / 2**20:.0f} MB")


if __name__ == "__main__":
    if sys.argv[1] in ("table", "datasets"):
        read(*sys.argv[1:3])
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100_000)
