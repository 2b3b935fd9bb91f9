"""The documents that the page shows, by resource: the one table that the server and the report share.

A resource is a path such as ``run/0/step/12/group/3``. Its document is plain JSON: NaN and infinity are null, secrets
are redacted. Texts are as they were recorded, control characters and all: the page makes those visible, and enters
every text as text. What cannot be read is ``{"problem": a sentence}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from mmrl.errors import ConfigError, MMRLError
from mmrl.system.redaction import Redactor
from mmrl.viewer.documents import Document, NotThere
from mmrl.viewer.folder import ViewedRun, viewed_runs
from mmrl.viewer.groups import group_document
from mmrl.viewer.history import events_document, ledger_document, metrics_document, run_document
from mmrl.viewer.overview import overview_document
from mmrl.viewer.steps import evaluations_document, prompt_document, search, step_document
from mmrl.viewer.timeline import timeline_document

_NUMBER = "[0-9]{1,9}"
_SET = "[A-Za-z][A-Za-z0-9_-]*"
_STEP = rf"/(step|(?:evaluation|blank)(?:\.{_SET})?)/({_NUMBER})"
Query = Mapping[str, str]


def _search(run: ViewedRun, query: Query, kind: str, step: int) -> Document:
    return search(run, kind, step, query.get("q", ""))


def _without_query(make: Callable[..., Document]) -> Callable[..., Document]:
    return lambda run, query, *place: make(run, *place)


_DOCUMENTS: Mapping[str, Callable[..., Document]] = {
    "": _without_query(run_document),
    "/metrics": _without_query(metrics_document),
    "/timeline": _without_query(timeline_document),
    "/events": _without_query(events_document),
    "/ledger": _without_query(ledger_document),
    "/evaluations": _without_query(evaluations_document),
    f"/evaluations/({_SET})": _without_query(evaluations_document),
    "/prompt": lambda run, query: prompt_document(run, query.get("id", "")),
    _STEP: _without_query(step_document),
    f"{_STEP}/search": _search,
    f"{_STEP}/group/({_NUMBER})": _without_query(group_document),
}
"""A pattern of what follows ``run/N``, and the function of its document: it takes the run, the query, and what is in
brackets."""


def _names(paths: Sequence[Path]) -> list[str]:
    """The ends of paths, as long as it takes to tell them apart."""
    for length in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            return names
    return [str(path) for path in paths]


MODULES = (
    "text", "elements", "documents", "addresses", "charts", "lines", "tables", "runs", "bands", "curves", "members",
    "filters", "images", "step_tables", "frame", "step", "tokens", "episodes", "differences", "pair", "group",
    "prompt", "plots", "evaluations", "overview", "comparison", "timeline", "about", "home", "keys", "live", "start",
)  # fmt: skip
"""The page's modules of JavaScript, each after those that it imports. No two declare the same name."""


def page_file(name: str) -> bytes:
    """A file of the page."""
    return files("mmrl.viewer").joinpath("page", name).read_bytes()


def page_script() -> str:
    """The modules as one script, for a page that is opened from a file: such a page can import nothing."""
    modules = "\n".join(page_file(f"{name}.js").decode() for name in MODULES)
    without_imports = re.sub(r"^import [^;]*;\n+", "", modules, flags=re.MULTILINE)
    return '"use strict";\n' + re.sub(r"^export ", "", without_imports, flags=re.MULTILINE)


class Pages:
    """The documents of some runs; may be asked from several threads.

    Args:
        runs: Folders of runs and of sweeps, whose points are runs.
        is_sent: True if others get them, as in ``ViewedRun``.

    Raises:
        ConfigError: None of the folders holds a run.
    """

    def __init__(self, runs: Sequence[Path], *, is_sent: bool = False) -> None:
        self.runs = list(viewed_runs(runs, is_sent=is_sent))
        if not self.runs:
            raise ConfigError("the sweep has no runs", where=", ".join(map(str, runs)))
        for run, name in zip(self.runs, _names([run.path for run in self.runs]), strict=True):
            run.name = name
        problems = [run.problem for run in self.runs if run.problem is not None and run.point is None]
        if len(problems) == len(self.runs):
            raise ConfigError("\n".join(problems))

    def document(self, resource: str, query: Query | None = None) -> Document:
        """The document of a resource.

        Raises:
            NotThere: There is no such resource.
        """
        redactor = Redactor()
        try:
            found = redactor.plain(self._found(resource, query or {}))
        except NotThere:
            raise
        except MMRLError as error:
            found = redactor.plain({"problem": str(error)})
        except Exception as error:  # of whatever kind: files of a run may be hostile
            what = f"this part of the run cannot be understood: {type(error).__name__}: {error}"
            found = redactor.plain({"problem": what})
        if isinstance(found, dict) and isinstance(said := found.get("problem"), str):
            for run in self.runs:
                said = said.replace(str(run.path), run.shown_path)
            found["problem"] = said
        return found

    def prepare(self) -> None:
        """Import what the first table and the first tokens need, which takes a second."""
        import pyarrow.parquet  # noqa: F401
        import pydantic_core  # noqa: F401
        import tokenizers  # noqa: F401

        import mmrl.rollout.records.columns  # noqa: F401

    def run(self, number: str) -> ViewedRun:
        """The run of this number on the command line, from 0.

        Raises:
            NotThere: There is none.
        """
        if not re.fullmatch("[0-9]{1,6}", number) or int(number) >= len(self.runs):
            raise NotThere("there is no such run", possible=f"0 to {len(self.runs) - 1}")
        return self.runs[int(number)]

    def _found(self, resource: str, query: Query) -> Document:
        if resource == "runs":
            return [
                {"run": number, "name": run.name, "path": run.shown_path, "problem": run.problem}
                for number, run in enumerate(self.runs)
            ]
        if resource == "overview":
            return overview_document(self.runs)
        name, _, rest = resource.partition("/")
        number, slash, rest = rest.partition("/")
        for pattern, make in _DOCUMENTS.items():
            if name == "run" and (found := re.fullmatch(pattern, slash + rest)):
                run = self.run(number)
                with run.lock:
                    return make(run, query, *(int(each) if each.isdecimal() else each for each in found.groups()))
        raise NotThere("there is no such document")
