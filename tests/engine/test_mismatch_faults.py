"""Faults of a sampler, and what the first check of a run says of them: the limits follow from the network's rounding.

The sampler is plain transformers in the run's type, with a fault put into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.engine.network.plain_model import plain_inputs
from mmrl.engine.network.vision import ImageInputs
from mmrl.ops.logprobs import token_logprobs
from mmrl.step.check import LogprobCheck
from mmrl.types import Rollout, Sample
from tests.conftest import Bench, Plain
from tests.test_published import TEXTS, answered, setting  # noqa: F401

Moved = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""New positions (..., S) from positions, ids (S,) and the length of the prompt."""


def completion_off_by_one(positions: torch.Tensor, ids_S: torch.Tensor, prompt: int) -> torch.Tensor:
    return positions + (torch.arange(len(ids_S)) >= prompt)


def image_rows_dropped(positions: torch.Tensor, ids_S: torch.Tensor, prompt: int) -> torch.Tensor:
    return torch.where(is_image(ids_S), positions[:1], positions)


def image_rows_off_by_one(positions: torch.Tensor, ids_S: torch.Tensor, prompt: int) -> torch.Tensor:
    moved = positions.clone()
    moved[1] += is_image(ids_S)
    return moved


def is_image(ids_S: torch.Tensor) -> torch.Tensor:
    (found,) = torch.unique(ids_S[:-1][ids_S[:-1] == ids_S[1:]])  # the only id that repeats
    return ids_S == found


class FaultySampler:
    """Plain transformers with a fault.

    Args:
        moved: Gives positions in place of those that the model has found.
        left_out: Place in the prompt of a token that is left out, from its end.
        temperature: Of sampling.
        change: Changes a weight, by its name.
    """

    def __init__(
        self,
        moved: Moved | None = None,
        left_out: int = 0,
        temperature: float = 1.0,
        change: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, weight: weight,
    ) -> None:
        self.moved, self.left_out, self.temperature, self.change = moved, left_out, temperature, change

    @torch.no_grad()
    def sampled(self, samples: Sequence[Sample], bench: Bench, dtype: str) -> list[Sample]:
        """The samples with its log-probs."""
        model = Plain(bench.folder.path, dtype).model
        for name, weight in model.named_parameters():
            weight.copy_(self.change(name, weight))
        return [self._one(model, sample, bench) for sample in samples]

    def _one(self, model: Any, sample: Sample, bench: Bench) -> Sample:
        prompt = [*map(int, sample.prompt.token_ids)]
        if self.left_out:
            del prompt[-self.left_out]
        targets_T = torch.from_numpy(sample.token_ids.astype(np.int64))
        ids_S = torch.tensor([*prompt, *targets_T.tolist()])
        images = ImageInputs(bench.folder, bench.media)
        inputs = plain_inputs(bench.folder, images, model, sample.all_images, ids_S[None])
        with ExitStack() as stack:
            for name, module in model.named_modules():
                if self.moved and name.endswith("rotary_emb") and "visual" not in name:
                    hook = self._hook(ids_S, len(prompt))
                    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            logits_TV = model(**inputs).logits[0, len(prompt) - 1 : -1]
        banned_V = torch.zeros(logits_TV.shape[1], dtype=torch.bool)
        banned_V[list(bench.folder.vocabulary.banned)] = True
        found, _ = token_logprobs(logits_TV, targets_T, banned_V, self.temperature, entropy=False)
        (segment,) = sample.segments
        return replace(sample, segments=(replace(segment, sampler_logprobs=found.float().numpy()),))

    def _hook(self, ids_S: torch.Tensor, prompt: int) -> Callable[..., Any]:
        def hook(module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            assert self.moved is not None
            hidden, positions = (*args, *options.values())
            return (hidden, self.moved(positions[:, 0], ids_S, prompt)[:, None] if positions.ndim == 3
                    else self.moved(positions[0], ids_S, prompt)[None]), {}  # fmt: skip

        return hook


def fp8(name: str, weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.float8_e4m3fn).to(weight.dtype) if "proj" in name and weight.ndim == 2 else weight


def stale(name: str, weight: torch.Tensor) -> torch.Tensor:
    """One step of AdamW at 2e-5 old."""
    signs = torch.randint(0, 2, weight.shape, generator=torch.Generator().manual_seed(len(name))) * 2 - 1
    return weight + 2e-5 * signs.to(weight.dtype)


FAULTS = {
    "completion's positions off by one": FaultySampler(completion_off_by_one),
    "image rows dropped": FaultySampler(image_rows_dropped),
    "image rows off by one": FaultySampler(image_rows_off_by_one),
    "a token of the prompt left out": FaultySampler(left_out=2),
    "temperature off by 2 %": FaultySampler(temperature=1.02),
    "weights one step old": FaultySampler(change=stale),
    "weights in FP8": FaultySampler(change=fp8),
}
BFLOAT16 = ("completion's positions off by one", "a token of the prompt left out", "weights in FP8")
"""Those that are larger than the rounding of SmolLM2-135M in bfloat16."""


def verdict(samples: Sequence[Sample], engine: Any, precision: str) -> str:
    """The worst verdict that a run's first check gives on the samples."""
    found = ["ok"]

    def note(kind: str, **fields: Any) -> None:
        found.append(fields.get("verdict", "ok"))

    rollouts = [Rollout(each.prompt, each.segments, 0, "", "stop", 0) for each in samples]
    LogprobCheck(precision, "warn", event=note).check_first(rollouts, engine)
    return max(found, key=["ok", "warn", "stop"].index)


@pytest.fixture(scope="module")
def tiny(start: Callable[..., Any], vision: Bench) -> tuple[Any, list[Sample]]:
    return start(sampler={"temperature": 1.0}), [s for s in vision.samples([9, 24, 7, 12, 11, 30]) if s.prompt.images]


def test_a_sound_sampler_of_a_tiny_network_passes(tiny, vision):
    engine, samples = tiny
    assert verdict(FaultySampler().sampled(samples, vision, "float32"), engine, "float32") == "ok"


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_a_tiny_network_stops_in_float32(fault, tiny, vision):
    engine, samples = tiny
    assert verdict(FAULTS[fault].sampled(samples, vision, "float32"), engine, "float32") == "stop"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_published_model_passes_and_its_faults_stop(precision, start, setting):  # noqa: F811
    samples = [answered(setting, question, answer) for question, answer in TEXTS[:-1]]
    engine = start(bench=setting, model={"dtype": precision, "lora": {"rank": 4}}, sampler={"temperature": 1.0})
    sound = verdict(FaultySampler().sampled(samples, setting, precision), engine, precision)
    assert sound == "ok" if precision == "float32" else sound != "stop"
    faults = BFLOAT16 if precision == "bfloat16" else [name for name in FAULTS if "image" not in name]
    for fault in faults:
        assert verdict(FAULTS[fault].sampled(samples, setting, precision), engine, precision) == "stop", fault
