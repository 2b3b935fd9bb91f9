"""mmrl beside itself: updates on episodes with images in observations, packed and one by one.

    python tests/benchmarks/episodes.py [--quick] [--before FOLDER] [--out FILE]

Each of 2 prompts with an image of 448 pixels has 8 episodes of 1 to 6 turns, between which it is shown one of four
images of 224 pixels. One by one means a row for every episode, with its prompt and all of its images. With
``--before``, also updates on single completions by this tree and by another one, such as a checkout of an older commit.
Both sides of a comparison take turns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from charts import markdown
from trl import mmrl_side
from turns import Contestant, arguments, machine, summary, take_turns
from workloads import TABLE, grid

ROOT = Path(__file__).resolve().parents[2]
EPISODES = replace(
    TABLE["image-448"], what="image 448, G = 8, 1 to 6 turns, 16 to 64 tokens, images of 224 between them"
)
SINGLE = grid(completion=64, prompts=2)
ONE_BY_ONE = ("learner.tokens_per_microbatch=1", "learner.share_prefix=off")
TURNS, SHOWN = 6, 224


def compare(sides: Sequence[Contestant], timed: int) -> dict[str, Any]:
    """What was measured of each side."""
    take_turns(sides, timed)
    found = {side.name: summary(side) for side in sides}
    for side in sides:
        found[side.name]["grad_norms"] = [step["grad_norm"] for step in side.steps]
    return found


def tables(results: Mapping[str, Any]) -> str:
    """Seconds of an update and their ratios: the first side's over the second's."""
    rows = []
    for what, found in results["compared"].items():
        (first, one), (second, other) = found.items()
        ratios = [f"{one[key] / other[key]:.2f}x" for key in ("seconds", "processor_s", "memory_bytes")]
        times = [f"{side['seconds']:.2f} ({side['least']:.2f} to {side['most']:.2f})" for side in (one, other)]
        gap = max(abs(a / b - 1) for a, b in zip(one["grad_norms"], other["grad_norms"], strict=True))
        rows.append([what, f"{first}: {times[0]}", f"{second}: {times[1]}", *ratios, f"{gap:.0e}"])
    head = ["work", "s an update", "s an update", "ratio", "by processor time", "memory", "gradients' norms differ by"]
    return "\n\n".join([results["machine"], markdown(head, rows)])


def main() -> None:
    parser = arguments(str(__doc__), "nothing", "", timed=8)
    parser.add_argument("--before", type=Path, help="another tree, whose single completions are compared")
    args = parser.parse_args()
    if args.draw:
        print(tables(json.loads(args.draw.read_text())))
        return
    args.work.mkdir(parents=True, exist_ok=True)
    timed = 2 if args.quick else args.timed
    results = json.loads(args.out.read_text()) if args.out.exists() else {"compared": {}}
    results["machine"] = machine()
    common = {"timed": timed, "tiny": args.quick, "least": EPISODES.lengths.least, "count": False}
    episodes = {**common, "turns": TURNS, "shown": SHOWN}
    sides = [
        mmrl_side("updates", EPISODES, args.work, name=name, overrides=(*how, *args.set), **episodes)
        for name, how in (("one by one", ONE_BY_ONE), ("packed", ()))
    ]
    results["compared"][EPISODES.what] = compare(sides, timed)
    args.out.write_text(json.dumps(results, indent=1))
    if args.before is not None:
        sides = []
        for name, tree in (("before", args.before.resolve()), ("since", ROOT)):
            side = mmrl_side("updates", SINGLE, args.work, name=name, overrides=tuple(args.set), **common)
            side.environment = {"PYTHONPATH": os.pathsep.join(str(tree / part) for part in ("", "plugins", "datasets"))}
            sides.append(side)
        results["compared"][SINGLE.what] = compare(sides, timed)
        args.out.write_text(json.dumps(results, indent=1))
    print(tables(results))


if __name__ == "__main__":
    main()
