"""mmrl beside itself: each prompt packed once for its completions, and once for every completion.

    python tests/benchmarks/sharing.py [WORKLOAD ...] [--quick] [--steps-only | --updates-only] [--out FILE]
    python tests/benchmarks/sharing.py --draw FILE

Updates alone on the same random completions, and whole steps, each with `learner.share_prefix: auto` and `off`, in
turns. The update's matrix products are counted, and done alone one after the other: what a machine that did nothing
else would take.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from charts import markdown
from trl import mmrl_side
from turns import arguments, machine, summary, take_turns
from workloads import TABLE, Workload

MODES = ("off", "auto")
TARGETS = {"image-448": "5x, 7x"}


def compare(workload: Workload, folder: Path, kind: str, timed: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Both modes in turns, ``updates`` or whole steps (``run``)."""
    sides = [
        mmrl_side(
            kind,
            workload,
            folder,
            name=f"share_prefix {mode}",
            timed=timed,
            overrides=(*options["overrides"], f"learner.share_prefix={mode}"),
            tiny=options["tiny"],
            least=workload.lengths.least,
            count=True,
        )
        for mode in MODES
    ]
    take_turns(sides, timed, last_words=kind == "updates")
    found = {mode: summary(side) for mode, side in zip(MODES, sides, strict=True)}
    for mode, side in zip(MODES, sides, strict=True):
        if side.last is not None:
            keys = ("work", "alone_s", "attention", "grad_norm")
            found[mode] |= {key: side.last[key] for key in keys if key in side.last}
            found[mode]["grad_norms"] = [step["grad_norm"] for step in side.steps]
    return found


def tables(results: Mapping[str, Any]) -> str:
    """Ratios of updates and whole steps, memory, and how much of the machine's own rate an update reaches."""
    rows = []
    for name, kinds in results["workloads"].items():
        for kind, found in kinds.items():
            off, auto = (found[mode] for mode in MODES)
            row = [
                TABLE[name].what,
                "update" if kind == "updates" else "whole step",
                f"{off['seconds']:.2f}",
                f"{auto['seconds']:.2f}",
                f"{off['seconds'] / auto['seconds']:.2f}x",
                f"{off['processor_s'] / auto['processor_s']:.2f}x",
                TARGETS.get(name, "") if kind == "updates" else "",
                f"{auto['memory_bytes'] / off['memory_bytes']:.2f}",
            ]
            row += [f"{side['alone_s'] / side['seconds']:.2f}" if "alone_s" in side else "" for side in (off, auto)]
            if "work" in auto:
                done = (auto["work"] + auto["attention"]) / auto["seconds"]
                row += [f"{off['work'] / auto['work']:.1f}x", f"{done / 1e9:.0f}"]
            else:
                row += ["", ""]
            rows.append(row)
    head = ["work", "what", "off, s", "auto, s", "ratio", "by processor time", "must, aim", "memory",
            "rate reached, off", "auto", "less work", "GFLOP/s, auto"]  # fmt: skip
    words = (
        "Rate reached: the seconds that an update's matrix products take alone, over the update's; with attention's "
        "own products on top, GFLOP/s counts both. Memory: auto's peak of an update over off's."
    )
    return "\n\n".join([results["machine"], words, markdown(head, rows)])


def main() -> None:
    parser = arguments(str(__doc__), "workloads", f"{', '.join(TABLE)}; by default all", timed=10)
    parser.add_argument("--steps-only", action="store_true", help="whole steps only")
    parser.add_argument("--updates-only", action="store_true", help="updates only")
    args = parser.parse_args()
    if args.draw:
        print(tables(json.loads(args.draw.read_text())))
        return
    args.work.mkdir(parents=True, exist_ok=True)
    results = json.loads(args.out.read_text()) if args.out.exists() else {"workloads": {}}
    results["machine"] = machine()
    options = {"tiny": args.quick, "overrides": tuple(args.set)}
    kinds = [kind for kind, left_out in (("updates", args.steps_only), ("run", args.updates_only)) if not left_out]
    for name in args.workloads or TABLE:
        for kind in kinds:
            print(f"{name}, {kind}", file=sys.stderr)
            timed = 2 if args.quick else args.timed
            found = compare(TABLE[name], args.work, kind, timed, options)
            results["workloads"].setdefault(name, {})[kind] = found
            args.out.write_text(json.dumps(results, indent=1))
    print(tables(results))


if __name__ == "__main__":
    main()
