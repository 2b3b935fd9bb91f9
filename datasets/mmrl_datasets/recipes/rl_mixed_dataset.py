"""A mix of questions with and without images."""

from __future__ import annotations

from typing import ClassVar

from mmrl.interfaces import DatasetFacts
from mmrl_datasets.table import Table


class RLMixed(Table):
    """A mix of questions with and without images."""

    facts: ClassVar[DatasetFacts | None] = DatasetFacts(
        origin="hiyouga/rl-mixed-dataset",
        reward=("math",),
        notes="Text rows have an empty list of images.",
    )

    class Config(Table.Config):
        path: str = "hiyouga/rl-mixed-dataset"
        """Its name on the hub, or a local copy."""
        split: str | None = "train"
        """The split to read."""
        prompt: str | None = "problem"
        """Column with the question."""
        images: str | None = "images"
        """Column with the images; "" takes none."""
        answer: str | None = "answer"
        """Column with the reference answer."""
