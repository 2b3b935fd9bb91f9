"""Train one warm-up with every algorithm and compare the held-out accuracies.

    python examples/compare_algorithms.py [--output DIR] [--algorithms a,b] [--steps 60] [--smoke-steps 6] [overrides]

The quickstart's tiny model reads handwritten digits about half right after its supervised warm-up, which is saved in
DIR and the same for all. From there each algorithm trains in a run of its own, with ``examples/digits_grpo.yaml``: ten
for ``--steps`` steps with an evaluation every ten, the others for ``--smoke-steps``. PPO with a critic, its two
variants and distillation have files of their own, ``examples/digits_ppo.yaml`` and others. The steps in which a critic
alone learns come on top, and count in the pictures; the teacher of ``opd`` is the end of ``grpo``. Overrides, such as
``learner.minibatches=4``, go to all of these runs. Written are a table on the console, DIR/results.json, and the
accuracies by step and by second in DIR/curves.svg and DIR/curves_by_second.svg. What is finished in DIR is not run
again.

The exit code is 1 if a run failed, a metric is not a finite number or missing, or 60 steps gained less than 10 points.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import yaml

ROOT = Path(__file__).resolve().parents[1]
EVAL_EVERY = 10
STEPS = 60
LEAST_GAIN = 0.1
"""Of held-out accuracy, in ``STEPS`` steps or more: less is a failure."""

COMPARED = ("grpo", "dapo", "gspo", "rloo", "remax", "reinforce_pp", "ppo", "vc_ppo", "vapo", "opd")
CONFIGS = {name: f"examples/digits_{name}.yaml" for name in ("ppo", "vc_ppo", "vapo", "opd")}
"""The files of those that are more than another name in the common config."""
SMOKED = (
    "dr_grpo",
    "gspo_token",
    "reinforce_pp_baseline",
    "cispo",
    "gmpo",
    "sapo",
    "raft",
    "raft_pp",
    "reinforce_rej",
    "papo",
    "noisy_rollout",
)

OVERRIDES = {
    # With one update per rollout batch its ratio is 1 and it is GRPO, number by number; the paper has four updates.
    "gspo": ["learner.minibatches=2"],
}
"""What an algorithm needs changed in the common config, and why; everything else is its own default."""

ALWAYS = (
    "reward/mean", "reward/std", "reward/exact_mean", "group/zero_signal_fraction", "group/all_correct_fraction",
    "group/all_wrong_fraction", "advantage/mean", "advantage/abs_mean", "advantage/max", "policy/entropy",
    "policy/grad_norm", "policy/ppo_kl", "policy/ppo_kl_k3", "mismatch/logprob_abs_mean", "mismatch/logprob_abs_max",
    "mismatch/kl", "mismatch/token_mult_prob_error", "length/completion_mean", "length/truncated_fraction",
    "loss/total", "loss/policy", "lr", "perf/step_s", "perf/sync_s", "perf/generate_s", "perf/score_s",
    "perf/logprob_s", "perf/update_s",
    "perf/tokens_per_s", "perf/memory_bytes_max",
)  # fmt: skip
"""Metrics of every training step, whatever the algorithm; plugins/README.md defines them."""
CLIP = ("policy/clip_fraction_high", "policy/clip_fraction_low")
KL = ("kl/reference", "kl/coef")
CRITIC = ("critic/loss", "critic/explained_variance", "critic/grad_norm", "critic/value_mean", "critic/return_mean")
REFILL = ("rollout/sampled_groups", "rollout/kept_groups", "rollout/acceptance_rate", "rollout/rounds")
METRICS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("grpo", "dr_grpo", "gspo", "gspo_token", "cispo", "gmpo", "raft_pp", "reinforce_rej"), CLIP),
    **dict.fromkeys(("ppo", "vc_ppo", "vapo"), CLIP + CRITIC),
    "dapo": CLIP + REFILL,
    "rloo": KL,
    "remax": (*KL, "reward/greedy_mean"),
    "reinforce_pp": CLIP + KL,
    "reinforce_pp_baseline": (*CLIP, *KL, "loss/kl"),
}
"""Metrics that an algorithm adds to those, with its defaults."""
LACKING = {"opd": ("reward/", "group/", "perf/score_s")}
"""Beginnings of metrics that an algorithm does without: nothing scores what it samples."""


@dataclass(frozen=True)
class Result:
    """The result of an algorithm's run.

    Attributes:
        accuracy: Held-out share of right answers by step.
        seconds_per_step: Median over the steps after the first.
        metrics: How many of them the last step has.
        problems: What is wrong with the run; empty if nothing.
        seconds: Seconds of training and evaluation up to each of these steps.
        memory_bytes: Most memory that sampler and learner have taken.
    """

    algorithm: str
    steps: int
    accuracy: Mapping[int, float]
    seconds_per_step: float
    metrics: int
    problems: Sequence[str]
    seconds: Mapping[int, float] = field(default_factory=dict)
    memory_bytes: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/compare"), help="folder of all runs")
    parser.add_argument("--algorithms", default=",".join(COMPARED + SMOKED), help="names, with commas between them")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"for {', '.join(COMPARED)}")
    parser.add_argument("--smoke-steps", type=int, default=6, help="for the other algorithms")
    parser.add_argument("overrides", nargs="*", help="section.key=value, for the runs after the warm-up")
    args = parser.parse_args()
    output = args.output.resolve()
    try:
        start = [*warm_up(output), f"trainer.eval_every={EVAL_EVERY}", *args.overrides]
    except RuntimeError as error:
        sys.exit(f"the warm-up failed: {error}")
    results = []
    for name in args.algorithms.split(","):
        steps = args.steps if name in COMPARED else args.smoke_steps
        print(f"{name}, {steps} steps: ", end="", flush=True)
        results.append(compete(output, name, steps, start))
        print("; ".join(results[-1].problems) or "done", flush=True)
    (output / "results.json").write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    compared = [result for result in results if result.algorithm in COMPARED]
    curves = {result.algorithm: result.accuracy for result in compared}
    if any(curves.values()):
        title = "Held-out accuracy from one warm-up"
        timed = {
            result.algorithm: {result.seconds[step]: share for step, share in result.accuracy.items()}
            for result in compared
        }
        (output / "curves.svg").write_text(line_chart(curves, title))
        (output / "curves_by_second.svg").write_text(line_chart(timed, title, "seconds of training and evaluation"))
    files = (output / name for name in ("results.json", "curves.svg", "curves_by_second.svg"))
    print("\n".join(["", table(results), "", *map(str, files)]))
    return 1 if any(result.problems for result in results) else 0


def warm_up(output: Path) -> list[str]:
    """The overrides that start a run where the supervised warm-up ends; it is trained if it is not in ``output``."""
    data = [f"data.{split}.path={output / 'data'}" for split in ("train", "eval")] + ["trackers=[]"]
    run = output / "warmup"
    if not any(run.glob("checkpoints/step-*/model")):
        print("warm-up", flush=True)
        call(output, "model", "examples/tiny_model.py", output / "model")
        call(output, "data", "-m", "mmrl_datasets.digits", output / "data", "--warmup", 600)
        train(output, "warmup", ["examples/digits_sft.yaml", f"model.path={output / 'model'}", *data])
    return [f"model.path={max(run.glob('checkpoints/step-*/model'))}", *data]


def compete(output: Path, name: str, steps: int, overrides: Sequence[str]) -> Result:
    """Train with one algorithm from the warm-up and read what came of it."""
    config = CONFIGS.get(name, "examples/digits_grpo.yaml")
    alone = pretrained(config)
    own = [f"algorithm.name={name}"] if name not in CONFIGS else []
    own += [f"trainer.steps={steps + alone}", *OVERRIDES.get(name, [])]
    try:
        own += teacher(output, steps, overrides) if name == "opd" else []
        train(output, name, [config, *own, *overrides])
    except RuntimeError as error:
        return Result(name, steps, {}, 0.0, 0, [str(error)])
    return result_of(name, steps, lines_of(output / name), alone)


def pretrained(config: str) -> int:
    """Steps in which the critic of an example alone learns."""
    sections = yaml.safe_load((ROOT / config).read_text())
    return int((sections.get("critic") or {}).get("pretrain_steps", 0))


def teacher(output: Path, steps: int, overrides: Sequence[str]) -> list[str]:
    """The overrides that let a policy learn from the end of grpo, which is trained if it is not in ``output``.

    Raises:
        RuntimeError: That failed.
    """
    train(output, "grpo", ["examples/digits_grpo.yaml", "algorithm.name=grpo", f"trainer.steps={steps}", *overrides])
    return [f"reference.path={max((output / 'grpo').glob('checkpoints/step-*/model'))}"]


def train(output: Path, name: str, words: Sequence[Any]) -> None:
    """``mmrl train`` into DIR/<name>, unless that very command has been run there to its end.

    Raises:
        RuntimeError: It failed; also where the folder holds the run of another command.
    """
    run = output / name
    command = ["train", *map(str, words), f"trainer.run_dir={run}"]
    if (run / "config.yaml").exists():  # else mmrl has not got far, and takes the folder over
        same = json.loads((run / "environment.json").read_text())["command"][1:] == command
        steps = yaml.safe_load((run / "config.yaml").read_text())["trainer"]["steps"]
        if same and [line["step"] for line in lines_of(run)][-1:] == [steps]:
            return
        if same:  # it was interrupted
            shutil.rmtree(run)
    call(output, name, "-m", "mmrl", *command)


def call(output: Path, name: str, *words: Any) -> None:
    """Run Python in the repository's root to its end, its words into DIR/logs.

    Raises:
        RuntimeError: It failed, with its last words.
    """
    log = output / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *map(str, words)]
    with log.open("w") as file:
        file.write(f"{shlex.join(command)}\n")
        file.flush()
        status = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if status:
        tail = " | ".join(line.strip() for line in log.read_text(errors="replace").splitlines()[-6:])
        raise RuntimeError(f"exit code {status}, see {log}: {tail}")


def lines_of(run: Path) -> list[dict[str, Any]]:
    """The run's metrics, step by step; none before its first evaluation."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def result_of(name: str, steps: int, lines: Sequence[Mapping[str, Any]], alone: int = 0) -> Result:
    """Read a run's metrics, and see that they are all there and are finite numbers.

    Args:
        alone: First steps in which a critic alone learns, and the policy has no metrics.
    """
    trained = lines[1 + alone :]
    accuracy = {line["step"]: line["eval/accuracy"] for line in lines if "eval/accuracy" in line}
    # What is not finite is null in metrics.jsonl.
    broken = sorted({key for line in lines for key, value in line.items() if value is None or not math.isfinite(value)})
    wanted = {key for key in (*ALWAYS, *METRICS.get(name, [])) if not key.startswith(LACKING.get(name, ("-",)))}
    missing = sorted({key for line in trained for key in wanted - line.keys()})
    problems = [f"not finite: {', '.join(broken)}"] if broken else []
    problems += [f"missing: {', '.join(missing)}"] if missing else []
    gain = accuracy[max(accuracy)] - accuracy[min(accuracy)] if accuracy else 0.0
    if name in COMPARED and steps >= STEPS and gain < LEAST_GAIN:
        problems.append(f"only {100 * gain:+.1f} points in {steps} steps")
    seconds = statistics.median(line["perf/step_s"] for line in trained[1:] or trained)
    count, memory = len(trained[-1].keys() - {"step", "attempt", "time"}), trained[-1].get("perf/memory_bytes_max", 0.0)
    return Result(name, steps, accuracy, seconds, count, problems, clock_of(lines), memory)


