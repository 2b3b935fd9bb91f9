"""Hashes of what short runs write, of any checkout: whether a change of structure moves a number.

    python tests/pins.py --out before.json [--root DIR]             # the cheap cases, of the code in DIR
    python tests/pins.py --against before.json                      # the same of this tree; exit code 1 if they differ
    python tests/pins.py --cases all --keep RUNS --out before.json  # with vLLM and with two ranks; leaves the runs
    python tests/pins.py --replay RUNS                              # `mmrl replay` of runs that another checkout left

Each run takes two steps, with three engines: the tests' fake one (``fake``), DeepSpeed with the sampler ``hf`` (``hf``)
and with vLLM (``vllm``), and two ranks of Ray that share vLLM's layers at ZeRO 3 (``ranks``). ``--cases`` takes names,
the start of names, and the groups ``cheap`` (fake and hf) and ``all``; without it these are the cheap ones. Each run is
then replayed, which must find no difference.

There is a hash for each case and kind of file:

- metrics, ledger, events: their lines without clocks, ``perf/``, processes, places and the number of the attempt;
- rollouts, evaluations, weights (of the last checkpoint), state (of learner and optimizer, without generators): bytes
  of the files;
- trainer: the trainer's state in the last checkpoint;
- files: names in the run's folder, but those of rollouts, logs, and images by their hash;
- replay: the answer of ``mmrl replay --json``, and its exit code.

``--against`` names what differs: keys of metrics with both values, files, lines. A file of hashes is good for one
machine and one set of packages: sums are in another order on another processor.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

Found = dict[str, dict[str, str]]
"""By kind, the hash or the value of each item."""

QUIET = {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
CLOCKS = {"time", "attempt", "pid", "host", "path", "seconds", "checkpoint"}
UNSEEDED = {"generators.safetensors", "run.json"}
"""Files of a checkpoint's state that are others in each process: generators that nobody draws from are not seeded."""
PLUGINS = '''\
"""Rewards that follow from tokens and texts, and a game of two states."""

from mmrl import Environment, Observation


def even(rollouts):
    return [float((rollout.token_ids % 2 == 0).mean()) for rollout in rollouts]


def right(rollouts):
    """Right or wrong, and often the same for a whole group."""
    return [float(rollout.token_ids[0] % 2 == 0) for rollout in rollouts]


def seldom(rollouts):
    return [float(rollout.token_ids[0] % 4 == 0) for rollout in rollouts]


class Parity(Environment):
    def reset(self, prompt, seed):
        return

    def step(self, turn):
        odd = len(turn.text) % 2
        return Observation("odd" if odd else "even", float(odd) - 0.1 * turn.text.count("a"), role="user")
'''
MODELS = """
import sys
from pathlib import Path
from mmrl.engine.aids.tiny_model import write_model

for family in sys.argv[1:]:
    write_model(Path(family), family)
"""
IMAGES = 4
Sections = Mapping[str, Any]


def merged(*parts: Sections) -> dict[str, Any]:
    """Sections whose keys come from all parts, from the last one that has them."""
    found: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            found[key] = {**found.get(key, {}), **value} if isinstance(value, Mapping) else value
    return found


