"""ChartQA: questions about charts, numbers within 5 % count as right."""

from __future__ import annotations

from typing import ClassVar

from mmrl.interfaces import DatasetFacts
from mmrl_datasets.table import Table


class ChartQA(Table):
    """ChartQA: questions about charts, numbers within 5 % count as right."""

    facts: ClassVar[DatasetFacts | None] = DatasetFacts(
        origin="HuggingFaceM4/ChartQA",
        licence="GPL-3.0",
        rows={"train": 28299, "val": 1920, "test": 2500},
        reward=("relaxed",),
        notes="References are lists; copies name their columns query and label, or question and answer.",
    )

    class Config(Table.Config):
        path: str = "HuggingFaceM4/ChartQA"
        """Its name on the hub, or a local copy."""
        split: str | None = "train"
        """train, val or test."""
