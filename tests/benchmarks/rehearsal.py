"""Whole runs at published sizes, on a CPU: train, checkpoint, resume and export, beside what `mmrl plan` said before.

    python tests/benchmarks/rehearsal.py [--only NAME ...] [--quick] [--steps N] [--measure] [--keep] [--out FILE]
    python tests/benchmarks/rehearsal.py --draw FILE

Configs, vocabularies and images have their published sizes, weights are random (`published.py`). Every command is a
process of its own. A rehearsal begins only if there are enough free memory and disk for it. It is no test, and nothing
runs it but a person: all of them take hours.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
from charts import markdown
from process_memory import Watched, watch
from published import CONFIGS, small, write_data, write_model
from turns import HERE, arguments, machine

QUICK_GIB = 8, 2
"""Memory and disk of a rehearsal with small layers."""
QUICK = {"prompts": 2, "group": 3}
"""Its step."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A run.

    Attributes:
        model: One of ``published.CONFIGS``.
        most: Tokens of a completion at most.
        mean: Of the lengths before they are cut.
        prompt_tokens: At most; a photograph takes 1,280.
        memory_gib: Free memory that it needs.
        disk_gib: Free disk that it needs.
        settings: Further ones, by section.
        teacher: One of ``published.CONFIGS`` that is the reference; empty for none.
        layers: Of the language models; 0 for as many as are published.
    """

    what: str
    model: str
    dtype: str
    prompts: int
    group: int
    most: int
    mean: int
    prompt_tokens: int
    memory_gib: float
    disk_gib: float
    settings: Mapping[str, Mapping[str, Any]]
    teacher: str = ""
    layers: int = 0


LORA = {"lora": {"rank": 16, "alpha": 32, "targets": ["language"]}}
TWO_RANKS = {"name": "ray", "ranks": 2}
SMALL_BUFFERS = {
    "reduce_bucket_size": 50_000_000,
    "stage3_prefetch_bucket_size": 10_000_000,
    "stage3_max_live_parameters": 100_000_000,
    "stage3_max_reuse_distance": 0,
}
"""DeepSpeed's own are for a GPU of 80 GB. The head's weight is larger than this bucket."""
LITTLE_MEMORY = {"RAY_memory_usage_threshold": "0.98", "MALLOC_MMAP_THRESHOLD_": "1048576"}
"""Environment variables for a machine that has just enough. Ray kills workers at 95 % else. glibc's threshold grows to
32 MB else, and below it freed memory stays in fragments: 1.4 GB of a rank that shards 0.5 B parameters."""
HALF_B = {
    "learner": {"lr": 1e-6, "zero_stage": 3, "tokens_per_microbatch": 1024,
                "deepspeed": {"zero_optimization": SMALL_BUFFERS}},
    "cluster": TWO_RANKS,
}  # fmt: skip

TABLE: Mapping[str, Rehearsal] = {
    "qwen2_5_vl_3b": Rehearsal(
        "Qwen2.5-VL-3B, LoRA, bfloat16, one rank", "Qwen2.5-VL-3B-Instruct", "bfloat16",
        prompts=3, group=4, most=16, mean=40, prompt_tokens=1536, memory_gib=22, disk_gib=18,
        settings={
            "model": LORA,
            "sampler": {"engine": {"kv_cache_memory_bytes": 2**28}},
            "learner": {"lr": 1e-5, "zero_stage": 1, "tokens_per_microbatch": 2048},
        },
    ),
    "qwen2_5_vl_3b_qlora": Rehearsal(
        "Qwen2.5-VL-3B, QLoRA, bfloat16, one rank", "Qwen2.5-VL-3B-Instruct", "bfloat16",
        prompts=3, group=4, most=16, mean=40, prompt_tokens=1536, memory_gib=17, disk_gib=18,
        settings={
            "model": {**LORA, "quantize": "nf4"},
            "sampler": {"engine": {"kv_cache_memory_bytes": 2**28}},
            "learner": {"lr": 1e-5, "zero_stage": 1, "tokens_per_microbatch": 2048},
        },
    ),
    "qwen2_5_0_5b": Rehearsal(
        "Qwen2.5-0.5B, float32, two ranks, ZeRO 3", "Qwen2.5-0.5B-Instruct", "float32",
        prompts=4, group=4, most=500, mean=170, prompt_tokens=512, memory_gib=25, disk_gib=20, settings=HALF_B,
    ),
    "qwen2_5_0_5b_tp2": Rehearsal(
        "Qwen2.5-0.5B, float32, two ranks, ZeRO 3, TP 2", "Qwen2.5-0.5B-Instruct", "float32",
        prompts=4, group=4, most=500, mean=170, prompt_tokens=512, memory_gib=22, disk_gib=20,
        settings={**HALF_B, "sampler": {"tensor_parallel_size": 2}},
    ),
    "qwen2_5_0_5b_teacher": Rehearsal(
        "Qwen2.5-0.5B with a teacher of Qwen2.5-3B's widths, two layers of each, float32, one rank",
        "Qwen2.5-0.5B-Instruct", "float32",
        prompts=4, group=4, most=100, mean=60, prompt_tokens=512, memory_gib=9, disk_gib=8,
        settings={
            "algorithm": {"name": "opd"},
            "sampler": {"engine": {"kv_cache_memory_bytes": 2**26}},
            "learner": {"lr": 1e-6, "zero_stage": 1, "tokens_per_microbatch": 1024},
        },
        teacher="Qwen2.5-3B-Instruct", layers=2,
    ),
    "qwen2_vl_2b": Rehearsal(
        "Qwen2-VL-2B, LoRA, bfloat16, two ranks, ZeRO 3, TP 2", "Qwen2-VL-2B-Instruct", "bfloat16",
        prompts=3, group=4, most=64, mean=40, prompt_tokens=1536, memory_gib=18, disk_gib=12,
        settings={
            "model": LORA,
            "sampler": {"tensor_parallel_size": 2},
            "learner": {"lr": 1e-5, "zero_stage": 3, "tokens_per_microbatch": 2048,
                        "deepspeed": {"zero_optimization": SMALL_BUFFERS}},
            "cluster": TWO_RANKS,
        },
    ),
}  # fmt: skip


def _shape(name: str, layers: int, *, quick: bool) -> dict[str, Any]:
    """The config.json of a published model; with fewer layers, or narrow ones."""
    shape = small(CONFIGS[name]) if quick else dict(CONFIGS[name])
    return shape | {"num_hidden_layers": layers} if layers else shape


def config(rehearsal: Rehearsal, model: Path, data: Path, run_dir: Path, steps: int) -> dict[str, Any]:
    """mmrl's config of a rehearsal."""
    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "dtype": rehearsal.dtype},
        "data": {
            "train": {"name": "table", "path": str(data), "prompt": "question"},
            "max_prompt_tokens": rehearsal.prompt_tokens,
        },
        "algorithm": {"name": "grpo"},
        "sampler": {"group_size": rehearsal.group, "max_new_tokens": rehearsal.most},
        "trainer": {
            "steps": steps,
            "prompts_per_step": rehearsal.prompts,
            "save_every": 10**6,
            "keep_checkpoints": 1,
            "max_restarts": 0,
            "step_timeout_s": 3600,
            "run_dir": str(run_dir),
        },
    }
    for section, settings in rehearsal.settings.items():
        values[section] = {**values.get(section, {}), **settings}
    return {**values, "rewards": [{"name": f"{HERE / 'workloads.py'}:reward", "label": "vowels"}]}