KL: Mapping[str, Any] = {"kl": {"coef": 0.05}}
TWICE = {"minibatches": 2, "epochs": 2}
RUNS: Mapping[str, Sections] = {
    "grpo": {"algorithm": {"name": "grpo"}},
    "kl": {
        "algorithm": {"name": "grpo", **KL},
        "data": {"eval": {"name": "table", "path": "rows.jsonl"}},
        "learner": TWICE,
        "trainer": {"eval_every": 1},
    },
    "dapo": {  # other prompts are drawn for groups without a signal
        "algorithm": {"name": "dapo", "dynamic_sampling": {"max_rounds": 4, "on_starvation": "skip"}},
        "rewards": [{"name": "plugins.py:right", "workers": 1}],
        "sampler": {"group_size": 2},
    },
    "remax": {"algorithm": {"name": "remax"}},
    "gigpo": {
        "algorithm": {"name": "gigpo"},
        "rewards": [],
        "environment": {
            "name": "plugins.py:Parity",
            "max_turns": 3,
            "max_turn_tokens": 4,
            "max_observation_tokens": 60,
            "workers": 1,
        },
        "sampler": {"max_new_tokens": 16},
        "learner": {"minibatches": 2},
    },
    "sft": {"algorithm": {"name": "sft"}, "rewards": [], "sampler": {}, "learner": {"minibatches": 2}},
}
SEEN: Sections = {
    "model": {"path": "models/qwen2_5_vl", "dtype": "float32"},
    "data": {"train": {"name": "table", "path": "seen.jsonl"}, "max_prompt_tokens": 160},
}
"""Rows with no, one and two images."""
VIEWS: Mapping[str, Sections] = {  # by the file, as older installations do not list them
    "papo": {"algorithm": {"name": "import:mmrl_algorithms.papo:PAPO"}, "learner": TWICE},
    "noisy": {"algorithm": {"name": "import:mmrl_algorithms.noisy_rollout:NoisyRollout"}, "learner": TWICE},
}
ADAPTERS: Sections = {
    "model": {"lora": {"rank": 4, "targets": ["language", "vision", "projector"]}},
    "algorithm": {"name": "grpo", **KL},
    "learner": {"zero_stage": 3, "minibatches": 2},
}
VLLM = {"name": "vllm", "engine": {"kv_cache_memory_bytes": 2**26}}
CASES: Mapping[str, Sections] = {
    **{f"fake-{name}": sections for name, sections in RUNS.items()},
    "fake-starved": {  # the groups of a step that has too few go to the next one
        "algorithm": {"name": "dapo", "dynamic_sampling": {"max_rounds": 3, "on_starvation": "skip"}},
        "rewards": [{"name": "plugins.py:seldom", "workers": 1}],
        "sampler": {"group_size": 2},
        "trainer": {"steps": 3},
    },
    "hf-kl": merged(RUNS["kl"], SEEN),
    "hf-dapo": RUNS["dapo"],
    "hf-remax": RUNS["remax"],
    "hf-gigpo": RUNS["gigpo"],
    "hf-sft": merged(RUNS["sft"], SEEN),
    "hf-adapters": merged(ADAPTERS, SEEN),
    **{f"hf-{name}": merged(sections, SEEN) for name, sections in VIEWS.items()},
    "vllm-kl": merged(RUNS["kl"], SEEN),
    "vllm-dapo": RUNS["dapo"],
    "vllm-adapters": merged(ADAPTERS, SEEN),
    "ranks-kl": merged(RUNS["kl"], SEEN),
}
GROUPS = {"cheap": ("fake", "hf"), "all": ("",)}


def chosen(names: str) -> list[str]:
    """The cases that names, beginnings of names and groups stand for."""
    starts = [start for name in names.split(",") for start in GROUPS.get(name, (name,))]
    if unknown := [start for start in starts if not any(case.startswith(start) for case in CASES)]:
        raise SystemExit(f"no case begins with {unknown}; there are {', '.join((*GROUPS, *CASES))}")
    return [case for case in CASES if case.startswith(tuple(starts))]


def use(root: Path) -> None:
    """Import mmrl, its plugins and its tests from a checkout, and from no other."""
    others = [
        path for path in sys.path if not any((Path(path) / name).exists() for name in ("mmrl/__init__.py", "pins.py"))
    ]
    others = [path for path in others if not list(Path(path).glob("mmrl_*/__init__.py"))]
    sys.path[:] = [str(root), str(root / "plugins"), str(root / "datasets"), *others]
    os.environ.update(QUIET, PYTHONPATH=os.pathsep.join(sys.path[:3]))


