"""mmrl beside TRL 1.16, the one peer that trains a vision-language model end to end on a CPU: GRPOTrainer, DPOTrainer.

    python tests/benchmarks/trl.py [WORKLOAD ...] [--quick] [--trl-python PYTHON] [--work FOLDER] [--out FILE]
    python tests/benchmarks/trl.py dpo                                    # pairs of answers
    python tests/benchmarks/trl.py --draw FILE

TRL is installed beside mmrl's own packages, and without its dependencies: `pip install --no-deps trl==1.16.0`; in
another environment, --trl-python names that one's Python. Both sides get the same model folder (30 M random
parameters, float32, sdpa), processor, pixel limits and JPEG files, two threads, and one process runs at a time: each
takes four steps in a row while the others are stopped, of which the first is not timed; with --alone each also runs
from start to end in a further process. Nothing is timed before both agree on loss and gradient on TRL's own batch; of
pairs, on one that TRL meets after a few updates, where policy and reference differ.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import charts
from turns import HERE, Contestant, arguments, ask, call, machine, steps_of, summary, take_turns
from workloads import MAX_PIXELS, MIN_PIXELS, PAIRS, SWEEP, TABLE, PairWorkload, Workload, write_all

TRL_VERSION = "1.16.0"
RATE = 1e-6
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-5, 1e-4
"""Of the loss, and of the gradient's norm relative to TRL's."""
LOGPROB_TOLERANCE = 1e-3
"""Of the log-probs of whole answers, some hundred tokens in float32."""
MOVES, MOVING_RATE = 3, 1e-4
"""Updates of TRL's before both sides compare a batch of pairs, and their learning rate."""


def config(workload: Workload, model: Path, data: Path, run_dir: Path, steps: int) -> dict[str, Any]:
    """mmrl's config of a workload."""
    pairs = isinstance(workload, PairWorkload)
    columns = {"chosen": "chosen", "rejected": "rejected"} if pairs else {}
    return {
        "model": {
            "path": str(model),
            "dtype": "float32",
            "gradient_checkpointing": False,
            "freeze": list(workload.freeze) if pairs else [],
        },
        "data": {
            "train": {"name": "table", "path": str(data), "prompt": "question", **columns},
            "max_prompt_tokens": workload.prompt_tokens + 8,
            "min_pixels": MIN_PIXELS,
            "max_pixels": MAX_PIXELS,
        },
        "rewards": [] if pairs else [{"name": f"{HERE / 'workloads.py'}:reward", "label": "vowels"}],
        "algorithm": {"name": "dpo" if pairs else "grpo"},
        "sampler": {"group_size": workload.group, "max_new_tokens": workload.lengths.most},
        "learner": {"lr": RATE, "zero_stage": 0, "tokens_per_microbatch": 65536},
        "trainer": {
            "steps": steps,
            "prompts_per_step": workload.prompts,
            "save_every": 10**6,
            "run_dir": str(run_dir),
        },
    }


def mmrl_side(kind: str, workload: Workload, folder: Path, *, name: str = "mmrl", timed: int = 0,
              overrides: tuple[str, ...] = (), tiny: bool = False, **job: Any) -> Contestant:  # fmt: skip
    """A process of mmrl's; see mmrl_side.py for the kinds."""
    steps = steps_of(timed)
    model, data = write_all(folder, workload, workload.prompts * steps, tiny=tiny)
    run_dir = Path(tempfile.mkdtemp(prefix=f"{workload.name}-{name}-".replace(" ", "-"), dir=folder))
    path = run_dir.with_suffix(".yaml")
    path.write_text(json.dumps(config(workload, model, data, run_dir / "run", steps)))
    values = {
        "kind": kind,
        "config": str(path),
        "overrides": overrides,
        "steps": steps,
        "prompts": workload.prompts,
        "group": workload.group,
        "completion": workload.lengths.most,
        **job,
    }
    return Contestant(name, "mmrl_side.py", values, run_dir.with_suffix(".log"))


