"""MMMU: college questions of 30 subjects with up to seven images that the text names by number.

A row's source is its ``question_type``, so that each kind of question has the reward that suits it; ``facts.notes`` has
the rewards to write.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.errors import DataError
from mmrl.interfaces import DatasetFacts
from mmrl.types import Prompt
from mmrl_datasets.table import Table


class MMMU(Table):
    """MMMU: one subject's questions, with choices or open."""

    facts = DatasetFacts(
        origin="MMMU/MMMU",
        licence="Apache-2.0",
        rows={"dev": 150, "validation": 900, "test": 10500},
        reward=("choice", "exact"),
        notes="rewards: [{name: choice, sources: [multiple-choice], label: right}, "
        "{name: exact, sources: [open], label: right}]. For evaluation. One subset for each of 30 "
        "subjects, which the rows are counted over; the references of test are not published.",
    )

    class Config(Table.Config):
        path: str = "MMMU/MMMU"
        """Its name on the hub, or a local copy of a subject."""
        subset: str | None = None
        """The subject, such as Accounting; needed on the hub."""
        split: str | None = "validation"
        """dev, validation or test."""
        prompt: str | None = "question"
        """Column with the question."""
        images: str | None = "image_1..n"
        """Columns with the images."""
        answer: str | None = "answer"
        """Column with the reference: a letter, or the answer of an open question."""
        choices: str | None = "options"
        """Column with the answers to choose from, as a list written as text."""
        source: str | None = "question_type"
        """Column that says which rewards score the row: multiple-choice or open."""

    def load(self) -> Sequence[Prompt]:
        """The rows of one subject, lazily.

        Raises:
            DataError: As for any table; or no subject is named.
        """
        if self.config.subset is None and self.config.path == type(self.config).model_fields["path"].default:
            raise DataError(
                "MMMU has a subset for each subject and none is named",
                where=self.config.path,
                remedy="set subset, such as Accounting, Math or Physics, and mix several with data.mix",
            )
        return super().load()