def lacking(rehearsal: Rehearsal, work: Path, *, quick: bool, slow: bool) -> list[str]:
    """The resources of which this machine has too little.

    Args:
        slow: True if it may take days.
    """
    memory, disk = QUICK_GIB if quick else (rehearsal.memory_gib, rehearsal.disk_gib)
    needed = {"memory": memory, f"disk at {work}": disk}
    free = {"memory": psutil.virtual_memory().available, f"disk at {work}": shutil.disk_usage(work).free}
    missing = [
        f"{needed[what]:g} GiB of {what}, of which {size / 2**30:.1f} GiB are free"
        for what, size in free.items()
        if size < needed[what] * 2**30
    ]
    if rehearsal.dtype == "bfloat16" and not (quick or slow) and not multiplies_bfloat16(Path("/proc/cpuinfo")):
        missing.append(
            "a processor with AVX-512 or AMX, as torch multiplies bfloat16 at a fiftieth of float32's rate on this one "
            "(--slow tries all the same; --set data.max_pixels=50176 makes the images small)"
        )
    return missing


def multiplies_bfloat16(cpuinfo: Path) -> bool:
    """True if oneDNN has kernels for it: on x86, from AVX-512 on; other processors are taken to have them."""
    lines = (line for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))
    flags = next(lines, "").split()
    return not flags or "avx512bw" in flags


