"""GeoQA: school geometry with a diagram, in R1-V's selection."""

from __future__ import annotations

from typing import ClassVar

from mmrl.interfaces import DatasetFacts
from mmrl_datasets.table import Table


class GeoQA8K(Table):
    """GeoQA: school geometry with a diagram, in R1-V's selection."""

    facts: ClassVar[DatasetFacts | None] = DatasetFacts(
        origin="leonardPKU/GEOQA_8K_R1V",
        reward=("math",),
        notes="About 8,000 rows by its name; some answers have degree signs.",
    )

    class Config(Table.Config):
        path: str = "leonardPKU/GEOQA_8K_R1V"
        """Its name on the hub, or a local copy."""
        split: str | None = "train"
        """The split to read."""
        prompt: str | None = "problem"
        """Column with the question."""
        images: str | None = "images"
        """Column with the images; "" takes none."""
        answer: str | None = "answer"
        """Column with the reference answer."""
