"""Calibrates the monitors of preferences: sound runs give no alarm, and runs that are broken on purpose the right one.

    python tests/benchmarks/preference_alarms.py OUT [NAME ...] [--steps 80] [--list]

A tiny model with random weights learns from pairs of answers to handwritten digits, some short and some long: one names
the digit, the other another one. Sound runs have answers of all lengths on both sides, for several algorithms and
seeds. In the others the chosen one is mostly the longer one: ``LENGTHS`` differ in nothing else, and in ``SKEWED`` the
length is so much easier to learn than the picture that it alone is learned. A run takes a minute on two idle cores.
What is finished in OUT is not run again; the table is OUT/alarms.md, and the exit code as that of ``alarms.py``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "examples")]

from alarms import Trial, try_all  # noqa: E402
from compare_algorithms import call  # noqa: E402

ANSWERS = ("{}", "It is {}", "It is a {} .", "The digit is a {} .", "I see that the digit is a {} .")
"""From the shortest to the longest."""
LENGTHS = {"length90": 0.9, "longer": 1.0}
"""Share of the pairs whose chosen answer is the longer one, where nothing else tells them apart."""
SKEWED = {"skew85": 0.85}
"""The same where the chosen answer alone is right."""
USUAL = (
    "rewards=[]", "algorithm={name: dpo}", "sampler.max_new_tokens=40", "learner.lr=2e-3", "learner.schedule=constant",
    "trainer.prompts_per_step=32", "trackers=[]",
)  # fmt: skip
ALGORITHMS = ("dpo", "simpo", "orpo", "kto", "mpo")
SOUND = {name: Trial([f"algorithm={{name: {name}}}"]) for name in ALGORITHMS}
SOUND |= {
    "ipo": Trial(["algorithm={name: dpo, variant: ipo}"]),
    "dpo_seed_1": Trial(["trainer.seed=1"]),
    "dpo_lr_times_5": Trial(["learner.lr=1e-2"]),
}
BROKEN = {name: Trial([f"data.train.path={name}"], ["length_bias"]) for name in (*LENGTHS, *SKEWED)}


def main() -> int:
    return try_all(__doc__ or "", {**SOUND, **BROKEN}, 80, prepared, with_data)


def prepared(output: Path) -> list[str]:
    """The override of the model that all runs start from, which is made with the pairs."""
    if not (output / "model").exists():
        call(output, "model", "examples/tiny_model.py", output / "model")
    write_pairs(output)
    return [f"model.path={output / 'model'}"]


def with_data(trial: Trial, output: Path) -> Trial:
    """The trial with the files of its pairs, and what all runs have."""
    kind = next((word.partition("=")[2] for word in trial.words if word.startswith("data.train.path=")), "sound")
    files = [
        f"data.{key}={{name: table, path: '{output / f'{kind}_{split}.jsonl'}'}}"
        for key, split in (("train", "train"), ("eval", "test"))
    ]
    words = [word for word in trial.words if not word.startswith("data.")]
    return Trial([*USUAL, *files, *words], trial.right, trial.program)


def write_pairs(output: Path) -> None:
    """The pairs of each kind, once."""
    from PIL import Image

    from mmrl_datasets.digits import held_out_digits, read_digits
    from mmrl_datasets.layout import png

    pixels, values = read_digits(56)
    held_out, others = held_out_digits(0)
    images = output / "images"
    if not images.exists():
        images.mkdir(parents=True)
        for place, array in enumerate(pixels):
            (images / f"{place}.png").write_bytes(png(Image.fromarray(array).convert("RGB")))
    for kind in ("sound", *SKEWED, *LENGTHS):
        for number, (split, places) in enumerate({"train": others, "test": held_out[:150]}.items()):
            rng = np.random.default_rng([len(kind), number])
            lines = [json.dumps(pair(kind, place, int(values[place]), rng)) for place in map(int, places)]
            (output / f"{kind}_{split}.jsonl").write_text("\n".join(lines) + "\n")


def pair(kind: str, place: int, digit: int, rng: np.random.Generator) -> dict[str, str]:
    """A row of a digit."""
    other = digit if kind in LENGTHS else int((digit + rng.integers(1, 10)) % 10)
    forms: Sequence[int] = rng.integers(len(ANSWERS), size=2).tolist()
    if (share := {**SKEWED, **LENGTHS}.get(kind)) is not None:
        short, long = sorted(rng.choice(len(ANSWERS), 2, replace=False).tolist())
        forms = (long, short) if rng.random() < share else (short, long)
    chosen, rejected = (ANSWERS[form].format(each) for form, each in zip(forms, (digit, other), strict=True))
    return {"image": f"images/{place}.png", "question": "Which digit?", "chosen": chosen, "rejected": rejected}


if __name__ == "__main__":
    sys.exit(main())
