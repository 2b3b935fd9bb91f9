"""A run as one HTML file: the page with its documents and thumbnails inside, which needs no server and no network.

The file holds what fits: the run's history first, then tables of some steps, then their groups in turn, so that each
step shows some. What it leaves out is told in it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError, DataError
from mmrl.system.version import __version__
from mmrl.viewer.documents import Document, NotThere
from mmrl.viewer.folder import ViewedRun
from mmrl.viewer.pages import Pages, page_file, page_script

MAX_MB = 15.0
"""Millions of bytes of a report, by default."""
_BETWEEN = 6
"""Steps between the first and the last one, by default."""
_SIDE = 256
"""Pixels of a thumbnail's longer side."""
_SMALL = 6000
"""Bytes of a PNG file that is its own thumbnail."""
_SHRUNK = "data:image/jpeg;base64,"
_MOST_PIXELS = 2**26
_TITLE = b"<title>mmrl</title>"
_HISTORY = ("runs", "run/0", "run/0/metrics", "run/0/events", "run/0/evaluations", "run/0/ledger")
"""The most wanted first."""


@dataclass
class PageReport:
    """The content of a report, as far as it is chosen.

    Attributes:
        room: Bytes that are left.
        left_out: Sentences, for the page and the command line.
    """

    room: int
    documents: dict[str, Document] = field(default_factory=dict)
    media: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, resource: str, document: Document, media: dict[str, str] | None = None) -> bool:
        """Take in a document with its thumbnails if there is room; False if there is none."""
        new = {name: uri for name, uri in (media or {}).items() if name not in self.media}
        size = len(_escaped({resource: document})) + sum(len(name) + len(uri) + 8 for name, uri in new.items())
        if size > self.room:
            return False
        self.room -= size
        self.documents[resource] = document
        self.media |= new
        return True

    def html(self) -> str:
        """The file."""
        data = {"documents": self.documents, "media": self.media, "left_out": self.left_out}
        made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        return _html(_escaped({**data, "made": f"{made} by mmrl {__version__}"}))


def make_report(path: Path, steps: Sequence[int] | None = None, max_mb: float = MAX_MB) -> PageReport:
    """The report of a run.

    Args:
        steps: Steps that it shows; None chooses the first, the last and some between.

    Raises:
        ConfigError: There is no run, or no room even for its history.
        DataError: One of the steps was not recorded.
    """
    pages = Pages([path], is_sent=True)
    run = pages.runs[0]
    known = list(run.files("step"))
    if missing := sorted(set(steps or ()) - set(known)):
        possible = ", ".join(map(str, known)) or "none yet"
        raise DataError(f"there are no rollouts of step {missing[0]}", where=str(path), possible=possible)
    report = PageReport(int(max_mb * 1e6) - len(_html(_escaped({"left_out": "x" * 2000}))))
    for resource in _HISTORY:
        if not report.add(resource, pages.document(resource)):
            if resource in _HISTORY[:2]:
                raise ConfigError(f"a report of {max_mb:g} MB has no room for the run", where="--max-mb")
            report.left_out.append(f"{resource.rpartition('/')[2]}: larger than the room that was left")
    shown = list(steps or spread(known))
    places = [("step", step) for step in [*shown[:1], *shown[:0:-1]]]  # the first one and the last one first
    places += [(kind, step) for kind in ("evaluation", "blank") for step in list(run.files(kind))[-1:]]
    _add_steps(report, pages, places)
    _tell_rest(report, run)
    return report


def is_report(file: Path) -> bool:
    """True if a file begins as a report does."""
    with suppress(OSError), file.open("rb") as stream:
        return _TITLE in stream.read(2000)
    return False


def spread(steps: Sequence[int]) -> list[int]:
    """The first step, the last, and some between them at equal distances."""
    count = min(len(steps), _BETWEEN + 2)
    if count < 2:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (count - 1))] for place in range(count)]


