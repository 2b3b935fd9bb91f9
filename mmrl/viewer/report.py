"""Runs as one HTML file: the page with its documents and thumbnails inside, which needs no server and no network.

The file holds what fits: the runs' histories first, then tables of some steps of each, then their groups in turn, so
that each step shows some. What it leaves out is told in it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError, DataError
from mmrl.system.version import __version__
from mmrl.viewer.documents import Document, NotThere
from mmrl.viewer.folder import ViewedRun
from mmrl.viewer.pages import Pages, page_file, page_script
from mmrl.viewer.thinning import thinned
from mmrl.viewer.thumbnails import SHRUNK, SIDE, thumbnails

MAX_MB = 15.0
"""Millions of bytes of a report, by default."""
_BETWEEN = 6
"""Steps between the first and the last one, by default."""
_TITLE = b"<title>mmrl</title>"
_CURVES = 0.6
"""The share of the room that curves may take; those of more have fewer steps."""
_TABLES = 0.5
"""The share of what is left then that tables of several runs' steps may take: groups get the rest."""
_MOST_AHEAD, _READ_AHEAD = 8, 2**19
"""Groups of a step that are read at a time, and their bytes."""
_NAME = 100
"""Characters of a run's name in a sentence."""
_TOLD_STEPS = 20
"""Steps that are inside and named."""
_SENTENCES = 2000
"""Bytes for what is said of a run that is left out in part."""


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

    def add(self, resource: str, document: Document, media: dict[str, str] | None = None, least: int = 0) -> bool:
        """Take in a document with its thumbnails; False if there is no room, or less than ``least`` would be left."""
        new = {name: uri for name, uri in (media or {}).items() if name not in self.media}
        size = len(_escaped({resource: document})) + sum(len(name) + len(uri) + 8 for name, uri in new.items())
        if size > self.room - least:
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


def make_report(paths: Sequence[Path], steps: Sequence[int] | None = None, max_mb: float = MAX_MB) -> PageReport:
    """The report of some runs.

    Args:
        paths: Folders of runs and of sweeps.
        steps: Steps that it shows; None chooses the first, the last and some between of each run.

    Raises:
        ConfigError: There is no run, or no room even for its history.
        DataError: One of the steps was not recorded, or a sweep's record is damaged.
    """
    pages = Pages(paths, is_sent=True)
    readable = [number for number, run in enumerate(pages.runs) if run.problem is None]
    known = sorted({step for number in readable for step in pages.runs[number].files("step")})
    if missing := sorted(set(steps or ()) - set(known)):
        possible, where = ", ".join(map(str, known)) or "none yet", ", ".join(map(str, paths))
        raise DataError(f"there are no rollouts of step {missing[0]}", where=where, possible=possible)
    sentences = "x" * _SENTENCES * len(pages.runs)
    report = PageReport(int(max_mb * 1e6) - len(_html(_escaped({"left_out": sentences}))))
    held = _add_histories(report, pages, readable, max_mb)
    each = [_places(pages.runs[number], number, steps) for number in held]
    waves = (place for wave in zip_longest(*each) for place in wave if place is not None)
    counts = _add_steps(report, pages, list(waves), is_of_several=len(pages.runs) > 1)
    _tell_rest(report, pages, held, counts)
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


def _add_histories(report: PageReport, pages: Pages, readable: Sequence[int], max_mb: float) -> list[int]:
    """Add the list of runs, and of each its facts, curves, events, evaluations and ledger; returns those that fit."""
    first = ["runs", "overview"] if len(pages.runs) > 1 else ["runs"]
    has_list = all(report.add(resource, pages.document(resource)) for resource in first)
    held = [number for number in readable if report.add(f"run/{number}", pages.document(f"run/{number}"))]
    if not has_list or not held:
        raise ConfigError(f"a report of {max_mb:g} MB has no room for the run", where="--max-mb")
    if others := len(readable) - len(held):
        report.left_out.append(f"{others} of {len(readable)} runs, which did not fit; --max-mb makes room")
    curves = {f"run/{number}/metrics": pages.document(f"run/{number}/metrics") for number in held}
    curves, every = thinned(curves, int(report.room * (_CURVES if len(pages.runs) > 1 else 1)))
    if every > 1:
        report.left_out.append(f"curves: one step of {every}, the last one, and those of rare metrics are inside")
    for name in ("metrics", "timeline", "events", "evaluations", "ledger"):
        resources = [f"run/{number}/{name}" for number in held]
        if name == "evaluations":
            resources += [f"run/{number}/{name}/{each}" for number in held for each in pages.runs[number].sets]
        documents = ((each, curves[each] if each in curves else pages.document(each)) for each in resources)
        if missing := [resource for resource, document in documents if not report.add(resource, document)]:
            of = f" of {len(missing)} of {len(held)} runs" if len(pages.runs) > 1 else ""
            report.left_out.append(f"{name}{of}: larger than the room that was left")
    return held


def _places(run: ViewedRun, number: int, steps: Sequence[int] | None) -> list[str]:
    """The tables of a run that a report shows, the most wanted first."""
    known = list(run.files("step"))
    shown = spread(known) if steps is None else [step for step in steps if step in known]
    places = [("step", step) for step in [*shown[:1], *shown[:0:-1]]]  # the first one and the last one first
    places += [(kind, step) for kind in run.kinds[1:] for step in list(run.files(kind))[-1:]]
    return [f"run/{number}/{kind}/{step}" for kind, step in places]


