"""The options of the loader ``table``, which recipes have too."""

from __future__ import annotations

from pydantic import Field

from mmrl.interfaces import PluginConfig
from mmrl_datasets.placeholders import Unused


class TableOptions(PluginConfig):
    """A table's place, the column of each role, and how rows become prompts."""

    path: str
    """A parquet, json, jsonl, csv or arrow file, a folder of such, one that datasets saved, or a hub id."""
    split: str | None = None
    """The split; may be left out if there is only one."""
    subset: str | None = None
    """Configuration of a hub dataset."""
    revision: str | None = Field(default=None, min_length=1)
    """Branch, tag or commit of a hub dataset; by default its default branch."""
    limit: int | None = Field(default=None, ge=1)
    """Read only the first rows."""
    prompt: str | None = Field(default=None, min_length=1)
    """Column with the question or the conversation; null finds it by its name."""
    document: str | None = Field(default=None, min_length=1)
    """Column with texts that are learned as a whole, images in between; rows then have no question and no answer."""
    images: str | None = None
    """Column with the images, or several as image_1..n; null finds it, "" takes none."""
    answer: str | None = None
    """Column with the answer, or a field as in reward_model.ground_truth; null finds it, "" takes none."""
    demonstration: str | None = None
    """Column with a completion to imitate; null finds it, "" takes none."""
    system: str | None = None
    """Column with the system prompt; null finds it, "" takes none."""
    choices: str | None = None
    """Column with the answers to choose from; null finds it, "" takes none."""
    source: str | None = None
    """Column that says which rewards score the row; null finds it, "" takes none."""
    category: str | None = Field(default=None, min_length=1)
    """Column with the kind of question, by which an evaluation tells its accuracy apart too; null takes none."""
    chosen: str | None = None
    """Column with the better answer, or several; null finds it, "" takes none."""
    rejected: str | None = None
    """Column with the worse answer, or several; null finds it, "" takes none."""
    margin: str | None = None
    """Column with the score of the chosen answer, where the rejected one has 0; null finds it, "" takes none."""
    candidates: str | None = None
    """Column with lists of answers to compare; null finds it, "" takes none."""
    scores: str | None = None
    """Column with the scores of the candidates, in their order; null finds it, "" takes none."""
    desirable: str | None = None
    """Column that says whether the row's one answer is good, true or false, 1 or 0; null finds it, "" takes none."""
    image_root: str | None = Field(default=None, min_length=1)
    """Folder that relative image paths start from and, by their text, stay below; null is the dataset's own."""
    list_choices: bool = True
    """Write the choices after the question as (A), (B), unless it lists them already."""
    unused_images: Unused = "fail"
    """Treatment of images that a text with <image 1>, <image 2> does not name."""
    prompt_template: str | None = None
    """Jinja text, or a path to a .jinja or .j2 file, for the last user turn; sees prompt and row."""
