"""Recipes that only choose split and columns."""

from __future__ import annotations

from mmrl.interfaces import DatasetFacts
from mmrl_datasets.table import Table


class ProblemTable(Table):
    """A dataset whose columns are called problem, images and answer."""

    class Config(Table.Config):
        split: str | None = "train"
        """The split to read."""
        prompt: str | None = "problem"
        """Column with the question."""
        images: str | None = "images"
        """Column with the images; "" takes none."""
        answer: str | None = "answer"
        """Column with the reference answer."""


class ChartQA(Table):
    """ChartQA: questions about charts, numbers within 5 % count as right."""

    facts = DatasetFacts(
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


class ClevrCogenA(ProblemTable):
    """CLEVR CoGenT A scenes: how many things there are, as used by R1-V."""

    facts = DatasetFacts(
        origin="leonardPKU/clevr_cogen_a_train",
        reward=("count",),
        notes="References stand in <answer> tags; questions have no placeholder.",
    )

    class Config(ProblemTable.Config):
        path: str = "leonardPKU/clevr_cogen_a_train"
        """Its name on the hub, or a local copy."""
        images: str | None = "image"
        """Column with the images; "" takes none."""
        answer: str | None = "solution"
        """Column with the reference answer."""


class ClevrCount(ProblemTable):
    """CLEVR scenes: how many things there are."""

    facts = DatasetFacts(
        origin="BUAADreamer/clevr_count_70k",
        reward=("count",),
        notes="About 70,000 rows by its name; answers are digits.",
    )

    class Config(ProblemTable.Config):
        path: str = "BUAADreamer/clevr_count_70k"
        """Its name on the hub, or a local copy."""


class Geometry3K(ProblemTable):
    """Geometry3K: school geometry, a diagram each, answers in LaTeX."""

    facts = DatasetFacts(
        origin="hiyouga/geometry3k",
        rows={"train": 2101, "validation": 300, "test": 601},
        reward=("math",),
        notes="Some diagrams are transparent or have a palette.",
    )

    class Config(ProblemTable.Config):
        path: str = "hiyouga/geometry3k"
        """Its name on the hub, or a local copy."""
        split: str | None = "train"
        """train, validation or test."""


class GeoQA8K(ProblemTable):
    """GeoQA: school geometry with a diagram, in R1-V's selection."""

    facts = DatasetFacts(
        origin="leonardPKU/GEOQA_8K_R1V",
        reward=("math",),
        notes="About 8,000 rows by its name; some answers have degree signs.",
    )

    class Config(ProblemTable.Config):
        path: str = "leonardPKU/GEOQA_8K_R1V"
        """Its name on the hub, or a local copy."""


class GeoQATrain8K(ProblemTable):
    """GeoQA: school geometry with a diagram, R1-V's training rows."""

    facts = DatasetFacts(
        origin="leonardPKU/GEOQA_R1V_Train_8K",
        reward=("math",),
        notes="About 8,000 rows by its name; references stand in <answer> tags, some with degree signs.",
    )

    class Config(ProblemTable.Config):
        path: str = "leonardPKU/GEOQA_R1V_Train_8K"
        """Its name on the hub, or a local copy."""
        images: str | None = "image"
        """Column with the images; "" takes none."""
        answer: str | None = "solution"
        """Column with the reference answer."""


class JourneyBenchMultiImageVQA(ProblemTable):
    """JourneyBench: questions about two images at once."""

    facts = DatasetFacts(
        origin="hiyouga/journeybench-multi-image-vqa",
        reward=("exact",),
        notes="Two images a row.",
    )

    class Config(ProblemTable.Config):
        path: str = "hiyouga/journeybench-multi-image-vqa"
        """Its name on the hub, or a local copy."""


class Math12K(ProblemTable):
    """math12k: competition mathematics in words alone, answers in LaTeX."""

    facts = DatasetFacts(
        origin="hiyouga/math12k",
        rows={"train": 12000},
        reward=("math",),
        notes="No images: for text models, and for the text rows of a mix.",
    )

    class Config(ProblemTable.Config):
        path: str = "hiyouga/math12k"
        """Its name on the hub, or a local copy."""
        split: str | None = "train"
        """train or test."""
        images: str | None = ""
        """Column with the images; "" takes none."""


class MultimodalOpenR1(ProblemTable):
    """Multimodal Open R1: verified questions with an image and a worked solution."""

    facts = DatasetFacts(
        origin="lmms-lab/multimodal-open-r1-8k-verified",
        reward=("math",),
        notes="About 8,000 rows by its name; solutions have think and answer tags: answers and demonstrations at once.",
    )

    class Config(ProblemTable.Config):
        path: str = "lmms-lab/multimodal-open-r1-8k-verified"
        """Its name on the hub, or a local copy."""
        images: str | None = "image"
        """Column with the images; "" takes none."""
        answer: str | None = "solution"
        """Column with the reference answer."""
        demonstration: str | None = "solution"
        """Column with a completion to imitate."""


class RLMixed(ProblemTable):
    """A mix of questions with and without images."""

    facts = DatasetFacts(
        origin="hiyouga/rl-mixed-dataset",
        reward=("math",),
        notes="Text rows have an empty list of images.",
    )

    class Config(ProblemTable.Config):
        path: str = "hiyouga/rl-mixed-dataset"
        """Its name on the hub, or a local copy."""
