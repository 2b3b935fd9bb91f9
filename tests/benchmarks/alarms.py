"""Calibrates the monitors: healthy runs give no alarm, and runs that are broken on purpose give the right one, early.

    python tests/benchmarks/alarms.py OUT [NAME ...] [--steps 60] [--list]

From the warm-up of ``examples/compare_algorithms.py``, each run trains the quickstart's tiny model to read digits, with
an evaluation every five steps, also with blank images. Six are healthy, one for each algorithm that is compared there.
Eight are broken; ``alarm_faults.py`` has what breaks them. Without names all of them run, one after the other, some two
minutes each on two idle cores. What is finished in OUT is not run again, so the script goes on where it was.

Written are a table on the console and OUT/alarms.md: the alarms with their steps, and the step of the first right one.
The alarms that ``mmrl monitor`` tells of the record must be those that the run has told. The exit code is 1 if a
healthy run has an alarm, a broken one lacks the right one, or a run failed.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from compare_algorithms import COMPARED, CONFIGS, OVERRIDES, call, lines_of, warm_up  # noqa: E402

FAULTS = "tests/benchmarks/alarm_faults.py"
ALWAYS = ("trainer.eval_every=5", "trainer.blank_every=1", "trainer.save_every=1000", "monitors=all")


@dataclass(frozen=True)
class Trial:
    """A run, and the monitors of which one has to tell what is wrong with it; none of a healthy one.

    Attributes:
        program: Words of Python in place of ``-m mmrl``.
    """

    words: Sequence[str]
    right: Sequence[str] = ()
    program: Sequence[str] = ("-m", "mmrl")


HEALTHY = {
    name: Trial([f"algorithm.name={name}", *OVERRIDES.get(name, [])]) for name in COMPARED if name not in CONFIGS
}
BROKEN = {
    "pays_length": Trial(
        [
            f"rewards=[{{name: exact, weight: 0.0}}, {{name: '{FAULTS}:length'}}]",
            "sampler.max_new_tokens=48",
        ],
        ["length_hacking"],
    ),
    "pays_keyword": Trial([f"rewards=[{{name: exact}}, {{name: '{FAULTS}:keyword', weight: 3.0}}]"], ["proxy_gain"]),
    "blank_training_images": Trial(["data.train.path=BLANK"], ["blind_policy"]),
    "learning_rate_times_50": Trial(["learner.lr=5.0e-2"], ["wild_gradient", "low_entropy", "dead_groups"]),
    "wrong_gold_column": Trial(["data.train.prompt=problem", "data.train.answer=problem"], ["reward_faults"]),
    "entropy_minimised": Trial([f"algorithm={{name: '{FAULTS}:Certain'}}"], ["low_entropy"]),
    "frozen_sampler": Trial(["trainer.on_mismatch=warn"], ["stale_data"], program=(FAULTS,)),
    "groups_of_two": Trial(["sampler.group_size=2", "trainer.prompts_per_step=64"], ["dead_groups"]),
}


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        alarms: (step, monitor, cause or message) in order.
        problem: What is wrong with it; empty if nothing.
    """

    name: str
    trial: Trial
    alarms: Sequence[Mapping[str, Any]] = field(default_factory=list)
    accuracy: Sequence[float] = ()
    problem: str = ""

    @property
    def first_right(self) -> int | None:
        return next((each["step"] for each in self.alarms if each["monitor"] in self.trial.right), None)

    @property
    def verdict(self) -> str:
        if self.problem:
            return self.problem
        if not self.trial.right:
            return "ok" if not self.alarms else "FALSE ALARM"
        return "MISSED" if self.first_right is None else f"told at step {self.first_right}"

    @property
    def is_good(self) -> bool:
        return not self.problem and (self.first_right is not None if self.trial.right else not self.alarms)


def main() -> int:
    return try_all(__doc__ or "", {**HEALTHY, **BROKEN}, 60, warm_up)


