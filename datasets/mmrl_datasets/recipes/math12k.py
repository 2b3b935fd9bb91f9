"""math12k: competition mathematics in words alone, answers in LaTeX."""

from __future__ import annotations

from typing import ClassVar

from mmrl.interfaces import DatasetFacts
from mmrl_datasets.table import Table


class Math12K(Table):
    """math12k: competition mathematics in words alone, answers in LaTeX."""

    facts: ClassVar[DatasetFacts | None] = DatasetFacts(
        origin="hiyouga/math12k",
        rows={"train": 12000},
        reward=("math",),
        notes="No images: for text models, and for the text rows of a mix.",
    )

    class Config(Table.Config):
        path: str = "hiyouga/math12k"
        """Its name on the hub, or a local copy."""
        split: str | None = "train"
        """train or test."""
        prompt: str | None = "problem"
        """Column with the question."""
        images: str | None = ""
        """Column with the images; "" takes none."""
        answer: str | None = "answer"
        """Column with the reference answer."""
