"""Recipes of pairs whose pictures are archives to unpack, or are published elsewhere: MMPR, MM-RLHF, LLaVA's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.errors import DataError
from mmrl.interfaces import DatasetFacts
from mmrl_datasets.glances import Glance, look, places
from mmrl_datasets.lines import JsonRows
from mmrl_datasets.recipes.preferences import PairTable
from mmrl_datasets.rows import Rows

_ENTRY = '{"NAME": {"root": FOLDER_OF_IMAGES, "annotation": FILE.jsonl, "repeat_time": 1}, ...}'


class LlavaPreference(PairTable):
    """LLaVA-RLHF's human preferences: two answers to the last turn of a conversation, and which is better."""

    facts = DatasetFacts(
        origin="zhiqings/LLaVA-Human-Preference-10K",
        licence="CC-BY-NC-4.0",
        rows={"train": 9422},
        notes="The pictures are COCO's train2017: set image_root to their folder. The conversation's own last answer "
        "is a placeholder, and is not read.",
    )
    added = ("turns", "chosen", "rejected")

    class Config(PairTable.Config):
        path: str = "zhiqings/LLaVA-Human-Preference-10K"
        """Its name on the hub, or a local copy."""
        split: str | None = None
        """The split; may be left out if there is only one."""
        prompt: str | None = "turns"
        """The conversation up to the question."""
        images: str | None = "image"
        """Column with the name of the image."""

    def adapt(self, cells: dict[str, Any], where: str) -> dict[str, Any]:
        """Put the better output first, and leave the last answer of the conversation out.

        Raises:
            DataError: The preference is neither 1 nor 2.
        """
        preferred = cells.get("preference")
        if isinstance(preferred, bool) or preferred not in (1, 2):
            where = f"{where}, column 'preference'"
            raise DataError(f"The preference is {preferred!r:.50}", where=where, possible="1 or 2")
        outputs = [_value(cells.get(name)) for name in ("output_1", "output_2")]
        return cells | {
            "turns": _asked(cells.get("conversations")),
            "chosen": outputs[preferred - 1],
            "rejected": outputs[2 - preferred],
        }


def _value(output: Any) -> Any:
    """The text of an output, which is one or a turn ``{from, value}``."""
    return output.get("value") if isinstance(output, Mapping) else output


def _asked(talk: Any) -> Any:
    """The turns of a conversation, also of one in a list of its own, up to its last question."""
    if isinstance(talk, list) and len(talk) == 1 and isinstance(talk[0], list):
        [talk] = talk
    if isinstance(talk, list) and talk and isinstance(talk[-1], Mapping) and talk[-1].get("from") == "gpt":
        return talk[:-1]
    return talk


class UnpackedPairs(PairTable):
    """Pairs that are read from a local copy alone: the hub has their pictures as archives."""

    def open(self) -> tuple[str, Rows, tuple[Path, ...]]:
        """As a table, of a copy.

        Raises:
            DataError: As for any table; or no copy is named.
        """
        self.copy()
        return super().open()

    def copy(self) -> Path:
        """The path of the local copy.

        Raises:
            DataError: None is named.
        """
        path = self.config.path
        if path == type(self.config).model_fields["path"].default:
            raise DataError(
                f"The pictures of {path} are archives, and no unpacked copy is named",
                where=path,
                remedy="download the dataset, unpack its archives where they are, and set path to that folder",
            )
        return Path(path).expanduser()


class MMRLHF(UnpackedPairs):
    """MM-RLHF: pairs of answers to questions on pictures and videos, ranked by people. Rows of videos are bad rows."""

    facts = DatasetFacts(
        origin="yifanzhang114/MM-RLHF",
        notes="path is the unpacked folder, with dpo_pairs.jsonl. A part of its rows has videos, which are refused by "
        "name: filter the file, or set data.max_bad_rows above their share.",
    )

    class Config(PairTable.Config):
        path: str = "yifanzhang114/MM-RLHF"
        """The folder of the unpacked copy, or its dpo_pairs.jsonl."""
        split: str | None = "dpo_pairs"
        """The file of the pairs."""
        prompt: str | None = "prompt"
        """Column with the question."""
        images: str | None = "image"
        """Column with the image."""


