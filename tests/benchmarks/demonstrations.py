"""Supervised training on many short rows, of this code and of an earlier one in turns: processor seconds, memory, disk.

    python -m tests.benchmarks.demonstrations BEFORE [--rows 10000] [--per-step 100] [--rounds 2]

BEFORE is a folder with the earlier code, such as a git worktree. The algorithm is ``sft``, the model a tiny Qwen2 on a
CPU, and every row is learned once. Seconds are those of the whole process, threads that write records included, from
the end of step 10 to the end of the run: other work on the machine moves them less than the clock's. Memory is the most
that the process ever held. Bytes are those of ``rollouts/`` for each token of a completion.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 10
RUN = """\
import json, resource, sys, time
from importlib import import_module
from pathlib import Path
from mmrl.commands.cli import main
from mmrl.engine.aids.tiny_model import write_model

rows, model, out, per_step, steps, warm_up = sys.argv[1:]
try:
    Trainer = import_module("mmrl.step.loop").Trainer
except ModuleNotFoundError:
    Trainer = import_module("mmrl.training.trainer").Trainer
began, step = {}, Trainer.train_step

def noted(self, number):
    values = step(self, number)
    began[number] = time.process_time()
    return values

Trainer.train_step = noted
config = {
    "model": {"path": str(write_model(Path(model), "qwen2")), "dtype": "float32"},
    "algorithm": {"name": "sft"},
    "data": {"train": {"name": "table", "path": rows, "demonstration": "answer"}},
    "trainer": {"run_dir": out, "steps": int(steps), "prompts_per_step": int(per_step), "save_optimizer": "none"},
    "monitors": [],
}
Path("config.yaml").write_text(json.dumps(config))
assert main(["train", "config.yaml"]) == 0
seconds = (time.process_time() - began[int(warm_up)]) / (int(steps) - int(warm_up))
print(json.dumps({"cpu_s": seconds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def write_rows(path: Path, count: int) -> None:
    """Rows of a short question and an answer of 10 to 60 words."""
    drawn = random.Random(0)
    words = ["red", "sum", "three", "of", "the", "picture", "then", "so", "left", "angle", "is", "two"]
    with path.open("w") as file:
        for number in range(count):
            text = " ".join(drawn.choices(words, k=drawn.randint(10, 60)))
            file.write(json.dumps({"id": str(number), "problem": f"what of {number}?", "answer": text}) + "\n")


def record_bytes(run: Path) -> tuple[int, int]:
    """Bytes of the records of a run, and tokens of completions in them."""
    import pyarrow.parquet as pq

    files = sorted((run / "rollouts").glob("*.parquet"))
    tokens = 0
    for file in files:
        ids = pq.ParquetFile(file).read(columns=["rollouts.list.element.token_ids"])["rollouts"].combine_chunks()
        tokens += len(ids.values.field("token_ids").values)
    return sum(file.stat().st_size for file in files), tokens


def measure(root: Path, rows: Path, count: int, per_step: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        path = os.pathsep.join(str(root / part) for part in ("", "plugins", "datasets"))
        settings = [str(rows), f"{folder}/model", str(out), str(per_step), str(count // per_step), str(WARM_UP)]
        done = subprocess.run(
            [sys.executable, "-c", RUN, *settings],
            env=os.environ | {"PYTHONPATH": path},
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        size, tokens = record_bytes(out)
        shutil.rmtree(out)
    return found | {"bytes": size, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path, help="a folder with earlier code")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--per-step", type=int, default=100, help="rows of a step")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        write_rows(rows, options.rows)
        for _ in range(options.rounds):
            for name, root in (("before", options.before.resolve()), ("now", ROOT)):
                found = measure(root, rows, options.rows, options.per_step)
                each = found["bytes"] / found["tokens"] if found["tokens"] else 0.0
                line = f"{name:6}  {found['cpu_s']:.4f} s of a processor a step, {found['peak'] / 1e6:.0f} MB at most"
                print(f"{line}, {each:.1f} B a token of {found['tokens'] * options.per_step // options.rows} a step")


if __name__ == "__main__":
    main()