def _add_steps(report: PageReport, pages: Pages, places: Sequence[str], *, is_of_several: bool) -> dict[str, list[int]]:
    """Add the tables of steps and then their groups, one of each step in turn, until there is no room.

    Returns:
        The numbers of groups that are inside and that there are, for each table that is inside.
    """
    waiting: dict[str, Iterator[tuple[str, Document]]] = {}
    counts: dict[str, list[int]] = {}
    kept = int(report.room * (1 - _TABLES)) if is_of_several else 0
    for place in places:
        table = pages.document(place)
        if not report.add(place, table, None, kept):
            if is_of_several:  # each run's first tables have come first; reading all the others would take minutes
                break
            kind, step = place.split("/")[2:]
            report.left_out.append(f"{kind} {step}: its table is larger than the room that was left")
        elif "groups" in table:
            numbers = [each["group"] for each in table["groups"]]
            waiting[place], counts[place] = _group_documents(pages, place, numbers), [0, len(numbers)]
    while waiting:
        for place in list(waiting):
            found = next(waiting[place], None)
            if found is None or not report.add(*found, thumbnails(pages.run(place.split("/")[1]), found[1])):
                del waiting[place]
            else:
                counts[place][0] += 1
    return counts


def _group_documents(pages: Pages, place: str, numbers: Sequence[int]) -> Iterator[tuple[str, Document]]:
    """The document of each group of a step, with its resource, some read at a time: they lie beside each other."""
    found: list[tuple[str, Document]] = []
    for count, number in enumerate(numbers, start=1):
        resource = f"{place}/group/{number}"
        try:
            document = pages.document(resource)
        except NotThere as error:  # a group whose number no address can have
            document = {"problem": str(error)}
        found.append((resource, document))
        if len(found) * len(json.dumps(document)) > _READ_AHEAD or len(found) == _MOST_AHEAD or count == len(numbers):
            yield from found
            found = []


def _tell_rest(report: PageReport, pages: Pages, held: Sequence[int], counts: Mapping[str, Sequence[int]]) -> None:
    """Tell the things that are not inside: a sentence for each, or one for each of several runs."""
    for number, run in enumerate(pages.runs):
        groups = {place: of for place, of in counts.items() if place.startswith(f"run/{number}/")}
        if len(pages.runs) == 1:
            report.left_out += [*_lacking_groups(groups), *_rest_of(report, run, number)]
        elif run.problem is not None:
            report.left_out.append(f"{run.name[-_NAME:]}: {run.problem}".replace(str(run.path), run.shown_path))
        elif number in held:
            inside, there = (sum(of[place] for of in groups.values()) for place in (0, 1))
            some = [f"{there - inside} of {there} groups of the tables inside"] if inside < there else []
            if found := [*_rest_of(report, run, number), *some]:
                report.left_out.append(f"{run.name[-_NAME:]}: {'; '.join(found)}")
    if any(each.startswith(SHRUNK) for each in report.media.values()):
        report.left_out.append(f"large pictures: they have at most {SIDE} pixels a side here")


def _lacking_groups(counts: Mapping[str, Sequence[int]]) -> Iterator[str]:
    for place, (held, there) in counts.items():
        if held < there:
            yield f"{' '.join(place.split('/')[2:])}: {there - held} of {there} groups, which did not fit"


def _rest_of(report: PageReport, run: ViewedRun, number: int) -> Iterator[str]:
    yield from _unreadable(report, number)
    known = list(run.files("step"))
    inside = [step for step in known if "groups" in report.documents.get(f"run/{number}/step/{step}", ())]
    if others := len(known) - len(inside):
        names = ", ".join(map(str, inside[:_TOLD_STEPS])) or "none"
        names += f" and {len(inside) - _TOLD_STEPS} more" if len(inside) > _TOLD_STEPS else ""
        yield f"rollouts of {others} of {len(known)} recorded steps (inside: {names}); --step N chooses"
    for kind in run.kinds[1:]:
        word, _, of_set = kind.partition(".")
        name = {"evaluation": "evaluations", "blank": "evaluations with blank pictures"}[word]
        name, files = f"{name} of {of_set}" if of_set else name, list(run.files(kind))
        if files and f"run/{number}/{kind}/{files[-1]}" not in report.documents:
            yield f"answers of all {len(files)} {name}"
        elif len(files) > 1:
            yield f"answers of {len(files) - 1} of {len(files)} {name}: the last one is inside"


def _unreadable(report: PageReport, number: int) -> Iterator[str]:
    """A sentence for each table, and for each table's groups, that have a problem in place of their content."""
    problems = dict[str, str]()
    for resource, document in report.documents.items():
        place = re.fullmatch(rf"run/{number}/(\w+)/(\d+)(/group)?.*", resource)
        if place and "problem" in document:
            reason, _, _ = str(document["problem"]).partition("\n")
            problems.setdefault(f"{place[1]} {place[2]}{' has groups that cannot be read' if place[3] else ''}", reason)
    yield from (f"{name}: {reason}" for name, reason in problems.items())


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
