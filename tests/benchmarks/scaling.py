"""How the cost of an update grows beside its work: group size, image, completion, micro-batch budget, ranks.

    python tests/benchmarks/scaling.py [AXIS ...] [--quick] [--out FILE]
    python tests/benchmarks/scaling.py --draw FILE

One axis changes at a time, around G = 8, image 448, completion 32. The points of an axis take turns. With a prompt of P
tokens and G completions of R, an update that shares prompts does work for P / G + R tokens per completion, and one that
does not for P + R; the matrix products that were really done are counted beside it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from charts import lines, markdown
from trl import mmrl_side
from turns import arguments, machine, summary, take_turns
from workloads import Workload, grid

AXES: dict[str, dict[str, tuple[Workload, tuple[str, ...]]]] = {
    "group size": {str(g): (grid(group=g), ()) for g in (4, 8, 16, 32)},
    "image": {str(side): (grid(image=side), ()) for side in (224, 448, 672, 1024)},
    "completion": {str(r): (grid(completion=r), ()) for r in (32, 128, 512)},
    "micro-batch budget": {
        str(budget): (grid(prompts=4), (f"learner.tokens_per_microbatch={budget}",))
        for budget in (600, 1200, 2400, 65536)
    },
    "ranks": {
        str(ranks): (grid(prompts=4), ("cluster.name=ray", f"cluster.ranks={ranks}")) for ranks in (1, 2)
    },
}  # fmt: skip


def measure(axis: str, folder: Path, timed: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Every point of an axis, in turns."""
    points = AXES[axis]
    sides = [
        mmrl_side(
            "updates",
            workload,
            folder,
            name=f"{axis} {name}",
            timed=timed,
            overrides=(*options["overrides"], *overrides),
            tiny=options["tiny"],
            least=workload.lengths.least,
            count=axis != "ranks",  # the products of other processes are not seen
        )
        for name, (workload, overrides) in points.items()
    ]
    if axis == "ranks":  # they share the cores
        for name, side in zip(points, sides, strict=True):
            side.environment = {"OMP_NUM_THREADS": str(max(2 // int(name), 1))}
    take_turns(sides, timed, last_words=axis != "ranks")
    if axis == "ranks":  # nor is their memory the driver's
        for side in sides:
            side.memory = None
    return {
        name: summary(side) | {key: side.last[key] for key in ("work", "attention", "alone_s") if side.last}
        for name, side in zip(points, sides, strict=True)
    }


def tokens(workload: Workload) -> tuple[float, float]:
    """Tokens of work per completion token, shared and not."""
    prompt, completion = workload.prompt_tokens, workload.lengths.most
    return (prompt / workload.group + completion) / completion, (prompt + completion) / completion


def tables(results: Mapping[str, Any], picture: Path) -> str:
    """A table for each axis; writes the picture."""
    parts, panels = [results["machine"]], []
    for axis, found in results["axes"].items():
        rows, costs, counted, shared = [], [], [], []
        for name, point in found.items():
            workload = AXES[axis][name][0]
            cost = 1000 * point["seconds"] / point["tokens"]
            with_sharing, without = tokens(workload)
            work = (point["work"] + point["attention"]) / point["tokens"] if "work" in point else math.nan
            memory = "" if point["memory_bytes"] is None else f"{point['memory_bytes'] / 2**20:.0f}"
            rows.append([
                name, f"{point['seconds']:.2f} ({point['least']:.2f} to {point['most']:.2f})", f"{cost:.2f}",
                "" if math.isnan(work) else f"{work / 1e9:.3f}", f"{with_sharing:.1f}", f"{without:.1f}", memory,
                f"{point['alone_s'] / point['seconds']:.2f}" if "alone_s" in point else "",
            ])  # fmt: skip
            costs.append(cost)
            counted.append(work)
            shared.append(with_sharing)
        head = [axis, "s, median (spread)", "ms a completion token", "GFLOP a completion token",
                "tokens of work: (P/G + R) / R", "(P + R) / R", "MiB", "rate reached"]  # fmt: skip
        parts.append(markdown(head, rows))
        curves = {"ms a completion token": costs}
        if not math.isnan(counted[0]):
            curves |= {"operations counted": counted, "(P/G + R) / R": shared}
        panels.append((axis, list(found), curves))
    picture.write_text(lines(panels))
    return "\n\n".join(parts)


def main() -> None:
    parser = arguments(str(__doc__), "axes", f"{', '.join(AXES)}; by default all", timed=5)
    args = parser.parse_args()
    if args.draw:
        print(tables(json.loads(args.draw.read_text()), args.draw.with_suffix(".svg")))
        return
    args.work.mkdir(parents=True, exist_ok=True)
    results = json.loads(args.out.read_text()) if args.out.exists() else {"axes": {}}
    results["machine"] = machine()
    options = {"tiny": args.quick, "overrides": tuple(args.set)}
    for axis in args.axes or AXES:
        print(axis, file=sys.stderr)
        results["axes"][axis] = measure(axis, args.work, 2 if args.quick else args.timed, options)
        args.out.write_text(json.dumps(results, indent=1))
    print(tables(results, args.out.with_suffix(".svg")))


if __name__ == "__main__":
    main()
