"""CLEVR scenes: how many things there are."""

from __future__ import annotations

from typing import ClassVar

from mmrl.interfaces import DatasetFacts
from mmrl_datasets.table import Table


class ClevrCount(Table):
    """CLEVR scenes: how many things there are."""

    facts: ClassVar[DatasetFacts | None] = DatasetFacts(
        origin="BUAADreamer/clevr_count_70k",
        reward=("count",),
        notes="About 70,000 rows by its name; answers are digits.",
    )

    class Config(Table.Config):
        path: str = "BUAADreamer/clevr_count_70k"
        """Its name on the hub, or a local copy."""
        split: str | None = "train"
        """The split to read."""
        prompt: str | None = "problem"
        """Column with the question."""
        images: str | None = "images"
        """Column with the images; "" takes none."""
        answer: str | None = "answer"
        """Column with the reference answer."""