class _Stage:
    """One rehearsal's folder, in which commands run.

    Attributes:
        found: Of each command that has ended, by its name.
    """

    def __init__(self, folder: Path, path: Path, run_dir: Path) -> None:
        self._folder, self._path, self._run_dir = folder, path, run_dir
        self.found: dict[str, Watched] = {}

    def __call__(self, name: str, *words: str, config: bool = True) -> str:
        """Run `mmrl` with these words; returns what it printed.

        Raises:
            RuntimeError: It failed.
        """
        command = [sys.executable, "-m", "mmrl", words[0], *([str(self._path)] if config else []), *words[1:]]
        log = self._folder / f"{name}.log"
        print(f"  {name}: mmrl {' '.join(command[3:])}", file=sys.stderr)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **LITTLE_MEMORY}
        printed, found = watch(command, log, self._run_dir / "checkpoints", environment)
        self.found[name] = found
        print(f"  {name}: {found.seconds:.0f} s, at most {found.together / 2**30:.1f} GiB together, "
              f"{found.least_available / 2**30:.1f} GiB left", file=sys.stderr)  # fmt: skip
        if found.code:
            tail = "\n".join([*printed.splitlines()[-15:], *log.read_text(errors="replace").splitlines()[-25:]])
            raise RuntimeError(f"{name} ended with code {found.code}:\n{tail}")
        return printed


def rehearse(rehearsal: Rehearsal, folder: Path, args: Any, found: dict[str, Any]) -> None:
    """Plan, train, resume and export, each in a process of its own; fills ``found`` as far as it comes."""
    shape, *taught = (
        _shape(name, rehearsal.layers, quick=args.quick) for name in (rehearsal.model, rehearsal.teacher) if name
    )
    model, data, teacher = folder / "model", folder / "data", folder / "teacher"
    rows = rehearsal.prompts * (args.steps + 1)
    print("  writing the model and the data", file=sys.stderr)
    with ProcessPoolExecutor(1, get_context("spawn")) as other:  # torch takes memory that the rehearsal needs
        other.submit(write_model, model, shape, dtype=rehearsal.dtype, mean_length=rehearsal.mean).result()
        for each in taught:
            sizes = {"dtype": rehearsal.dtype, "mean_length": rehearsal.mean, "seed": 1}
            other.submit(write_model, teacher, each, **sizes).result()
        data = other.submit(write_data, data, rows, images="vision_config" in shape).result()
    run_dir, path = folder / "run", folder / "config.yaml"
    values = config(rehearsal, model, data, run_dir, args.steps)
    values |= {"reference": {"path": str(teacher)}} if taught else {}
    path.write_text(json.dumps(values, indent=1))
    stage = _Stage(folder, path, run_dir)
    found |= {"what": rehearsal.what, "steps": args.steps, "memory_gib": rehearsal.memory_gib}
    try:
        found["plan"] = json.loads(stage("plan", "plan", "--json", *(["--measure"] if args.measure else []), *args.set))
        stage("train", "train", *args.set)
        found["checkpoint"] = _size(run_dir / "checkpoints")
        found["trained"] = _metrics(run_dir)
        found["environment"] = json.loads((run_dir / "environment.json").read_text())["engine"]
        stage("resume", "train", *args.set, f"trainer.steps={args.steps + 1}")
        found["resumed"] = _metrics(run_dir)[-1:]
        found["events"] = _lines(run_dir / "events.jsonl")
        _check_resumed(found, args.steps)
        out = folder / "exported"
        found["export"] = json.loads(stage("export", "export", str(run_dir), str(out), "--json", config=False))
        found["exported"] = _size(out)
    finally:
        found["commands"] = {name: asdict(watched) for name, watched in stage.found.items()}


