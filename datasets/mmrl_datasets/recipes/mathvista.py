"""MathVista: mathematical questions about pictures, charts and diagrams, free or with choices.

A row's source is its ``question_type``, so that each kind of question has the reward that suits it; ``facts.notes`` has
the rewards to write.
"""

from __future__ import annotations

from typing import Any

from mmrl.errors import DataError
from mmrl.interfaces import DatasetFacts
from mmrl_datasets.table import Table


class MathVista(Table):
    """MathVista: the question with its unit, the form of its answer and its choices."""

    facts = DatasetFacts(
        origin="AI4Math/MathVista",
        licence="CC-BY-SA-4.0",
        rows={"testmini": 1000, "test": 5141},
        reward=("choice", "numeric"),
        notes="rewards: [{name: choice, sources: [multi_choice], label: right}, "
        "{name: numeric, sources: [free_form], label: right}]. For evaluation. The references of "
        "test are not published, so its rows have none; of the columns, question and "
        "decoded_image are used, not query and image (a path).",
    )

    class Config(Table.Config):
        path: str = "AI4Math/MathVista"
        """Its name on the hub, or a local copy."""
        split: str | None = "testmini"
        """testmini or test."""
        prompt: str | None = "question"
        """Column with the question."""
        images: str | None = "decoded_image"
        """Column with the image."""
        answer: str | None = "answer"
        """Column with the reference answer; "" for the test split."""
        choices: str | None = "choices"
        """Column with the answers to choose from; null for free questions."""
        source: str | None = "question_type"
        """Column that says which rewards score the row: multi_choice or free_form."""

    def adapt(self, cells: dict[str, Any], where: str) -> dict[str, Any]:
        """Add the form of the answer to the question.

        Raises:
            DataError: ``precision`` is no number of decimals.
        """
        question, unit = cells.get("question"), cells.get("unit")
        if isinstance(question, str):
            said = question + (f" (Unit: {unit})" if isinstance(unit, str) and unit else "")
            form = "" if cells.get("choices") else _form(cells, where)
            cells["question"] = f"{said}\n{form}" if form else said
        return cells


def _form(cells: dict[str, Any], where: str) -> str:
    """The form of the answer to a free question."""
    kind, precision = cells.get("answer_type"), cells.get("precision")
    if kind == "integer":
        return "Answer with a whole number."
    if kind == "float" and precision is not None:
        if not isinstance(precision, (int, float)) or precision not in range(21):
            raise DataError("The precision is no number of decimals", where=f"{where}, column 'precision'")
        return f"Answer with a number that has {precision:.0f} decimal place{'s' if precision != 1 else ''}."
    return "Answer with a list of numbers, such as [1, 2, 3]." if kind == "list" else ""
