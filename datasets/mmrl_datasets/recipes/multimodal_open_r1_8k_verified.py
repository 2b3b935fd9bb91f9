"""Multimodal Open R1: verified questions with an image and a worked solution."""

from __future__ import annotations

from typing import ClassVar

from mmrl.interfaces import DatasetFacts
from mmrl_datasets.table import Table


class MultimodalOpenR1(Table):
    """Multimodal Open R1: verified questions with an image and a worked solution."""

    facts: ClassVar[DatasetFacts | None] = DatasetFacts(
        origin="lmms-lab/multimodal-open-r1-8k-verified",
        reward=("math",),
        notes="About 8,000 rows by its name; solutions have think and answer tags: answers and demonstrations at once.",
    )

    class Config(Table.Config):
        path: str = "lmms-lab/multimodal-open-r1-8k-verified"
        """Its name on the hub, or a local copy."""
        split: str | None = "train"
        """The split to read."""
        prompt: str | None = "problem"
        """Column with the question."""
        images: str | None = "image"
        """Column with the images; "" takes none."""
        answer: str | None = "solution"
        """Column with the reference answer."""
        demonstration: str | None = "solution"
        """Column with a completion to imitate."""
