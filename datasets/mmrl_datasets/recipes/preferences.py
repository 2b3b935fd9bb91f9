"""Recipes of answers to compare: pairs and graded sets to learn from, and two benchmarks of rewards to evaluate on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mmrl.errors import DataError
from mmrl.interfaces import DatasetFacts
from mmrl.types import Prompt
from mmrl_datasets.table import Table

_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
_GROUPS = {
    "mathverse": "reasoning", "mmmu": "reasoning", "hallucination": "hallucination", "rlaif": "hallucination",
    "rlhf": "hallucination", "wildvision": "general",
}  # fmt: skip
"""The published category of VL-RewardBench's rows, by how their ids begin; all others are VLFeedback's: general."""
_ASPECTS = ("Helpfulness", "Visual Faithfulness", "Ethical Considerations")


class PairTable(Table):
    """Pairs of answers in columns called chosen and rejected."""

    class Config(Table.Config):
        split: str | None = "train"
        """The split to read."""
        answer: str | None = ""
        """Column with a reference answer; "" takes none."""
        demonstration: str | None = ""
        """Column with a completion to imitate; "" takes none."""
        chosen: str | None = "chosen"
        """Column with the better answer."""
        rejected: str | None = "rejected"
        """Column with the worse answer."""


class RlaifV(PairTable):
    """RLAIF-V: pairs of answers to questions on pictures, ranked by open models."""

    facts = DatasetFacts(
        origin="openbmb/RLAIF-V-Dataset",
        licence="CC-BY-NC-4.0",
        notes="About 83,000 pairs; an earlier revision has 44,757.",
    )

    class Config(PairTable.Config):
        path: str = "openbmb/RLAIF-V-Dataset"
        """Its name on the hub, or a local copy."""
        prompt: str | None = "question"
        """Column with the question."""
        images: str | None = "image"
        """Column with the image."""


class RlhfV(PairTable):
    """RLHF-V: answers on pictures, and the same answers after people corrected what is not in the picture."""

    facts = DatasetFacts(
        origin="openbmb/RLHF-V-Dataset",
        licence="CC-BY-NC-4.0",
        rows={"train": 5733},
        notes="Question and answers stand in the column text, as JSON.",
    )
    added: ClassVar[tuple[str, ...]] = ("question", "chosen", "rejected")

    class Config(PairTable.Config):
        path: str = "openbmb/RLHF-V-Dataset"
        """Its name on the hub, or a local copy."""
        prompt: str | None = "question"
        """Field of the text with the question."""
        images: str | None = "image"
        """Column with the image."""

    def adapt(self, cells: dict[str, Any], where: str) -> dict[str, Any]:
        """Take question and answers out of the text.

        Raises:
            DataError: The text is no JSON object with all three.
        """
        try:
            said = json.loads(cells.get("text") or "")
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"The text is no JSON: {error}", where=f"{where}, column 'text'") from error
        if not isinstance(said, dict) or (lacking := [name for name in self.added if name not in said]):
            what = "is no JSON object" if not isinstance(said, dict) else f"has no {', '.join(lacking)}"
            raise DataError(f"The text {what}", where=f"{where}, column 'text'", possible=", ".join(self.added))
        return cells | {name: said[name] for name in self.added}


class RlhfVShareGPT(PairTable):
    """RLHF-V as LLaMA-Factory has it: a conversation, and answers as {from, value}."""

    facts = DatasetFacts(
        origin="llamafactory/RLHF-V",
        licence="CC-BY-NC-4.0",
        rows={"train": 5733},
        notes="The pairs of openbmb/RLHF-V-Dataset in another layout.",
    )

    class Config(PairTable.Config):
        path: str = "llamafactory/RLHF-V"
        """Its name on the hub, or a local copy."""
        prompt: str | None = "conversations"
        """Column with the conversation."""
        images: str | None = "images"
        """Column with the images."""


class VLFeedback(Table):
    """VLFeedback: four answers to each question on a picture, graded by a model in three aspects.

    A score is the mean grade over the aspects that have one, from 1 to 5; without any it is not known. Ties are common.
    """

    facts = DatasetFacts(
        origin="MMInstruction/VLFeedback",
        rows={"train": 80258},
        notes="Grades are text, 1 to 5 or N/A. The pictures are archives beside the table: unpack them, and set "
        "image_root to their folder.",
    )

    class Config(Table.Config):
        path: str = "MMInstruction/VLFeedback"
        """Its name on the hub, or a local copy."""
        split: str | None = "train"
        """The split to read."""
        prompt: str | None = "prompt"
        """Column with the question."""
        images: str | None = "img_path"
        """Column with the path of the image."""
        answer: str | None = ""
        """Column with a reference answer; "" takes none."""
        candidates: str | None = "completions.response"
        """Field with the answers."""
        scores: str | None = "completions.annotations"
        """Field with their grades."""

    def adapt(self, cells: dict[str, Any], where: str) -> dict[str, Any]:
        """Put the mean grade of each answer at the place of its annotations.

        Raises:
            DataError: Annotations are no grades by aspect.
        """
        given = cells.get("completions")
        if isinstance(given, Mapping):  # a column of each field, or a list of structs: writers differ
            held = given.get("annotations")
            graded: Any = dict(given) | {"annotations": [_mean_grade(each, where) for each in held or ()]}
        elif isinstance(given, list) and all(isinstance(each, Mapping) for each in given):
            graded = [dict(each) | {"annotations": _mean_grade(each.get("annotations"), where)} for each in given]
        else:
            raise DataError("There are no answers with annotations", where=f"{where}, column 'completions'")
        return cells | {"completions": graded}


def _mean_grade(annotations: Any, where: str) -> float | None:
    """The mean over aspects that have a grade; None if none has."""
    grades = list[float]()
    for aspect in _ASPECTS:
        given = annotations.get(aspect) if isinstance(annotations, Mapping) else None
        if not isinstance(given, Mapping):
            raise DataError(
                f"An answer has no grade for {aspect}",
                where=f"{where}, column 'completions'",
                possible=f"{{Rating, Rationale}} for each of {', '.join(_ASPECTS)}",
            )
        rating = given.get("Rating")
        if isinstance(rating, str) and re.fullmatch(r"\s*\d+(\.\d+)?\s*", rating):
            grades.append(float(rating))
    return sum(grades) / len(grades) if grades else None


class TrlRlaifV(PairTable):
    """RLAIF-V as TRL has it: message lists with typed parts."""

    facts = DatasetFacts(
        origin="trl-lib/rlaif-v",
        notes="The pairs of openbmb/RLAIF-V-Dataset; the prompt's part {type: image} is the image's place.",
    )

    class Config(PairTable.Config):
        path: str = "trl-lib/rlaif-v"
        """Its name on the hub, or a local copy."""
        prompt: str | None = "prompt"
        """Column with the conversation."""
        images: str | None = "images"
        """Column with the images."""


class UltraFeedback(PairTable):
    """UltraFeedback, binarized: the best graded of four answers against another one, as text."""

    facts = DatasetFacts(
        origin="HuggingFaceH4/ultrafeedback_binarized",
        licence="MIT",
        rows={"train_prefs": 61135, "test_prefs": 2000},
        notes="No images. The turns that both conversations begin with are the prompt; a few pairs are equal or tied.",
    )

    class Config(PairTable.Config):
        path: str = "HuggingFaceH4/ultrafeedback_binarized"
        """Its name on the hub, or a local copy."""
        split: str | None = "train_prefs"
        """train_prefs or test_prefs."""
        prompt: str | None = "prompt"
        """Column with the question, which both conversations have too."""
        images: str | None = ""
        """Column with the images; "" takes none."""


class HHRlhf(PairTable):
    """HH-RLHF: pairs of conversations that differ in the last answer, as transcripts."""

    facts = DatasetFacts(
        origin="Anthropic/hh-rlhf",
        licence="MIT",
        rows={"train": 160800, "test": 8552},
        notes="No images. Texts may offend: they are there to learn what to avoid. Some last answers are empty: "
        "these are bad rows.",
    )

    class Config(PairTable.Config):
        path: str = "Anthropic/hh-rlhf"
        """Its name on the hub, or a local copy."""
        prompt: str | None = "chosen"
        """Column with the conversation."""
        images: str | None = ""
        """Column with the images; "" takes none."""

    def adapt(self, cells: dict[str, Any], where: str) -> dict[str, Any]:
        """Divide both transcripts into turns.

        Raises:
            DataError: One does not begin with a speaker.
        """
        return cells | {name: _turns(cells.get(name), f"{where}, column {name!r}") for name in ("chosen", "rejected")}


def _turns(transcript: Any, where: str) -> list[dict[str, str]]:
    """The messages of a transcript with ``Human:`` and ``Assistant:`` before each turn."""
    pieces = _SPEAKER.split(transcript) if isinstance(transcript, str) else []
    if len(pieces) < 3 or pieces[0].strip():
        raise DataError("This is no transcript", where=where, possible=r"\n\nHuman: ... \n\nAssistant: ...")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[who], "content": said.strip()} for who, said in zip(pieces[1::2], pieces[2::2], strict=True)]


class VLRewardBench(Table):
    """VL-RewardBench: two answers to a question on a picture, and which people prefer. For evaluation."""

    facts = DatasetFacts(
        origin="MMInstruction/VL-RewardBench",
        licence="MIT",
        rows={"test": 1247},
        notes="For evaluation. Categories are the three that its authors average over, by a row's id; query_source is "
        "a finer one. An earlier revision has 1,250 rows.",
    )
    added: ClassVar[tuple[str, ...]] = ("category",)

    class Config(Table.Config):
        path: str = "MMInstruction/VL-RewardBench"
        """Its name on the hub, or a local copy."""
        split: str | None = "test"
        """The split to read."""
        prompt: str | None = "query"
        """Column with the question."""
        images: str | None = "image"
        """Column with the image."""
        answer: str | None = ""
        """Column with a reference answer; "" takes none."""
        candidates: str | None = "response"
        """Column with the two answers."""
        scores: str | None = "human_ranking"
        """Column with their ranks, 0 for the better one."""
        category: str | None = "category"
        """reasoning, hallucination or general, as published; or a column."""

    def adapt(self, cells: dict[str, Any], where: str) -> dict[str, Any]:
        """Make scores of ranks, and tell the category.

        Raises:
            DataError: The ranks are not 0 and 1.
        """
        ranks = cells.get("human_ranking")
        if not isinstance(ranks, list) or sorted(map(repr, ranks)) != ["0", "1"]:
            where = f"{where}, column 'human_ranking'"
            raise DataError(f"The ranks are {ranks!r:.50}", where=where, possible="[0, 1] or [1, 0]")
        begins = re.split("[-_]", str(cells.get("id")), maxsplit=1)[0].lower()
        return cells | {"human_ranking": [1 - rank for rank in ranks], "category": _GROUPS.get(begins, "general")}


class MultimodalRewardBench(Table):
    """Multimodal RewardBench: two answers to a question on a picture, and which is better. For evaluation."""

    facts = DatasetFacts(
        origin="facebookresearch/multimodal_rewardbench",
        licence="CC-BY-NC",
        notes="For evaluation. On GitHub and not on a hub: path is data/all_data.json of a clone, once its script has "
        "made it. Categories are those of its authors, safety and reasoning in two parts each; their Overall is "
        "eval/accuracy, the mean over rows.",
    )
    added: ClassVar[tuple[str, ...]] = ("chosen", "rejected", "category")

    class Config(Table.Config):
        path: str = "facebookresearch/multimodal_rewardbench"
        """The local JSON file, which is on GitHub."""
        split: str | None = None
        """The split; may be left out if there is only one."""
        prompt: str | None = "Text"
        """Column with the question."""
        images: str | None = "Image"
        """Column with the image."""
        answer: str | None = ""
        """Column with a reference answer; "" takes none."""
        chosen: str | None = "chosen"
        """The output that is better."""
        rejected: str | None = "rejected"
        """The other output."""
        category: str | None = "category"
        """The category as published; or a column."""

    def load(self) -> Sequence[Prompt]:
        """The rows, lazily.

        Raises:
            DataError: As for any table; or no local copy is named.
        """
        if self.config.path == type(self.config).model_fields["path"].default:
            raise DataError(
                "Multimodal RewardBench is on no hub, and no copy is named",
                where=self.config.path,
                remedy="download its repository from GitHub, make its data, and set path to the JSON file",
            )
        return super().load()

    def adapt(self, cells: dict[str, Any], where: str) -> dict[str, Any]:
        """Put the better output first.

        Raises:
            DataError: ``Better`` names no output.
        """
        outputs = ("Output1", "Output2")
        better = cells.get("Better")
        if better not in outputs:
            where = f"{where}, column 'Better'"
            raise DataError(f"The better output is {better!r:.50}", where=where, possible=" or ".join(outputs))
        [worse] = (name for name in outputs if name != better)
        category = _with_part(cells.get("Category"), str(cells.get("ID")).lower())
        return cells | {"chosen": cells.get(better), "rejected": cells.get(worse), "category": category}


def _with_part(category: Any, name: str) -> Any:
    """The category, with the part that its authors tell apart by the beginning of ids."""
    match category:
        case "safety":
            return "safety/bias" if name.startswith("pairs") else "safety/toxicity"
        case "reasoning":
            return "reasoning/math" if name.startswith("math") else "reasoning/coding"
    return category
