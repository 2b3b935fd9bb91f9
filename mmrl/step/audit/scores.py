"""Rows of a reward model: its scores packed and one by one, and that they move with the image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmrl.config.sections import Config
from mmrl.engine_api import Engine, PromptEncoder
from mmrl.errors import DataError
from mmrl.ops.parity import LIMITS
from mmrl.step.audit.probe_prompts import IMAGE, MOVED, OTHER, PROMPT_TOKENS, ProbePrompt, fitting
from mmrl.step.audit.probe_row import ProbeRow
from mmrl.step.audit.sight import BLIND, NOISE, SIGHT
from mmrl.token_columns import REWARD
from mmrl.types import FloatArray, Sample

SHARED = "a shared prompt, or other conversations in the row"


@dataclass(frozen=True, slots=True)
class ProbedScores:
    """Scores of the probes' prompts, each with two answers.

    Attributes:
        packed: By the prompt's name, (2,) scores with all conversations in packed rows; likewise ``alone``.
        left_out: Why prompts were not asked, by their names.
    """

    precision: str
    prompts: Sequence[ProbePrompt]
    packed: Mapping[str, FloatArray]
    alone: Mapping[str, FloatArray]
    left_out: Mapping[str, str]

    def gap(self, name: str) -> float:
        """The largest difference of a prompt's scores, in units of the largest score, or of 1."""
        scale = max(1.0, *(float(np.abs(each).max()) for each in self.alone.values()))
        return float(np.abs(self.packed[name] - self.alone[name]).max()) / scale


def scores_of(
    engine: Engine, encoder: PromptEncoder, config: Config, *, total_tokens: float = PROMPT_TOKENS
) -> ProbedScores | None:
    """The scores of the prompts that fit; None for an engine without a reward model, or one that describes no model.

    Args:
        total_tokens: As of ``fitting``.
    """
    facts = engine.describe()
    with engine.learning() as learner:
        if REWARD not in learner.networks or "model_type" not in facts:
            return None
    most, max_images = config.data.max_prompt_tokens, int(facts.get("max_images", 0))
    fit = fitting(encoder, max_tokens=most, max_images=max_images, total_tokens=total_tokens)
    samples, left_out = dict[str, tuple[Sample, ...]](), dict(fit.left_out)
    for prompt in fit.prompts:
        try:
            samples[prompt.name] = encoder.given(prompt.encoded, closed=True)
        except DataError as error:  # a template that writes another beginning once the answer is there
            left_out[prompt.name] = error.what
    prompts = [prompt for prompt in fit.prompts if prompt.name in samples]
    every = [sample for found in samples.values() for sample in found]
    packed = dict(zip(samples, np.split(_scores(engine, every), len(samples) or 1), strict=False))
    alone = {name: np.concatenate([_scores(engine, [sample]) for sample in found]) for name, found in samples.items()}
    return ProbedScores(engine.precision, prompts, packed, alone, left_out)


def score_rows(found: ProbedScores) -> Iterator[ProbeRow]:
    """A row for each prompt, and for each image that another one is held against."""
    bound = LIMITS[found.precision].noise_stop
    for prompt in found.prompts:
        gap = found.gap(prompt.name)
        told = f"scores, packed, are {gap:.1e} of the largest one from themselves one by one"
        yield ProbeRow.at_most(f"packed = one by one, {prompt.name}", gap, bound, told, f"{prompt.finds}; {SHARED}")
    noise = max((found.gap(prompt.name) for prompt in found.prompts), default=0.0)
    for other, finds in ((OTHER, "images that never arrive"), (MOVED, "positions of patches that are read wrongly")):
        if IMAGE in found.alone and other in found.alone:
            moved = float(np.abs(found.alone[other] - found.alone[IMAGE]).mean())
            told = f"scores of the same answers move by {moved:.1e} with the image"
            told += "" if moved > NOISE * noise else ", which is nothing: the model is blind"
            yield ProbeRow.more_than(f"{SIGHT}{other}", moved, NOISE * noise, told, f"{BLIND}; {finds}")


def _scores(engine: Engine, samples: Sequence[Sample]) -> FloatArray:
    """(B,) scores; each call takes the learner anew, so that what one keeps of images serves no other."""
    with engine.learning() as learner:
        return learner.network(REWARD).final_values(samples)
