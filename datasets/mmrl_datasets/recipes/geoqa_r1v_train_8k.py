"""GeoQA: school geometry with a diagram, R1-V's training rows."""

from __future__ import annotations

from typing import ClassVar

from mmrl.interfaces import DatasetFacts
from mmrl_datasets.table import Table


class GeoQATrain8K(Table):
    """GeoQA: school geometry with a diagram, R1-V's training rows."""

    facts: ClassVar[DatasetFacts | None] = DatasetFacts(
        origin="leonardPKU/GEOQA_R1V_Train_8K",
        reward=("math",),
        notes="About 8,000 rows by its name; references stand in <answer> tags, some with degree signs.",
    )

    class Config(Table.Config):
        path: str = "leonardPKU/GEOQA_R1V_Train_8K"
        """Its name on the hub, or a local copy."""
        split: str | None = "train"
        """The split to read."""
        prompt: str | None = "problem"
        """Column with the question."""
        images: str | None = "image"
        """Column with the images; "" takes none."""
        answer: str | None = "solution"
        """Column with the reference answer."""