def clock_of(lines: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Seconds up to each step with an evaluation, from the first one on."""
    found, passed = dict[int, float](), 0.0
    for line in lines:
        passed += sum(line.get(f"perf/{name}_s", 0.0) for name in ("step", "eval")) * bool(found)
        if "eval/accuracy" in line:
            found[line["step"]] = passed
    return found


def table(results: Sequence[Result]) -> str:
    """A markdown table: accuracies in per cent by step, gain in points, seconds of a step and of all, memory in GB."""
    steps = sorted({step for result in results for step in result.accuracy})
    rows = [["algorithm", *map(str, steps), "gain", "s/step", "s", "GB", "metrics"]]
    rows.append(["---"] + ["---:"] * (len(rows[0]) - 1))
    for result in results:
        cells = [f"{100 * result.accuracy[step]:.1f}" if step in result.accuracy else "" for step in steps]
        values = list(result.accuracy.values())
        gain = f"{100 * (values[-1] - values[0]):+.1f}" if values else "failed"
        verdict = "; ".join(result.problems) or f"{result.metrics}, all finite"
        whole, memory = max(result.seconds.values(), default=0.0), result.memory_bytes / 1e9
        numbers = f"{result.seconds_per_step:.2f}", f"{whole:.0f}", f"{memory:.2f}"
        rows.append([f"`{result.algorithm}`", *cells, gain, *numbers, verdict])
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


COLOURS = (
    *("#3b82f6", "#f97316", "#10b981", "#e11d8f", "#b9810f", "#8b5cf6"),
    *("#0891b2", "#dc2626", "#65a30d", "#7d8590"),
)
DASHES = ("", "7 3", "2 3", "10 3 2 3", "4 2", "12 4", "", "7 3", "2 3", "10 3 2 3")
MOST_TICKS = 12
Curves = Mapping[str, Mapping[int, float]] | Mapping[str, Mapping[float, float]]
"""Shares by name, and by step or second."""
STYLE = "text{font:13px sans-serif;fill:#7d8590}.grid{stroke:#8c959f;stroke-opacity:.35}.axis{stroke:#8c959f}"
"""Greys that can be read on white and on black."""


def line_chart(curves: Curves, title: str, unit: str = "training steps") -> str:
    """An SVG of shares by step, or by another ``unit``, one line for each name, the best at the top of the legend; its
    background is clear."""
    left, top, width, height = 60, 40, 560, 340
    steps = [float(step) for curve in curves.values() for step in curve]
    shares = [share for curve in curves.values() for share in curve.values()]
    last = max(max(steps), 1)
    low, high = math.floor(10 * min(shares)), math.ceil(10 * max(shares))  # in tenths
    high = max(high, low + 1)

    def x(step: float) -> float:
        return left + width * step / last

    def y(share: float) -> float:
        return top + height * (high - 10 * share) / (high - low)

    marks = []
    for tenth in range(low, high + 1):
        at = y(tenth / 10)
        marks.append(f'<line class="grid" x1="{left}" x2="{left + width}" y1="{at:.1f}" y2="{at:.1f}"/>')
        marks.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{10 * tenth} %</text>')
    for step in ticks(steps):
        marks.append(
            f'<line class="axis" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{top + height}" y2="{top + height + 5}"/>'
        )
        marks.append(f'<text x="{x(step):.1f}" y="{top + height + 20}" text-anchor="middle">{step:g}</text>')
    marks.append(f'<path class="axis" fill="none" d="M{left} {top}V{top + height}H{left + width}"/>')
    ranked = sorted((name for name in curves if curves[name]), key=lambda name: -list(curves[name].values())[-1])
    for place, name in enumerate(ranked):
        number = list(curves).index(name) % len(COLOURS)
        style = f'stroke="{COLOURS[number]}" stroke-width="2" stroke-dasharray="{DASHES[number]}" fill="none"'
        points = " ".join(f"{x(step):.1f},{y(share):.1f}" for step, share in curves[name].items())
        row, legend = top + 20 * place + 10, left + width + 20
        marks.append(f'<polyline {style} points="{points}"><title>{escape(name)}</title></polyline>')
        marks.append(f'<line {style} x1="{legend}" x2="{legend + 30}" y1="{row}" y2="{row}"/>')
        final = f"{100 * list(curves[name].values())[-1]:.1f} %"
        marks.append(f'<text x="{legend + 38}" y="{row + 4}">{escape(name)} {final}</text>')
    body = "\n".join(marks)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 440" role="img">
<title>{escape(title)}</title>
<style>{STYLE}</style>
<text x="{left}" y="22" font-weight="bold">{escape(title)}</text>
{body}
<text x="{left + width / 2}" y="{top + height + 42}" text-anchor="middle">{escape(unit)}</text>
</svg>
"""


def ticks(places: Sequence[float]) -> list[float]:
    """The places of marks on an axis: all of them, or round numbers if they are many."""
    own = sorted(set(places))
    if len(own) <= MOST_TICKS:
        return own
    least = own[-1] / MOST_TICKS
    power = 10.0 ** math.floor(math.log10(least))
    width = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
    return [width * place for place in range(int(own[-1] / width) + 1)]


if __name__ == "__main__":
    sys.exit(main())
