"""The time of a run's evaluations: their completions at the pace of a step's."""

from __future__ import annotations

from typing import Any

from mmrl.runs.setup import RunSetup


def evaluation_time(setup: RunSetup, generate_s: float, completions: int) -> tuple[dict[str, Any], list[str]]:
    """Seconds of an evaluation and of each of its sets, for a program and for a person; nothing if there is none.

    Its completions are taken to be as long as a step's. Blank images and scoring come on top.

    Args:
        generate_s: Seconds in which a step's completions are generated.
        completions: Their number.
    """
    trainer = setup.config.trainer
    if not (trainer.eval_every and setup.config.evaluations and setup.step_source.samples):
        return {}, []
    answers = {
        name: setup.num_rows(each.key, each.spec) * each.num_samples for name, each in setup.config.evaluations.items()
    }
    seconds = {name: generate_s * count / completions for name, count in answers.items()}
    total = sum(seconds.values())
    each = ", ".join(f"{name} {value:.3g}" for name, value in seconds.items() if name)
    line = f"about {total:.3g} s an evaluation of {sum(answers.values())} completions" + (f": {each}" if each else "")
    return {"evaluation_s": total, **({"evaluation_set_s": seconds} if any(seconds) else {})}, [line]