def _check_resumed(found: Mapping[str, Any], steps: int) -> None:
    """Raises RuntimeError unless the run went on from the last step's checkpoint."""
    resumed = [event for event in found["events"] if event["kind"] == "resumed"]
    if [event["step"] for event in resumed] != [steps] or found["resumed"][0]["step"] != steps + 1:
        raise RuntimeError(f"the run did not go on from step {steps}: {resumed}")


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in _lines(run_dir / "metrics.jsonl") if line["step"]]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def tables(results: Mapping[str, Any]) -> str:
    """Memory, seconds of the steps, and what came before and after them."""
    done = results["rehearsals"].values()
    parts = [results["machine"]]
    if rows := [_memory_row(found) for found in done if "train" in found.get("commands", {}) and "plan" in found]:
        head = ["GB", "learner, planned", "sampler, planned", "both", "a rank, measured", "all processes",
                "of them not files", "resuming", "exporting"]  # fmt: skip
        parts.append(markdown(head, rows))
    steps = [step for found in done for step in [*found.get("trained", []), *found.get("resumed", [])]]
    phases = [name for name in _phases(steps) if name not in ("step", "save", "eval")]
    head = ["seconds of a step", "step", *phases, "whole", "tokens of a completion", "mismatch, mean", "max"]
    parts.append(markdown(head, [row for found in done for row in _step_rows(found, phases)]))
    head = ["seconds, and GB written", "until step 1", "checkpoint", "until the resumed step", "export", "its gap"]
    parts.append(markdown(head, [_other_row(found) for found in done]))
    parts += [f"{found['what']} failed: {found['failed']}" for found in done if "failed" in found]
    return "\n\n".join(parts)


def _memory_row(found: Mapping[str, Any]) -> list[str]:
    plan, commands = found["plan"], found["commands"]
    learner = plan["learner"]["peak"]
    sampler = plan["sampler"]["weights"] + (plan["sampler"]["cache"] or 0)
    train = commands["train"]
    ranks = train["each"].get("rank") or train["each"]["main"]
    sizes = [learner, sampler, learner + sampler, max(ranks), train["together"], train["private"]]
    sizes += [commands[name]["together"] if name in commands else 0 for name in ("resume", "export")]
    return [found["what"], *(_gigabytes(size) for size in sizes)]


def _step_rows(found: Mapping[str, Any], phases: Sequence[str]) -> list[list[str]]:
    rows = []
    planned = found.get("plan", {}).get("time")
    if planned:
        seconds = [planned.get(f"{phase}_s") for phase in phases]
        rows.append([found["what"], "planned", *map(_seconds, seconds), _seconds(planned["step_s"]), "", "", ""])
    for step in [*found.get("trained", []), *found.get("resumed", [])]:
        seconds = [step.get(f"perf/{phase}_s") for phase in phases]
        name = f"{step['step']}{', resumed' if step['attempt'] > 1 else ''}"
        lengths = f"{step['length/completion_mean']:.0f}, at most {step['length/completion_max']:.0f}"
        gaps = [f"{step[f'mismatch/logprob_abs_{kind}']:.1e}" for kind in ("mean", "max")]
        whole = _seconds(step["perf/step_s"])
        rows.append([found["what"], name, *map(_seconds, seconds), whole, lengths, *gaps])
    return rows


