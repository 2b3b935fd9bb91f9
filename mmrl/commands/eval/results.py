"""Results of an evaluation, for programs and for people."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mmrl.commands.eval.best_of import BestOf
from mmrl.commands.eval.categories import Categories
from mmrl.commands.eval.episodes import REASONS, SECTION
from mmrl.commands.eval.estimates import Estimates
from mmrl.errors import plural
from mmrl.ops.categories import MACRO
from mmrl.ops.estimation import Estimate
from mmrl.runs.checkpoints import Checkpoint
from mmrl.system.table import table

SCHEMA = 1
"""Version of ``Results.data``; raised when a key changes its meaning or goes."""
_AT = re.compile(r"eval/(?P<name>.+)_(?P<what>pass|majority)@(?P<k>\d+)")
_SUM = "eval/reward_mean"
_LENGTHS = {"truncated": "eval/length/truncated_fraction", "length": "eval/length/completion_mean"}


@dataclass(frozen=True, slots=True)
class Ablation:
    """The same prompts with their images and with blank ones.

    Attributes:
        prompts: Prompts with images.
        difference: ``pictures - blank``, paired.
    """

    prompts: int
    pictures: Estimates
    blank: Estimates
    difference: Estimates


@dataclass(frozen=True, slots=True)
class Results:
    """An evaluation's numbers.

    Attributes:
        model: A folder, or a name on the hub.
        checkpoint: The model's checkpoint.
        settings: How completions were sampled.
        counts: Prompts, completions, and those that could not be used or scored.
        metrics: All prompts' metrics, with the names that a run logs.
        sources: Prompts and metrics of each source.
        categories: Prompts and accuracy of each category; none if no prompt has one.
        best_of: Curves of the best of n completions.
    """

    model: str
    checkpoint: Checkpoint | None
    settings: Mapping[str, Any]
    counts: Mapping[str, int]
    metrics: Estimates
    sources: Mapping[str, tuple[int, Estimates]]
    ablation: Ablation | None
    best_of: BestOf | None = None
    categories: Categories = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """Everything, for a program; ``low`` and ``high`` are the ends of 95 % intervals, null where there is none."""
        checkpoint, ablation = self.checkpoint, self.ablation
        return {
            "schema": SCHEMA,
            "model": self.model,
            "checkpoint": None if checkpoint is None else {"path": str(checkpoint.path), "step": checkpoint.step},
            "settings": dict(self.settings),
            "counts": dict(self.counts),
            "metrics": _plain(self.metrics),
            "sources": {
                name: {"prompts": prompts, "metrics": _plain(metrics)}
                for name, (prompts, metrics) in self.sources.items()
            },
            "blank_images": None
            if ablation is None
            else {
                "prompts": ablation.prompts,
                "pictures": _plain(ablation.pictures),
                "blank": _plain(ablation.blank),
                "difference": _plain(ablation.difference),
            },
            **({"categories": _plain_categories(self.categories)} if self.categories else {}),
            **({} if self.best_of is None else {"best_of": self.best_of.data()}),
        }

    def lines(self) -> Iterator[str]:
        """The same for a person."""
        yield from self._about()
        rewards = _rewards(self.metrics)
        yield ""
        yield from table(self._rows(rewards), "<>")
        if rows := self._episode_rows():
            yield ""
            yield from table(rows, "<>")
        yield from self._category_lines()
        for title, what in (("pass@k", "pass"), ("majority@k", "majority")):
            if rows := _at_k(self.metrics, title, what):
                yield ""
                yield from table(rows, "<>")
        if self.best_of is not None:
            yield ""
            yield from table(_best_rows(self.best_of), "<>")
        if self.ablation is not None:
            yield ""
            yield from table(_ablation_rows(self.ablation, _rewards(self.ablation.pictures)), "<>")
        yield ""
        yield "± half of the 95 % interval, which counts prompts, not completions"

    def _about(self) -> Iterator[str]:
        settings, counts = self.settings, self.counts
        yield self._model()
        how = "greedy" if settings["temperature"] == 0 else f"at temperature {settings['temperature']:g}"
        prompts, many = plural(counts["prompts"], "prompt"), plural(settings["samples"], "completion")
        yield f"data    {self._dataset()}: {prompts}, {many} each, {how}, seed {settings['seed']}"
        yield from self._notes()

    def _model(self) -> str:
        step = "" if self.checkpoint is None else f" (step {self.checkpoint.step})"
        return f"model   {self.model}{step}"

    def _dataset(self) -> str:
        settings = self.settings
        return f"{settings['on']} ({settings['dataset']})" if "on" in settings else str(settings["dataset"])

    def _notes(self) -> Iterator[str]:
        counts = self.counts
        notes = [f"{counts[name]} {text}" for name, text in _NOTES.items() if counts[name]]
        if notes:
            yield f"note    {', '.join(notes)}"

    def _category_lines(self) -> Iterator[str]:
        """A row for each category, and their mean; none without categories."""
        if not self.categories:
            return
        yield ""
        rows = [[name or "(none)", str(prompts), _shown(of)] for name, (prompts, of) in self.categories.items()]
        prompts = sum(prompts for name, (prompts, _) in self.categories.items() if name)
        macro = ["mean of categories", str(prompts), _shown(self.metrics.get(f"eval/{MACRO}"))]
        yield from table([["category", "prompts", "accuracy"], *rows, macro], "<>")

    def _is_graded(self) -> bool:
        """True if values other than 0 and 1 occur of what tells right from wrong, so that its mean is no accuracy."""
        mean, right = (self.metrics.get(f"eval/{name}") for name in (f"{self.settings['accuracy']}_mean", "accuracy"))
        return mean is not None and right is not None and mean.value != right.value

    def _by_source(self) -> list[tuple[str, int, Estimates]]:
        """Each source, and all of them if there are several."""
        everything = [("all", self.counts["prompts"], self.metrics)] if len(self.sources) > 1 else []
        return [*((name, *found) for name, found in self.sources.items()), *everything]

    def _episode_rows(self) -> list[list[str]]:
        """Turns, calls, and what ended episodes; none without an environment."""
        ends = [f"finish_{reason}_fraction" for reason in REASONS]
        names = [
            *("turns_mean", "calls_mean", "invalid_calls_fraction", "observation_tokens_mean"),
            *(name for name in ends if (found := self.metrics.get(SECTION + name)) is not None and found.value > 0),
        ]
        if SECTION + names[0] not in self.metrics:
            return []
        titles = [re.sub("^finish_|_(mean|fraction)$", "", name).replace("_", " ") for name in names]
        return [
            ["episodes", *titles],
            *([name, *(_shown(of.get(SECTION + each)) for each in names)] for name, _, of in self._by_source()),
        ]

    def _rows(self, rewards: Sequence[str]) -> list[list[str]]:
        accuracy = self.settings["accuracy"]
        titles = [f"{name}*" if name == accuracy else name for name in map(_short, rewards)]
        graded = ["eval/accuracy"] if self._is_graded() else []
        titles += ["right"] * len(graded)
        columns = [*rewards, *graded, *_LENGTHS.values()]
        shown = [
            [name, str(prompts), *(_shown(metrics.get(each)) for each in columns)]
            for name, prompts, metrics in self._by_source()
        ]
        return [["source", "prompts", *titles, *_LENGTHS], *shown]


@dataclass(frozen=True, slots=True)
class ComparedResults(Results):
    """An evaluation of pairs: ``settings`` name the algorithm whose rewards compare, and the reference's folder.

    Demonstrations and documents have the loss alone.
    """

    def lines(self) -> Iterator[str]:
        """The same for a person."""
        yield self._model()
        algorithm, reference = self.settings["algorithm"]["name"], self.settings["reference"]
        names = [name for name in _COMPARED if any(name in metrics for _, _, metrics in self._by_source())]
        if not names:
            yield f"data    {self._dataset()}: {plural(self.counts['prompts'], 'row')} by {algorithm}"
            yield from self._notes()
            yield from self._losses()
            return
        against = "" if reference is None else f", against {reference}"
        yield f"data    {self._dataset()}: {plural(self.counts['prompts'], 'comparison')} by {algorithm}{against}"
        yield from self._notes()
        yield ""
        rows = [
            [name, str(prompts), *(_shown(metrics.get(each)) for each in names)]
            for name, prompts, metrics in self._by_source()
        ]
        yield from table([["source", "prompts", *map(_title, names)], *rows], "<>")
        yield from self._category_lines()
        if self.ablation is not None:
            yield ""
            yield from table(
                _ablation_rows(self.ablation, [name for name in names if name in self.ablation.blank]), "<>"
            )
        yield ""
        yield "± half of the 95 % interval, which counts prompts"

    def _losses(self) -> Iterator[str]:
        """The loss, and that of the rows with images when these are blank."""
        yield ""
        yield f"loss    {self.metrics['eval/loss'].value:.4g}"
        if self.ablation is not None:
            rows = f"{plural(self.ablation.prompts, 'row')} with images"
            yield f"        {self.ablation.blank['eval/loss'].value:.4g} of {rows}, which were blank"


_SIDES = [f"{name}_{side}" for name in ("reward", "score", "length") for side in ("chosen", "rejected")]
_COMPARED = tuple(f"eval/{name}" for name in ("accuracy", "margin", *_SIDES))
"""Metrics of comparisons that have a column."""


def _title(metric: str) -> str:
    return metric.removeprefix("eval/").replace("_", " ")


_NOTES = {"unscored": "completions unscored", "dropped": "rows dropped"}


def _rewards(metrics: Estimates) -> list[str]:
    """The components' means, and that of their sum where there are several."""
    aside = (_SUM, *_LENGTHS.values())
    found = [name for name in metrics if name.endswith("_mean") and name not in aside and not name.startswith(SECTION)]
    return [*found, _SUM] if sum(name.count("/") == 1 for name in found) > 1 else found


