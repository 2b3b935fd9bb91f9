"""Geometry3K: school geometry, a diagram each, answers in LaTeX."""

from __future__ import annotations

from typing import ClassVar

from mmrl.interfaces import DatasetFacts
from mmrl_datasets.table import Table


class Geometry3K(Table):
    """Geometry3K: school geometry, a diagram each, answers in LaTeX."""

    facts: ClassVar[DatasetFacts | None] = DatasetFacts(
        origin="hiyouga/geometry3k",
        rows={"train": 2101, "validation": 300, "test": 601},
        reward=("math",),
        notes="Some diagrams are transparent or have a palette.",
    )

    class Config(Table.Config):
        path: str = "hiyouga/geometry3k"
        """Its name on the hub, or a local copy."""
        split: str | None = "train"
        """train, validation or test."""
        prompt: str | None = "problem"
        """Column with the question."""
        images: str | None = "images"
        """Column with the images; "" takes none."""
        answer: str | None = "answer"
        """Column with the reference answer."""