def _other_row(found: Mapping[str, Any]) -> list[str]:
    commands = found.get("commands", {})
    trained, resumed = found.get("trained"), found.get("resumed")
    checkpoints = commands.get("train", {}).get("checkpoints", [])
    return [
        found["what"],
        _seconds(_until(trained[0], commands["train"], found["steps"]) if trained else None),
        f"{_seconds(checkpoints[-1]) if checkpoints else 'below 1'}; {_gigabytes(found['checkpoint'])}"
        if trained
        else "",
        _seconds(_until(resumed[0], commands["resume"], found["steps"] + 1) if resumed else None),
        f"{_seconds(commands['export']['seconds'])}; {_gigabytes(found['exported'])}" if "exported" in found else "",
        f"{found['export']['gap']['abs_max']:.1e}" if "export" in found else "",
    ]


def _until(step: Mapping[str, Any], command: Mapping[str, Any], last: int) -> float:
    """Seconds from a command's start to the beginning of a step; the last step is logged after its checkpoint."""
    checkpoint = command["checkpoints"][-1] if step["step"] == last and command["checkpoints"] else 0.0
    return step["time"] - checkpoint - step["perf/step_s"] - command["began"]


def _phases(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the phases that any step has, in the order of their first appearance."""
    names = (name for step in steps for name in step if name.startswith("perf/") and name.endswith("_s"))
    return [name.removeprefix("perf/").removesuffix("_s") for name in dict.fromkeys(names) if "tokens" not in name]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f}" if size else ""


def main() -> None:
    what = f"{', '.join(TABLE)}; by default all"
    parser = arguments(
        str(__doc__), "--only", what, timed=2, counted=("--steps", "steps to train before resuming"),
        quick="small layers, the vocabulary as it is: tries the script only",
    )  # fmt: skip
    parser.add_argument("--measure", action="store_true", help="let `mmrl plan` estimate seconds, from steps it takes")
    parser.add_argument("--slow", action="store_true", help="begin on a processor without bfloat16 too")
    parser.add_argument("--keep", action="store_true", help="leave the model, the run and the logs in the work folder")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what it has started ends too
    if args.draw:
        print(tables(json.loads(args.draw.read_text())))
        return
    if unknown := set(args.only or ()) - set(TABLE):
        raise SystemExit(f"no rehearsal {', '.join(sorted(unknown))}; there are {', '.join(TABLE)}")
    results = json.loads(args.out.read_text()) if args.out.exists() else {"rehearsals": {}}
    results["machine"] = machine()
    failed = False
    args.work.mkdir(parents=True, exist_ok=True)
    for name in args.only or TABLE:
        if missing := lacking(TABLE[name], args.work, quick=args.quick, slow=args.slow):
            raise SystemExit(f"{name} does not begin: it needs {'; '.join(missing)}")
        rehearsal = replace(TABLE[name], **QUICK) if args.quick else TABLE[name]
        print(name, file=sys.stderr)
        folder = args.work / f"{name}{'-quick' if args.quick else ''}"
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.rmtree(folder / "exported", ignore_errors=True)
        found = results["rehearsals"][name] = {}
        try:
            rehearse(rehearsal, folder, args, found)
        except RuntimeError as error:
            found["failed"], failed = str(error), True
            print(error, file=sys.stderr)
        finally:
            args.out.write_text(json.dumps(results, indent=1))
            if not args.keep:
                shutil.rmtree(folder)
    print(tables(results))
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