def _short(metric: str) -> str:
    return "sum" if metric == _SUM else metric.removeprefix("eval/").removesuffix("_mean")


def _plain_categories(categories: Categories) -> dict[str, Any]:
    plain = {name: None if estimate is None else asdict(estimate) for name, (_, estimate) in categories.items()}
    return {name: {"prompts": categories[name][0], "accuracy": accuracy} for name, accuracy in plain.items()}


def _plain(metrics: Estimates) -> dict[str, Any]:
    return {name: asdict(estimate) for name, estimate in metrics.items()}


def _shown(estimate: Estimate | None) -> str:
    """The estimate as text, such as ``0.53 ± 0.04``, or ``0.98 [0.95, 0.99]`` where the interval has another centre."""
    if estimate is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    if abs(estimate.low + estimate.high - 2 * estimate.value) > 1e-3:
        return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
    return f"{estimate.value:.3f} ± {(estimate.high - estimate.low) / 2:.3f}"


def _at_k(metrics: Estimates, title: str, what: str) -> list[list[str]]:
    """A row for each component, a column for each k."""
    found: dict[str, dict[str, Estimate]] = {}
    for metric, estimate in metrics.items():
        if (match := _AT.fullmatch(metric)) and match["what"] == what:
            found.setdefault(match["name"], {})[match["k"]] = estimate
    sizes = list(dict.fromkeys(k for row in found.values() for k in row))
    rows = [[name, *(_shown(row.get(k)) for k in sizes)] for name, row in found.items()]
    return [[title, *(f"k = {k}" for k in sizes)], *rows] if rows else []


def _best_rows(found: BestOf) -> list[list[str]]:
    """A row for each n."""
    head = [f"best of n by {found.by}, {plural(found.prompts, 'prompt')}", "accuracy", "reward"]
    return [head, *([f"n = {n}", _shown(accuracy), _shown(reward)] for n, accuracy, reward in found.points())]


def _ablation_rows(ablation: Ablation, metrics: Sequence[str]) -> list[list[str]]:
    rows = [
        [_short(name), *(_shown(each.get(name)) for each in (ablation.pictures, ablation.blank, ablation.difference))]
        for name in metrics
    ]
    return [[f"{plural(ablation.prompts, 'prompt')} with images", "pictures", "blank", "difference"], *rows]
