"""The section of the config on rollouts that are sampled in parts, over several steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Annotated, Any

from pydantic import Field

from mmrl.config.base import Contradiction, Section


class PartialConfig(Section):
    """Rollouts that go on in the next step, with its weights, where a step's time is up."""

    engine_steps: Annotated[int, Field(ge=16, le=10**9)]
    """Steps of the sampler that a round takes at least; it ends once as many groups are finished as a step learns."""
    in_flight: Annotated[float, Field(ge=1, le=4)] = 1.5
    """Groups that are sampled at once, in multiples of `trainer.prompts_per_step`."""

    def num_groups(self, prompts_per_step: int) -> int:
        """Groups that are in flight when a step begins to sample."""
        return math.ceil(Fraction(str(self.in_flight)) * prompts_per_step)  # exactly 1.1, and not the float beside it

    def against(
        self, sampler: str, routing: str, scheduling: str | None, engine: Mapping[str, Any]
    ) -> Iterator[Contradiction]:
        """Contradictions with other sections, by dotted keys.

        Args:
            sampler: ``sampler.name``.
            routing: ``learner.routing``.
            scheduling: ``environment.scheduling``; None without an environment.
            engine: ``sampler.engine``.
        """
        if sampler != "vllm":
            what = f"sampler.partial needs a sampler that takes many steps, and sampler.name is {sampler}"
            yield Contradiction(("sampler.partial", "sampler.name"), what, "set sampler.name: vllm, or partial: null")
        if routing != "own":
            what = f"learner.routing is {routing}, and of a rollout's parts the experts of the last alone are known"
            remedy = "set learner.routing: own, or sampler.partial: null"
            yield Contradiction(("sampler.partial", "learner.routing"), what, remedy)
        if scheduling == "eager":
            what = "sampler.partial ends a round by the sampler's steps, and with environment.scheduling: eager they "
            what += "are not the same in every run"
            remedy = "set environment.scheduling: reproducible, or sampler.partial: null"
            yield Contradiction(("sampler.partial", "environment.scheduling"), what, remedy)
        for key, usual in (("async_scheduling", False), ("stream_interval", 1)):
            if engine.get(key, usual) != usual:
                what = f"sampler.engine.{key} is set, and sampler.partial needs each token at the step that samples it"
                yield Contradiction(("sampler.partial", f"sampler.engine.{key}"), what, f"remove sampler.engine.{key}")