def write_inputs(folder: Path, root: Path) -> None:
    """Rows, plugins and tiny models; the models are kept in the checkout for the next time."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    kept = root / ".pytest_cache" / "pins" / hashlib.sha256(MODELS.encode()).hexdigest()[:8]
    if not kept.exists():
        unfinished = kept.with_suffix(f".{os.getpid()}")
        unfinished.mkdir(parents=True)
        subprocess.run([sys.executable, "-c", MODELS, "qwen2", "qwen2_5_vl"], cwd=unfinished, check=True)
        unfinished.rename(kept)
    shutil.copytree(kept, folder / "models")
    (folder / "plugins.py").write_text(PLUGINS)
    rows = [{"id": f"r{n}", "prompt": "one plus " * (n % 4 + 1), "answer": str(n)} for n in range(8)]
    rows = [row | {"written": f"it is {n}"} for n, row in enumerate(rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for index in range(IMAGES):
        size = (56 + 28 * index, 112 - 14 * index)
        pixels = bytes(hashlib.shake_256(bytes([index])).digest(size[0] * size[1] * 3))
        Image.frombytes("RGB", size, pixels).save(folder / f"{index}.png")
    for n, row in enumerate(rows):
        row["images"] = [f"{(n + i) % IMAGES}.png" for i in range(n % 3)]  # type: ignore[assignment]
        row["prompt"] = "<image>" * (n % 3) + row["prompt"]
    (folder / "seen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_config(folder: Path, case: str) -> Path:
    """The config of a case; paths in it are absolute, so that its run can be replayed from elsewhere."""
    kind = case.partition("-")[0]
    config: dict[str, Any] = {
        "model": {"path": "models/qwen2", "dtype": "float32"},
        "data": {"train": {"name": "table", "path": "rows.jsonl"}, "max_prompt_tokens": 64},
        "rewards": [{"name": "plugins.py:even", "workers": 1}],
        "sampler": {"group_size": 3, "max_new_tokens": 8, **({"name": "hf"} if kind == "hf" else {})},
        "learner": {"lr": 1e-2, "zero_stage": 0, "tokens_per_microbatch": 300},
        "trainer": {"steps": 2, "prompts_per_step": 4, "save_every": 1, "run_dir": str(folder / case)},
    }
    config = merged(config, CASES[case])
    if kind in ("vllm", "ranks"):
        config["sampler"] |= VLLM
    if kind == "ranks":
        config["cluster"] = {"name": "ray", "ranks": 2}
        config["sampler"] |= {"tensor_parallel_size": 2}
        config["learner"] |= {"zero_stage": 3}
    if case.endswith("sft"):
        del config["sampler"], config["rewards"]
        config = merged(config, {"data": {"train": config["data"]["train"] | {"demonstration": "written"}}})
    return written(folder, case, config)


def written(folder: Path, name: str, config: Mapping[str, Any]) -> Path:
    """A file with a config, whose paths of models, rows and plugins begin in the folder."""
    text = json.dumps(config, indent=1)
    for part in ("models/", "rows.jsonl", "seen.jsonl", "plugins.py"):
        text = text.replace(f'"{part}', f'"{folder / part}' + "/" * part.endswith("/"))
    path = folder / f"{name}.yaml"
    path.write_text(text)  # which is YAML
    return path


class Runner:
    """Commands of a checkout: in forks of a process that has imported it, or for ranks a fresh one."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._nurseries: dict[bool, Any] = {}

    def run(self, kind: str, *words: str) -> tuple[int, str, str]:
        """The exit code of ``mmrl`` with these words, and what it wrote to its two streams."""
        if kind == "ranks":
            command = [sys.executable, "-m", "mmrl", *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        else:
            done = self._nursery(kind != "fake").command(*words)
        return done.returncode, done.stdout, done.stderr

    def _nursery(self, real: bool) -> Any:
        from tests.faults.harness import Nursery

        if real not in self._nurseries:
            logs = self._folder / f"logs-{'real' if real else 'fake'}"
            logs.mkdir(exist_ok=True)
            nursery = Nursery(logs, self._folder / "models" / "qwen2", real=real)
            self._nurseries[real] = self._stack.enter_context(nursery)
        return self._nurseries[real]


def pin(runner: Runner, folder: Path, case: str) -> Found:
    """A case's run, and its replay."""
    code, _, errors = runner.run(case.partition("-")[0], "train", str(write_config(folder, case)))
    if code:
        raise SystemExit(f"{case}: `mmrl train` ended with {code}:\n{errors[-6000:]}")
    found = hashes(folder / case)
    if list((folder / case / "rollouts").glob("*")):
        found["replay"] = replay(runner, folder / case)
    return found


def replay(runner: Runner, run: Path) -> dict[str, str]:
    """The answer of ``mmrl replay`` to a run."""
    code, output, errors = runner.run("fake" if run.name.startswith("fake") else "hf", "replay", str(run), "--json")
    if not output:
        raise SystemExit(f"{run.name}: `mmrl replay` ended with {code}:\n{errors[-6000:]}")
    answer = output.replace(str(run.parent), "")
    return {"exit code": str(code), "differs": str(json.loads(output)["differs"]), "answer": sha(answer.encode())}


def hashes(run: Path) -> Found:
    """Hashes and values of what a run wrote, by kind."""
    last = max((run / "checkpoints").glob("step-*"))
    state = json.loads((last / "state" / "run.json").read_text())
    found = {
        "metrics": {
            f"step {line['step']} {key}": repr(value)
            for line in lines(run / "metrics.jsonl")
            for key, value in line.items()
            if not key.startswith("perf/")
        },
        "ledger": numbered(lines(run / "ledger.jsonl")),
        "events": numbered(lines(run / "events.jsonl")),
        "rollouts": files(run / "rollouts"),
        "evaluations": files(run / "evaluations"),
        "weights": {name: text for name, text in files(last / "model").items() if name.endswith(".safetensors")},
        "state": {name: text for name, text in files(last / "state").items() if name not in UNSEEDED},
        "trainer": {key: canonical(value) for key, value in state["trainer"].items()},
        "files": dict.fromkeys(sorted(names(run)), ""),
    }
    return {kind: items for kind, items in found.items() if items}


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a history, without what tells of time and place."""
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{key: value for key, value in line.items() if key not in CLOCKS} for line in found]


def numbered(found: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {f"line {number}": canonical(line) for number, line in enumerate(found, start=1)}


def files(folder: Path) -> dict[str, str]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): sha(path.read_bytes()) for path in found}


def names(run: Path) -> Iterator[str]:
    """Names of files; a folder alone where its files are named by hash, time or process."""
    for path in run.rglob("*"):
        parts = path.relative_to(run).parts
        if path.is_file() and parts[0] not in ("rollouts", "logs"):
            yield "/".join(parts[:-1] if parts[0] == "media" else parts)


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def differences(before: Found, after: Found) -> Iterator[str]:
    """A line for each item that differs; at most six of a kind."""
    for kind in {**before, **after}:
        old, new = before.get(kind, {}), after.get(kind, {})
        changed = [item for item in {**old, **new} if old.get(item) != new.get(item)]
        for item in changed[:6]:
            yield f"{kind}: {item}: {old.get(item, 'not there')[:200]} -> {new.get(item, 'not there')[:200]}"
        if changed[6:]:
            yield f"{kind}: and {len(changed) - 6} more"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).parents[1], help="the checkout; this one by default"
    )
    parser.add_argument("--cases", default="cheap", help=f"comma-separated: {', '.join((*GROUPS, *CASES))}")
    parser.add_argument("--out", type=Path, help="a file to write the hashes to")
    parser.add_argument("--against", type=Path, help="a file of hashes to compare with")
    parser.add_argument("--keep", type=Path, help="a folder for the runs, which must not exist")
    parser.add_argument("--replay", type=Path, help="only replay the runs that --keep has left in this folder")
    arguments = parser.parse_args()
    use(arguments.root.resolve())
    given = {name: path and path.resolve() for name, path in vars(arguments).items() if isinstance(path, Path)}
    before = json.loads(given["against"].read_text()) if arguments.against else {}
    with ExitStack() as stack:
        folder = given.get("keep") or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pins-")))
        write_inputs(folder, given["root"])
        os.chdir(folder)
        runner = Runner(folder, stack)
        if arguments.replay:
            return replay_all(runner, given["replay"], chosen("all"))
        found, failed = pin_all(runner, folder, chosen(arguments.cases), before)
    if arguments.out:
        given["out"].write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return failed


def pin_all(
    runner: Runner, folder: Path, cases: Sequence[str], before: Mapping[str, Found]
) -> tuple[dict[str, Found], int]:
    """The cases' hashes, and 1 if a replay or a comparison finds a difference."""
    found, failed = {}, 0
    for case in cases:
        began = time.monotonic()
        found[case] = pin(runner, folder, case)
        short = {kind: sha(canonical(items).encode())[:10] for kind, items in found[case].items()}
        print(f"{case:14} {time.monotonic() - began:5.1f} s ", *map(" ".join, short.items()), flush=True)
        problems = list(differences(before[case], found[case])) if case in before else []
        problems += [f"not in the file of --against: {case}"] * bool(before and case not in before)
        replayed = found[case].get("replay", {"exit code": "0"})
        problems += [f"replay: {replayed}"] * (replayed["exit code"] != "0")
        print(*(f"    {problem}\n" for problem in problems), sep="", end="", flush=True)
        failed |= bool(problems)
    return found, failed


def replay_all(runner: Runner, runs: Path, cases: Sequence[str]) -> int:
    """Replay recorded runs; 1 if there is a difference."""
    failed = 0
    for case in cases:
        if list((runs / case / "rollouts").glob("*")):
            found = replay(runner, runs / case)
            print(f"{case:14} {found}", flush=True)
            failed |= found["exit code"] != "0"
    return failed


if __name__ == "__main__":
    sys.exit(main())
