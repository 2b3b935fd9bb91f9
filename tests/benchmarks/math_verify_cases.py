"""How far `math` agrees with Math-Verify's own tests: `python tests/benchmarks/math_verify_cases.py CHECKOUT`.

CHECKOUT is a copy of github.com/huggingface/Math-Verify. The triples of reference, answer and verdict are read from the
literals of its tests, which are not run. Prints how many verdicts agree, those that do not, and the processor time of a
call: over the suite with nothing remembered, and over plain numbers. plugins/README.md gives the reason for each kind
that does not agree.
"""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mmrl.testing.rollouts import make_rollouts
from mmrl.types import Rollout, Score
from mmrl_rewards import math

FILES = ("test_all", "test_numina_cases", "test_open_thoughts", "test_boxed")
NUMBERS = 5000


class Case(NamedTuple):
    """A reference, an answer, and True if the suite calls it right."""

    reference: str
    answer: str
    is_right: bool


def cases(checkout: Path) -> Iterator[Case]:
    """The triples that are literals."""
    for name in FILES:
        tree = ast.parse((checkout / "tests" / f"{name}.py").read_text())
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            for call in (node for node in function.decorator_list if isinstance(node, ast.Call)):
                yield from _rows(call)


def _rows(call: ast.Call) -> Iterator[Case]:
    names = [name.strip() for name in ast.literal_eval(call.args[0]).split(",")]
    assert isinstance(call.args[1], ast.List)
    for element in call.args[1].elts:
        try:
            row = dict(zip(names, ast.literal_eval(element), strict=False))
        except ValueError:
            continue
        yield Case(row["gold"], row["pred"], bool(row["expected"]))


def scored(reward: math.Math, rollouts: Sequence[Rollout]) -> tuple[list[Score | None], float]:
    """Scores, and processor seconds of a call."""
    math.equal.cache_clear()
    start = time.process_time()
    scores = [reward.score_one(rollout) for rollout in rollouts]
    return scores, (time.process_time() - start) / len(rollouts)


def main() -> None:
    reward, suite = math.Math(math.Math.Config()), list(cases(Path(sys.argv[1])))
    reward.score_one(make_rollouts([r"\boxed{\frac12}"], answer="0.5")[0])  # loads the grader
    scores, seconds = scored(reward, [make_rollouts([case.answer], answer=case.reference)[0] for case in suite])
    wrong = [(case, score) for case, score in zip(suite, scores, strict=True) if score != case.is_right]
    for case, score in wrong:
        print(f"{score}, there {case.is_right:d}: {case.reference[-100:]!r} and {case.answer[-100:]!r}")
    numbers = [make_rollouts([f"So it is \\boxed{{{n}}}."], answer=str(n + n % 2))[0] for n in range(NUMBERS)]
    print(f"{len(suite) - len(wrong)} of {len(suite)} agree, {1000 * seconds:.2f} ms a call")
    print(f"plain numbers: {1e6 * scored(reward, numbers)[1]:.1f} us a call")


if __name__ == "__main__":
    main()
