"""``check_dataset``: the rules that every dataset loader keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from mmrl.config.data import DataConfig
from mmrl.data.images import ImageGrid, normalised_size
from mmrl.errors import plugin_errors
from mmrl.interfaces import DatasetLoader, SampledRow
from mmrl.plugin_host import registry
from mmrl.testing.rules import broken
from mmrl.types import IMAGE_PLACEHOLDER, Candidate, Message, Prompt, RawImage

MAX_ROWS = 1000
"""Rows looked at, evenly spread over a longer dataset."""
_GRID_FACTOR = 28


def check_dataset(
    loader: str | type[DatasetLoader] | DatasetLoader, *, options: Mapping[str, Any] | None = None
) -> None:
    """Raise at the first rule of dataset loaders that this one breaks.

    The rules: ``load`` gives a sequence with ``len`` and ``[i]``, at least one row, and IndexError after the last;
    rows are Prompts whose fields have the types that ``Prompt`` says (tuples, not lists); there are messages, with as
    many ``<image>`` as images; images are bytes with a header that can be read; candidates are texts with a finite
    score or none, and without images of their own; ids are texts, unique, and the same when loaded again; a
    fingerprint is a text; rows as they were sampled are SampledRows. A thousand rows are looked at, evenly spread over
    a longer dataset.

    Args:
        loader: A registered name, a class, or a loader.
        options: The loader's options, if it is given by name or class.

    Raises:
        PluginError: A rule is broken, or the loader does not fit its interface.
        ConfigError: The options do not fit.
        DataError: The loader refuses the data, or an image's header cannot be read.
    """
    made = registry.given("dataset", loader, options)
    first, again = _load(made), _load(made)
    if len(first) != len(again):
        remedy = "let load give the same rows every time"
        raise broken(made, "loading again gives as many rows", f"{len(first)}, then {len(again)}", remedy)
    with plugin_errors(made, "fingerprint"):
        fingerprint: object = made.fingerprint()
    if not isinstance(fingerprint, str):
        remedy = "return a text, or leave the method out"
        raise broken(made, "a fingerprint is a text", f"it is {fingerprint!r:.80}", remedy)
    with plugin_errors(made, "sampled"):
        sampled: list[object] = list(made.sampled())
    if others := [each for each in sampled if not isinstance(each, SampledRow)]:
        remedy = "build mmrl.SampledRow(prompt, rollout, by)"
        raise broken(made, "rows as they were sampled are SampledRows", f"{others[0]!r:.80}", remedy)
    places: dict[str, int] = {}
    for row in np.unique(np.linspace(0, len(first) - 1, min(len(first), MAX_ROWS)).astype(int)).tolist():
        with plugin_errors(made, "load"):
            prompt, twin = first[row], again[row]
        _check_prompt(made, row, prompt)
        if prompt.id != getattr(twin, "id", None):
            remedy = "make ids of lasting values, such as the split and the row"
            found = f"row {row}: {prompt.id!r}, then {twin.id!r}"
            raise broken(made, "ids are the same when loaded again", found, remedy)
        if prompt.id in places:
            found = f"rows {places[prompt.id]} and {row} are both {prompt.id!r}"
            raise broken(made, "ids are unique", found, "add the row's number to the id")
        places[prompt.id] = row


def _load(loader: DatasetLoader) -> Sequence[Prompt]:
    with plugin_errors(loader, "load"):
        rows = loader.load()
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        remedy = "return a list, or a class with __len__ and __getitem__ that reads rows when they are asked for"
        raise broken(loader, "load gives a sequence with len and [i]", f"it gave {type(rows).__name__}", remedy)
    with plugin_errors(loader, "load"):
        length = len(rows)
    if not length:
        raise broken(loader, "a dataset has rows", "len is 0", "raise DataError with the reason why there are none")
    try:
        with plugin_errors(loader, "load"):
            beyond = _beyond(rows)
    except Exception as error:
        remedy = "raise IndexError for a row that is not there"
        raise broken(loader, "the row after the last is an IndexError", str(error), remedy) from error
    if beyond:
        remedy = "raise IndexError for a row that is not there: loops over rows end by it"
        raise broken(loader, "the row after the last is an IndexError", f"row {length} of {length} exists", remedy)
    return rows


def _beyond(rows: Sequence[Prompt]) -> bool:
    """True if there is a row after the last."""
    try:
        rows[len(rows)]
    except IndexError:
        return False
    return True


def _check_prompt(loader: DatasetLoader, row: int, prompt: Any) -> None:
    def demand(holds: bool, rule: str, found: object, remedy: str) -> None:
        if not holds:
            raise broken(loader, rule, f"row {row}: {found!r}"[:300], remedy)

    demand(isinstance(prompt, Prompt), "rows are Prompts", prompt, "build mmrl.types.Prompt(...)")
    demand(isinstance(prompt.id, str) and prompt.id != "", "ids are texts", prompt.id, "such as 'train/17'")
    fields: tuple[tuple[str, type], ...] = (("messages", Message), ("images", RawImage), ("candidates", Candidate))
    for name, kind in fields:
        values = getattr(prompt, name)
        fits = isinstance(values, tuple) and all(isinstance(value, kind) for value in values)
        demand(fits, f"{name} is a tuple of {kind.__name__}", values, f"use tuple(...) and mmrl.types.{kind.__name__}")
    columns = prompt.columns
    named = isinstance(columns, Mapping) and all(isinstance(name, str) for name in columns)
    demand(named, "columns is a mapping from names", columns, "use a dict with text keys")
    told = prompt.demonstration is None or isinstance(prompt.demonstration, str)
    demand(told, "demonstration is text or None", prompt.demonstration, "leave it out where there is none")
    for each in prompt.candidates:
        said = isinstance(each.text, str) and each.text.strip() != ""
        demand(said, "candidates are texts that say something", each, "raise DataError for a row with an empty one")
        graded = each.score is None or (isinstance(each.score, int | float) and isfinite(each.score))
        demand(graded, "scores are finite numbers, or None", each, "use float(...), or None where it is not known")
        remedy = "put the images into the prompt: candidates are compared under one set of images"
        demand(not each.images, "candidates have no images of their own", each, remedy)
    texts = [part for message in prompt.messages for part in (message.role, message.content)]
    demand(all(isinstance(text, str) for text in texts), "roles and contents are texts", texts, "use str(...)")
    said = any(message.content.strip() for message in prompt.messages)
    demand(said, "there is a message with content", prompt.messages, "raise DataError for a row without a question")
    places = sum(message.content.count(IMAGE_PLACEHOLDER) for message in prompt.messages)
    counts = f"{places} placeholders, {len(prompt.images)} images"
    remedy = f"write one {IMAGE_PLACEHOLDER} for each image where it belongs in the text"
    fits = places == len(prompt.images) or not prompt.images  # without images they are text
    demand(fits, f"each image has its {IMAGE_PLACEHOLDER}", counts, remedy)
    grid = ImageGrid(_GRID_FACTOR, *(DataConfig.model_fields[name].default for name in ("min_pixels", "max_pixels")))
    for image in prompt.images:
        labelled = isinstance(image.data, bytes) and isinstance(image.label, str) and image.label != ""
        demand(labelled, "images are bytes with a label", image, "RawImage(data, 'file, row, column')")
        normalised_size(image, grid)
