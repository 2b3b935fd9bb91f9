"""CLEVR CoGenT A scenes: how many things there are, as used by R1-V."""

from __future__ import annotations

from typing import ClassVar

from mmrl.interfaces import DatasetFacts
from mmrl_datasets.table import Table


class ClevrCogenA(Table):
    """CLEVR CoGenT A scenes: how many things there are, as used by R1-V."""

    facts: ClassVar[DatasetFacts | None] = DatasetFacts(
        origin="leonardPKU/clevr_cogen_a_train",
        reward=("count",),
        notes="References stand in <answer> tags; questions have no placeholder.",
    )

    class Config(Table.Config):
        path: str = "leonardPKU/clevr_cogen_a_train"
        """Its name on the hub, or a local copy."""
        split: str | None = "train"
        """The split to read."""
        prompt: str | None = "problem"
        """Column with the question."""
        images: str | None = "image"
        """Column with the images; "" takes none."""
        answer: str | None = "solution"
        """Column with the reference answer."""