def _add_steps(report: PageReport, pages: Pages, places: Sequence[tuple[str, int]]) -> None:
    """Add the tables of steps and then their groups, one of each step in turn, until there is no room."""
    waiting: dict[str, Iterator[int]] = {}
    counts: dict[str, list[int]] = {}
    for kind, step in places:
        resource = f"run/0/{kind}/{step}"
        table = pages.document(resource)
        if not report.add(resource, table):
            report.left_out.append(f"{kind} {step}: its table is larger than the room that was left")
        elif "groups" in table:
            numbers = [each["group"] for each in table["groups"]]
            waiting[resource], counts[resource] = iter(numbers), [0, len(numbers)]
    while waiting:
        for resource in list(waiting):
            number = next(waiting[resource], None)
            if number is None or not _add_group(report, pages, f"{resource}/group/{number}"):
                del waiting[resource]
            else:
                counts[resource][0] += 1
    for resource, (held, there) in counts.items():
        if held < there:
            name = " ".join(resource.split("/")[2:])
            report.left_out.append(f"{name}: {there - held} of {there} groups, which did not fit")


def _add_group(report: PageReport, pages: Pages, resource: str) -> bool:
    try:
        document = pages.document(resource)
    except NotThere as error:  # a group whose number no address can have
        document = {"problem": str(error)}
    return report.add(resource, document, _thumbnails(pages.runs[0], document))


def _tell_rest(report: PageReport, run: ViewedRun) -> None:
    known = list(run.files("step"))
    inside = [step for step in known if f"run/0/step/{step}" in report.documents]
    if others := len(known) - len(inside):
        names = ", ".join(map(str, inside)) or "none"
        what = f"rollouts of {others} of {len(known)} recorded steps (inside: {names}); --step N chooses"
        report.left_out.append(what)
    for kind, name in (("evaluation", "evaluations"), ("blank", "evaluations with blank pictures")):
        if (count := len(run.files(kind))) > 1:
            report.left_out.append(f"answers of {count - 1} of {count} {name}: the last one is inside")
    if any(each.startswith(_SHRUNK) for each in report.media.values()):
        report.left_out.append(f"large pictures: they have at most {_SIDE} pixels a side here")


def _thumbnails(run: ViewedRun, document: Any) -> dict[str, str]:
    """A data URI for each image that a document names, by hash; those that cannot be read are missing."""
    names = dict.fromkeys(_hashes(document))
    return {name: uri for name in names if (uri := _thumbnail(run, name)) is not None}


def _hashes(value: Any) -> Iterator[str]:
    """The hash of each image in a document."""
    if isinstance(value, dict):
        if {"hash", "width", "height"} <= value.keys() and isinstance(value["hash"], str):
            yield value["hash"]
        for inner in value.values():
            yield from _hashes(inner)
    elif isinstance(value, list) and value and isinstance(value[0], dict | list):
        for inner in value:
            yield from _hashes(inner)


def _thumbnail(run: ViewedRun, name: str) -> str | None:
    from PIL import Image

    with suppress(Exception):  # Pillow's decoders raise whatever they like, of a file that may be hostile
        data = run.image(name)
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            if len(data) <= _SMALL and max(image.size) <= _SIDE:
                return f"data:image/png;base64,{base64.b64encode(data).decode()}"
            if image.width * image.height > _MOST_PIXELS:
                return None
            small = image.convert("RGB")
            small.thumbnail((_SIDE, _SIDE))
            file = io.BytesIO()
            small.save(file, "JPEG", quality=80)
        return _SHRUNK + base64.b64encode(file.getvalue()).decode()
    return None


def _escaped(value: Any) -> str:
    """JSON that may stand within a script element: ASCII, so U+2028 and U+2029 are escapes, and no ``<``."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _html(data: str) -> str:
    """The page with its style, script and data inside, and a policy that lets nothing else run or load."""
    page, style, script = page_file("viewer.html").decode(), page_file("viewer.css").decode(), page_script()
    assert "</script" not in script and "<!--" not in script and "</style" not in style
    charset = '<meta charset="utf-8">'
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    replaced = {
        charset: f'{charset}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<link rel="stylesheet" href="viewer.css">': f"<style>{style}</style>",
        "<!-- report -->": f'<script type="application/json" id="report">{data}</script>',
        '<script type="module" src="start.js"></script>': f"<script>{script}</script>",
    }
    parts = [page]
    for place, text in replaced.items():
        assert page.count(place) == 1, place
        before, after = parts.pop().split(place)
        parts += [before, text, after]
    return "".join(parts)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