def try_all(
    about: str,
    trials: Mapping[str, Trial],
    steps: int,
    prepare: Callable[[Path], Sequence[str]],
    finish: Callable[[Trial, Path], Trial] = lambda trial, output: trial,
) -> int:
    """Run the trials that the command line names, and write their report; the exit code is 0 if all are good.

    Args:
        steps: Of a run, unless the command line says otherwise.
        prepare: Makes what all runs need in the folder of all runs, and gives the overrides that start them.
        finish: Gives a trial the overrides that depend on that folder.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("output", type=Path, help="folder of all runs")
    parser.add_argument("names", nargs="*", default=[], metavar="NAME", help=f"of {', '.join(trials)}; all by default")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    args = parser.parse_args()
    if args.list or set(args.names) - set(trials):
        print("\n".join(f"{name}: {' '.join(trial.words)}" for name, trial in trials.items()))
        return 0 if args.list else 2
    output = args.output.resolve()
    start = prepare(output)
    outcomes = []
    for name in args.names or trials:
        print(f"{name}: ", end="", flush=True)
        outcomes.append(outcome(output, name, finish(trials[name], output), start, args.steps))
        print(outcomes[-1].verdict, flush=True)
        (output / "alarms.md").write_text(report(outcomes) + "\n")
    print(f"\n{report(outcomes)}\n\n{output / 'alarms.md'}")
    return 0 if all(each.is_good for each in outcomes) else 1


def outcome(output: Path, name: str, trial: Trial, start: Sequence[str], steps: int) -> Outcome:
    """Train one run, unless it is finished, and read its alarms."""
    run = output / name
    words = [word.replace("BLANK", str(blank_data(output))) if "BLANK" in word else word for word in trial.words]
    words = [f"trainer.steps={steps}", *start, *ALWAYS, *words]
    try:
        train(output, name, trial.program, words)
        events = run / "events.jsonl"  # which is not there if nothing happened
        lines = events.read_text().splitlines() if events.exists() else []
        live = [each for each in map(json.loads, lines) if each["kind"] == "alarm"]
        command = [sys.executable, "-m", "mmrl", "monitor", str(run), "--json"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        recorded = json.loads(done.stdout)["alarms"]
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        return Outcome(name, trial, problem=f"failed: {error}")
    accuracy = [line["eval/accuracy"] for line in lines_of(run) if "eval/accuracy" in line]
    told = [(each["step"], each["monitor"], each["message"]) for each in live]
    again = [(each["step"], each["monitor"], each["message"]) for each in recorded]
    problem = "" if told == again else f"mmrl monitor tells {len(again)} alarms, and the run told {len(told)}"
    return Outcome(name, trial, recorded, [*accuracy[:1], *accuracy[-1:]], problem)


def train(output: Path, name: str, program: Sequence[str], words: Sequence[str]) -> None:
    """Train into OUT/NAME, unless that very command has been run there to its end.

    Raises:
        RuntimeError: It failed.
    """
    run, seal = output / name, output / "logs" / f"{name}.json"
    if seal.exists() and json.loads(seal.read_text()) == list(words):
        return
    shutil.rmtree(run, ignore_errors=True)
    call(output, name, *program, "train", "examples/digits_grpo.yaml", *words, f"trainer.run_dir={run}")
    seal.write_text(json.dumps(list(words)))


def blank_data(output: Path) -> Path:
    """The digits with grey training images, written once; held-out ones are as they were."""
    folder = output / "blank_data"
    if not folder.exists():
        import pyarrow as pa
        import pyarrow.parquet as pq
        from PIL import Image

        shutil.copytree(output / "data", folder)
        table = pq.read_table(folder / "train.parquet")
        rows = table["images"].to_pylist()
        for image in (image for images in rows for image in images):
            with Image.open(io.BytesIO(image["bytes"])) as picture:
                grey = Image.new("RGB", picture.size, (128, 128, 128))
            file = io.BytesIO()
            grey.save(file, "PNG")
            image["bytes"] = file.getvalue()
        place = table.column_names.index("images")
        table = table.set_column(place, table.schema.field("images"), pa.array(rows, table.schema.field("images").type))
        pq.write_table(table, folder / "train.parquet")
    return folder


def report(outcomes: Sequence[Outcome]) -> str:
    """A table of the runs, and each alarm in full."""
    rows = [["run", "held-out accuracy", "right monitors", "alarms (step)", "verdict"], ["---"] * 5]
    for each in outcomes:
        alarms = ", ".join(f"{alarm['monitor']} {alarm['cause']} ({alarm['step']})" for alarm in each.alarms)
        accuracy = " to ".join(f"{100 * value:.0f} %" for value in each.accuracy)
        rows.append([each.name, accuracy, ", ".join(each.trial.right) or "none", alarms or "none", each.verdict])
    table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)
    details = [
        f"- {each.name}, step {a['step']}, {a['monitor']}: {a['message']}" for each in outcomes for a in each.alarms
    ]
    return "\n".join([table, "", *details])


if __name__ == "__main__":
    sys.exit(main())