def trl_side(kind: str, workload: Workload, folder: Path, python: str, *, completions_only: bool, timed: int = 0,
             tiny: bool = False, **job: Any) -> Contestant:  # fmt: skip
    """A process of TRL's."""
    steps = steps_of(timed)
    model, data = write_all(folder, workload, workload.prompts * steps, tiny=tiny)
    name = "TRL, completions" if completions_only else "TRL, every position"
    pairs = isinstance(workload, PairWorkload)
    values = {
        "kind": kind,
        "model": str(model),
        "data": str(data),
        "output": str(folder / "trl"),
        "completions_only": completions_only,
        "natural": bool(workload.lengths.mean),
        "completion": workload.lengths.most,
        "prompts": workload.prompts,
        "group": workload.group,
        "lr": RATE,
        "steps": 1 if kind == "gate" else steps,
        **({"freeze": list(workload.freeze), "banned": []} if pairs else {}),
        **job,
    }
    log = folder / f"{workload.name}-{name}-{kind}.log".replace(" ", "-").replace(",", "")
    return Contestant(name, "trl_dpo_side.py" if pairs else "trl_side.py", values, log, python)


def parity(workload: Workload, folder: Path, python: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Both sides' loss and gradient on TRL's first batch.

    Raises:
        SystemExit: They disagree.
    """
    batch = str(folder / f"{workload.name}.npz")
    call(trl_side("gate", workload, folder, python, completions_only=True, tiny=options["tiny"], batch=batch))
    found = ask(mmrl_side("gate", workload, folder, name="parity", batch=batch, **options))
    if "fault" in found:
        raise SystemExit(f"{workload.name}: no timing, {found['fault']}")
    (loss, ours), (norm, our_norm) = found["loss"], found["grad_norm"]
    found["loss_gap"], found["norm_gap"] = abs(ours - loss), abs(our_norm / norm - 1)
    print(f"{workload.name}: loss {loss:.7f} and {ours:.7f}, gradient norm {norm:.6f} and {our_norm:.6f}, "
          f"log-probs up to {found['logprob_gap']:.1e} apart", file=sys.stderr)  # fmt: skip
    if found["loss_gap"] > LOSS_TOLERANCE or found["norm_gap"] > NORM_TOLERANCE:
        raise SystemExit(f"{workload.name}: no timing, the two sides do not compute the same")
    return found


def pair_parity(workload: PairWorkload, folder: Path, python: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Both sides' numbers of a batch that TRL meets after ``MOVES`` updates, with TRL's weights of that moment.

    Both leave the same ids out of the softmax.

    Raises:
        SystemExit: They disagree.
    """
    from mmrl.engine.network.folder import ModelFolder

    model, _ = write_all(folder, workload, workload.prompts * steps_of(MOVES + 1), tiny=options["tiny"])
    banned = ModelFolder.open(str(model)).vocabulary.banned
    job = {"batch": str(folder / f"{workload.name}.npz"), "moved": str(folder / f"{workload.name}-moved.safetensors")}
    moving = {"banned": banned, "lr": MOVING_RATE, "steps": MOVES + 1}
    sides = {"timed": MOVES + 1, **job}
    call(trl_side("gate", workload, folder, python, completions_only=True, tiny=options["tiny"], **moving, **sides))
    found = ask(mmrl_side("pair gate", workload, folder, name="parity", **options, **sides))
    if "fault" in found:
        raise SystemExit(f"{workload.name}: no timing, {found['fault']}")
    (loss, ours), (norm, our_norm) = found["loss"], found["grad_norm"]
    found["loss_gap"], found["norm_gap"] = abs(ours - loss), abs(our_norm / norm - 1)
    gaps = [found[f"{name}_gap"] for name in ("logprobs", "reference")]
    print(f"{workload.name}: loss {loss:.7f} and {ours:.7f}, gradient norm {norm:.6f} and {our_norm:.6f}, log-probs of "
          f"answers up to {gaps[0]:.1e} apart, of the reference {gaps[1]:.1e}, and moved from it by up to "
          f"{found['moved']:.2f}", file=sys.stderr)  # fmt: skip
    is_apart = found["loss_gap"] > LOSS_TOLERANCE or found["norm_gap"] > NORM_TOLERANCE
    if is_apart or max(gaps) > LOGPROB_TOLERANCE or found["moved"] < 100 * LOGPROB_TOLERANCE:
        raise SystemExit(f"{workload.name}: no timing, the two sides do not compute the same, or nothing was moved")
    return found


def compare(workload: Workload, folder: Path, python: str, timed: int, rows: Sequence[bool],
            options: Mapping[str, Any], *, alone: bool = False) -> dict[str, Any]:  # fmt: skip
    """Parity, then TRL's rows (whether they score completions only) and mmrl in turns.

    Args:
        alone: True to let each run alone after that.
    """
    gate_of: Any = pair_parity if isinstance(workload, PairWorkload) else parity
    gate = gate_of(workload, folder, python, options)

    def sides() -> list[Contestant]:
        trl = [
            trl_side("run", workload, folder, python, completions_only=only, timed=timed, tiny=options["tiny"])
            for only in rows
        ]
        return [*trl, mmrl_side("run", workload, folder, timed=timed, **options)]

    contestants = sides()
    take_turns(contestants, timed)
    found = {"what": workload.what, "gate": gate, "sides": {each.name: summary(each) for each in contestants}}
    if alone:
        contestants = sides()
        for contestant in contestants:
            print("  alone:", file=sys.stderr)
            take_turns([contestant], timed)
        found["alone"] = {each.name: summary(each) for each in contestants}
    return found


def check_trl(python: str) -> None:
    """Raises SystemExit with what to do unless that Python has TRL as it is compared with."""
    words = [python, "-P", "-c", "from importlib.metadata import version; print(version('trl'))"]
    found = subprocess.run(words, capture_output=True, text=True, cwd="/")
    version = found.stdout.strip() or "no TRL"
    if version != TRL_VERSION:
        raise SystemExit(
            f"{python} has {version}, and the comparison needs TRL {TRL_VERSION}: beside mmrl's own packages, "
            f"`pip install --no-deps trl=={TRL_VERSION}`, or name another environment's Python with --trl-python"
        )


def main() -> None:
    what = f"{', '.join(TABLE)} (the default), sweep, {', '.join(SWEEP)}, dpo, {', '.join(PAIRS)}"
    parser = arguments(str(__doc__), "workloads", what, timed=10)
    parser.add_argument("--faster-row", action="store_true", help="TRL scoring completions only, the faster row, alone")
    parser.add_argument("--alone", action="store_true", help="measure each side without the others too")
    parser.add_argument("--sampler", default="vllm", choices=("vllm", "hf"), help="mmrl's")
    parser.add_argument("--trl-python", default=sys.executable, help="the Python that has TRL")
    args = parser.parse_args()
    if args.draw:
        print(charts.comparison(json.loads(args.draw.read_text()), args.draw.with_suffix(".svg")))
        return
    check_trl(args.trl_python)
    known: dict[str, Workload] = {**TABLE, **SWEEP, **PAIRS}
    sets: dict[str, Sequence[str]] = {"sweep": [*SWEEP], "dpo": [*PAIRS]}
    names = [name for word in args.workloads or TABLE for name in sets.get(word, [word])]
    if unknown := set(names) - set(known):
        raise SystemExit(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    args.work.mkdir(parents=True, exist_ok=True)
    results = json.loads(args.out.read_text()) if args.out.exists() else {"workloads": {}}
    results["machine"] = machine()
    options = {"tiny": args.quick, "overrides": (f"sampler.name={args.sampler}", *args.set)}
    timed, rows = 2 if args.quick else args.timed, (True,) if args.faster_row else (False, True)
    for name in names:
        print(name, file=sys.stderr)
        found = compare(known[name], args.work, args.trl_python, timed, rows, options, alone=args.alone)
        results["workloads"][name] = found
        args.out.write_text(json.dumps(results, indent=1))
    print(charts.comparison(results, args.out.with_suffix(".svg")))


if __name__ == "__main__":
    main()
