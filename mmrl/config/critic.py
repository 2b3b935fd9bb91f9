"""The section of the config on the critic, which some algorithms train beside the policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from mmrl.config.base import Contradiction, Section, Text
from mmrl.errors import plural


class CriticConfig(Section):
    """A second trained network, which predicts returns. What has no key here is the learner's: schedule, clipping of
    gradients, minibatches, epochs, ZeRO stage, offload and the tokens of a packed row."""

    path: Text | None = None
    """A Hugging Face model folder, or a name on the hub; a reward model's brings its head. null: the policy's own."""
    revision: Text | None = None
    """Branch, tag or commit of a critic on the hub; null is its default branch."""
    lr: Annotated[float, Field(gt=0, le=1)] = 1e-5
    """Learning rate of the critic's AdamW, after warm-up."""
    head: Literal["zero", "normal"] = "zero"
    """Start of a new head: zero predicts 0 everywhere, normal is drawn with the seed."""
    pretrain_steps: Annotated[int, Field(ge=0, le=10**9)] = 0
    """First steps of the run, in which the critic alone learns and the policy stays as it is."""
    freeze: Annotated[tuple[Literal["vision", "projector", "language"], ...], Field(strict=False)] = ()
    """Parts of the critic that are not trained: any of vision, projector, language; its head always is."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Weight decay of the critic's AdamW."""

    def contradictions(self) -> Iterator[Contradiction]:
        if self.revision is not None and self.path is None:
            what = "critic.revision is set, and critic.path is null: the critic begins as the policy does"
            yield Contradiction(("revision", "path"), what, "set critic.path, or remove critic.revision")

    def against(self, adapters: bool, steps: int | None) -> Iterator[Contradiction]:
        """Contradictions with other sections, by dotted keys.

        Args:
            adapters: True with ``model.lora``, which gives the critic adapters too.
            steps: The run's; None while they are not known.
        """
        if self.freeze and adapters:
            what = "with model.lora the critic trains adapters and its head, so there is no weight to freeze"
            yield Contradiction(("critic.freeze", "model.lora"), what, "remove critic.freeze")
        if steps is not None and self.pretrain_steps >= steps:
            run = f"the run has only {plural(steps, 'step')}"
            what = f"critic.pretrain_steps is {self.pretrain_steps}, and {run}, so the policy would not learn"
            remedy = "pretrain the critic for fewer steps, or train for more"
            yield Contradiction(("critic.pretrain_steps", "trainer.steps"), what, remedy)

    def shares_base(self, adapters: bool, zero_stage: int) -> bool:
        """True if it has adapters on the policy's own weights in memory.

        At ZeRO 3 two engines cannot share a module's weights (DeepSpeed 0.19 fails at the first gather), so there it
        has a copy of them, as where it has a folder of its own.

        Args:
            adapters: As of ``against``.
        """
        return adapters and self.path is None and zero_stage < 3

    def pretrains(self, step: int) -> bool:
        """True if the critic alone learns in a step."""
        return step <= self.pretrain_steps
