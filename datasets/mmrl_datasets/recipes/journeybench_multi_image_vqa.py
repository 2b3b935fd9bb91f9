"""JourneyBench: questions about two images at once."""

from __future__ import annotations

from typing import ClassVar

from mmrl.interfaces import DatasetFacts
from mmrl_datasets.table import Table


class JourneyBenchMultiImageVQA(Table):
    """JourneyBench: questions about two images at once."""

    facts: ClassVar[DatasetFacts | None] = DatasetFacts(
        origin="hiyouga/journeybench-multi-image-vqa",
        reward=("exact",),
        notes="Two images a row.",
    )

    class Config(Table.Config):
        path: str = "hiyouga/journeybench-multi-image-vqa"
        """Its name on the hub, or a local copy."""
        split: str | None = "train"
        """The split to read."""
        prompt: str | None = "problem"
        """Column with the question."""
        images: str | None = "images"
        """Column with the images; "" takes none."""
        answer: str | None = "answer"
        """Column with the reference answer."""