class MMPR(UnpackedPairs):
    """MMPR: pairs of answers to questions on pictures, in many files that meta.json names with their folders."""

    facts = DatasetFacts(
        origin="OpenGVLab/MMPR-v1.2",
        licence="MIT",
        notes="path is the unpacked folder, or a meta.json of your own. repeat_time below 1 takes that share of a "
        "file's rows, evenly spread, above 1 all of them so many times. The column subset has a row's file.",
    )

    class Config(PairTable.Config):
        path: str = "OpenGVLab/MMPR-v1.2"
        """The folder of the unpacked copy, or its meta.json."""
        split: str | None = None
        """It has none."""
        subset: str | None = None
        """A name in meta.json; null is all of them."""
        prompt: str | None = "question"
        """Column with the question."""
        images: str | None = "image"
        """Column with the image, or with several."""

    def open(self) -> tuple[str, Rows, tuple[Path, ...]]:
        """The rows of all files; images are below the folder of meta.json, or the one that this lies in.

        Raises:
            DataError: There is no meta.json, or it names files that are not there.
        """
        copy, root = self.copy(), self.config.image_root
        meta = copy / "meta.json" if copy.is_dir() else copy
        own = (meta.parent, meta.resolve().parent.parent)
        entries = _entries(meta, self.config.subset)
        rows = _Joined([_part(name, entry, meta, own) for name, entry in entries.items()])
        if not len(rows):
            raise DataError("The files have no rows that are taken", where=str(meta), possible="repeat_time above 0")
        return "train", rows, own if root is None else (Path(root).expanduser(),)


def _entries(meta: Path, wanted: str | None) -> dict[str, Mapping[str, Any]]:
    """The entries of a meta.json by name.

    Args:
        wanted: The name of the only one; None for all.
    """
    try:
        read = json.loads(meta.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        what = getattr(error, "strerror", None) or f"no JSON: {error}"
        remedy = "set path to the folder with meta.json, or to that file"
        raise DataError(f"meta.json cannot be read: {what}", where=str(meta), remedy=remedy) from error
    if not isinstance(read, dict) or not read or not all(isinstance(each, dict) for each in read.values()):
        raise DataError("This is no list of files", where=str(meta), possible=_ENTRY)
    if wanted is None:
        return read
    if wanted not in read:
        raise DataError(f"There is no subset {wanted!r}", where=str(meta), possible=", ".join(read)[:1000])
    return {wanted: read[wanted]}


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one file that are taken.

    Attributes:
        root: The folder of its images, as the paths of images begin.
        places: Rows of the file.
    """

    name: str
    root: str
    rows: JsonRows
    places: Sequence[int]


def _part(name: str, entry: Mapping[str, Any], meta: Path, folders: Sequence[Path]) -> _Part:
    where, named = f"{meta}, {name}", entry.get("annotation")
    root, repeat = entry.get("root", ""), entry.get("repeat_time", 1)
    if not isinstance(named, str) or not isinstance(root, str):
        raise DataError("annotation and root are no paths", where=where, possible=_ENTRY)
    if isinstance(repeat, bool) or not isinstance(repeat, int | float) or not 0 <= repeat <= 1000:
        raise DataError(f"repeat_time is {repeat!r:.50}", where=where, possible="a number from 0 to 1000")
    file = next((found for folder in folders if (found := folder / named).is_file()), None)
    if file is None:
        seen = ", ".join(map(str, folders))
        raise DataError(f"There is no file {named}", where=where, possible=f"paths from {seen}", remedy="unpack it")
    rows = JsonRows([file])
    return _Part(name, root, rows, _taken(len(rows), repeat))


def _taken(count: int, repeat: float) -> Sequence[int]:
    """The rows of a file that are taken: a share of them, evenly spread, or all of them so many times."""
    if repeat >= 1:
        return list(range(count)) * int(repeat)
    wanted = int(count * repeat)
    return [count * place // wanted for place in range(wanted)]


class _Joined:
    """The rows of several files one after the other, their images' paths with the folder of each, and ``subset``."""

    image_columns: tuple[str, ...] = ()

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts
        self._places = [(part, place) for part in parts for place in part.places]
        names = dict.fromkeys(name for part in parts for name in part.rows.columns)
        self.columns = (*names, *(["subset"] if "subset" not in names else []))

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> dict[str, Any]:
        part, place = self._places[index]
        cells = dict.fromkeys(self.columns) | {"subset": part.name} | part.rows.read(place)
        return cells | {"image": _below(part.root, cells.get("image"))}

    def glance(self, columns: Sequence[str]) -> Glance:
        return look(self.read, places(len(self)), columns)

    def fingerprint(self) -> str:
        return repr([(part.name, part.root, len(part.places), part.rows.fingerprint()) for part in self._parts])


def _below(root: str, image: Any) -> Any:
    """The path of an image, or of several, from its folder on; anything else as it is."""
    if isinstance(image, list):
        return [_below(root, each) for each in image]
    return str(Path(root) / image) if isinstance(image, str) and image else image
