"""Looks at everything of a run that needs no device, part by part; one part's fault does not hide the next one's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from mmrl import registry
from mmrl.checking.answers import try_rewards
from mmrl.checking.budget import Arithmetic, disk
from mmrl.checking.golds import check_golds
from mmrl.checking.profile import Profile, profile
from mmrl.checking.report import Report, counted, excerpt
from mmrl.config import Config
from mmrl.errors import DataError, MMRLError
from mmrl.interfaces import Reward
from mmrl.plan import RunPlan
from mmrl.prompts import PromptSource
from mmrl.run_directory import check_place
from mmrl.scoring.scorer import Scorer
from mmrl.types import EncodedPrompt

GRADED = 10_000
"""Rows whose golds are graded by a reward, evenly spread over a longer dataset."""
TRIED = 8
"""Prompts of a source that rewards are tried on until they can score one."""
ENCODED = 32
"""Prompts whose images are decoded, evenly spread over the data."""
_SHOWN_CHARACTERS = 4000


def examine(config: Config, media_folder: Path) -> Report:
    """Look at a run.

    Args:
        media_folder: A temporary folder for the images that are decoded.

    Raises:
        MMRLError: The plugins do not fit the config, so nothing else can be looked at.
    """
    return _Examination(config, media_folder).report


class _Examination:
    def __init__(self, config: Config, media_folder: Path) -> None:
        self.config, self.report = config, Report()
        self.plan = RunPlan(config, media_folder)
        self._profiles: dict[str, Profile] = {}
        self._plugins()
        with self.report.guarded():
            check_place(Path(config.trainer.run_dir).expanduser())
        with self.report.guarded():
            folder = self.plan.folder
            line = f"{folder.family.model_type}, {folder.vocabulary.size} token ids"
            if (adapters := self.plan.num_adapter_weights) is not None:
                line += f", adapters of {adapters} parameters"
            self.report.add("model", folder.family.model_type, [line])
            for part in (partial(self._dataset, "train"), partial(self._dataset, "eval"), self._both):
                with self.report.guarded():
                    part()
            for part in (self._samples, self._batches):
                if "train" in self._profiles:
                    with self.report.guarded():
                        part()
        if "model" not in self.report.data:
            self._rows_without_a_model()

    def _plugins(self) -> None:
        algorithm = self.plan.algorithm
        name = type(algorithm).__name__
        self.report.add("algorithm", name, [f"{name}, {algorithm.aggregation.mode}"])
        rewards = [
            spec.metric if spec.metric == spec.name else f"{spec.metric} ({spec.name})" for spec in self.config.rewards
        ]
        self.report.add("rewards", rewards, [", ".join(rewards) or "none"])
        self.report.data["plugins"] = [dataclasses.asdict(info) for info in registry.used_plugins(self.config)]
        for tracker in self.config.trackers:
            registry.create("tracker", tracker)
        self.report.warnings += self.plan.warnings

    def _rows_without_a_model(self) -> None:
        """What can be said of data while the model's hub is away."""
        for name, spec in (("train", self.config.data.train), ("eval", self.config.data.eval)):
            if spec is not None:
                with self.report.guarded():
                    rows = self.plan.num_rows(f"data.{name}", spec)
                    self.report.add(name, {"rows": rows}, [f"{rows} rows"])

    def _dataset(self, name: str) -> None:
        source = self.plan.training if name == "train" else self.plan.evaluation
        if source is None:
            return
        found = self._profiles[name] = profile(source, self.plan.media.grid)
        chosen = {key: about for key, about in self.plan.chosen.items() if (key == "data.eval") == (name == "eval")}
        causes = counted(source.causes)
        data: dict[str, Any] = {
            "prompts": len(source),
            "rows": source.num_rows,
            "dropped": len(source.dropped),
            "dropped_by_cause": dict(source.causes),
            "chosen": chosen,
            **found.data(),
        }
        lines = list[str]()
        for key, values in chosen.items():
            lines += [key] if len(chosen) > 1 else []
            lines += [f"{label}: {value}" for label, value in values.items()]
        lines.append(f"{len(source)} of {source.num_rows} rows kept" + (f"; dropped: {causes}" if causes else ""))
        lines += [f"  {prompt_id}: {reason}" for prompt_id, reason in source.dropped[:5]]
        if len(data["sources"]) > 1:
            lines.append(f"sources    {counted(data['sources'])}")
        self.report.add(name, data, [*lines, *found.lines()])
        if 2 * len(source.dropped) > source.num_rows:
            self.report.warn(f"{source.name}: more than half of the rows are dropped ({causes})")
        self._golds(name, source, found.sources)

    def _golds(self, name: str, source: PromptSource, row_sources: Sequence[str]) -> None:
        """Each reward that tells right from wrong, on the rows that it scores."""
        if name == "train" and self.plan.algorithm.source != "rollouts":
            return
        reports = list[dict[str, Any]]()
        specs = [spec for spec in self.config.rewards if spec.metric == self.config.accuracy]
        for spec in specs:
            rows = [i for i, each in enumerate(row_sources) if spec.sources is None or each in spec.sources]
            if not rows:
                continue
            shown = (
                repr(spec.metric)
                if len(specs) == 1
                else f"{spec.metric!r} ({spec.name}, {', '.join(spec.sources or ())})"
            )
            if cast(type[Reward], registry.resolve("reward", spec.name)).workers is not None:
                self.report.show("", [f"golds      not graded: reward {shown} is tried on one row alone"])
                continue
            places = np.linspace(0, len(rows) - 1, min(len(rows), GRADED)).astype(int).tolist()
            golds = check_golds((source[rows[place]] for place in places), spec, shown)
            reports.append(golds.data())
            self.report.add(f"{name}_golds", reports, golds.lines(), title="")
            for problem in golds.problems(source.name, self.config.data.max_bad_rows):
                self._note(problem)

    def _both(self) -> None:
        """Questions that are trained on and evaluated."""
        if len(self._profiles) < 2:
            return
        trained = set(self._profiles["train"].fingerprints)
        shared = sum(each in trained for each in self._profiles["eval"].fingerprints)
        self.report.data["eval_rows_in_train"] = shared
        if shared:
            total = len(self._profiles["eval"].fingerprints)
            self.report.warn(f"data.eval: {shared} of {total} rows ask and show the same as a row of data.train")

    def _samples(self) -> None:
        """One prompt of each source as the model reads it, and the rewards tried on it."""
        source, sources = self.plan.training, self._profiles["train"].sources
        # With an image where the source has any: those are the ones that go wrong.
        order = sorted(range(len(sources)), key=lambda place: not self._profiles["train"].image_tokens[place])
        samples, trials = list[dict[str, Any]](), list[dict[str, Any]]()
        scorer = Scorer(self.config.rewards) if self.config.rewards and self.plan.with_sampler else None
        with scorer or nullcontext():
            for name in dict.fromkeys(sources):
                with self.report.guarded():
                    places = islice((place for place in order if sources[place] == name), TRIED)
                    prompts = (self.plan.encoder.encode(source[place]) for place in places)
                    first = next(prompts)
                    samples.append(self._show(first))
                    self.report.data["samples"] = samples
                    if scorer is not None:
                        trials.append(self._try_rewards(scorer, chain([first], prompts)))
                        self.report.data["trials"] = trials

    def _show(self, prompt: EncodedPrompt) -> dict[str, Any]:
        rendered = prompt.text if len(prompt.text) <= _SHOWN_CHARACTERS else prompt.text[:_SHOWN_CHARACTERS] + "..."
        patches = [ref.width * ref.height // self.plan.media.grid.factor**2 for ref in prompt.images]
        note = f"; its image tokens stand for {', '.join(map(str, patches))} tokens" if patches else ""
        lines = [f"{prompt.id}, {len(prompt.token_ids)} tokens{note}", *(f"| {line}" for line in rendered.splitlines())]
        self.report.show("sample", lines)
        return {"id": prompt.id, "text": prompt.text, "tokens": len(prompt.token_ids), "image_tokens": patches}

    def _try_rewards(self, scorer: Scorer, prompts: Iterator[EncodedPrompt]) -> dict[str, Any]:
        """On the first prompt whose right answer can be scored; without a gold, nothing is right or wrong."""
        for prompt in prompts:
            answers = try_rewards(scorer, prompt, self.config.sampler.max_new_tokens)
            if answers[0].is_scored:
                break
        gold = "no gold" if prompt.answer is None else f"gold {excerpt(prompt.answer)}"
        self.report.show("trial", [gold, *(answer.line() for answer in answers)])
        right, wrong = answers[0], answers[1]
        if prompt.answer is not None and not right.total > wrong.total:
            self._note(
                DataError(
                    f"A right answer earns {right.total:g} and a wrong one {wrong.total:g}",
                    where=f"rewards, tried on {prompt.id}",
                    remedy="look at the trial above: the rewards cannot teach the answer",
                )
            )
        return {"id": prompt.id, "source": prompt.source, "answers": [answer.data() for answer in answers]}

    def _batches(self) -> None:
        source, self.config = self.plan.training, self.plan.count_steps()
        evaluated = len(self.plan.evaluation) if self.plan.evaluation is not None else 0
        arithmetic = Arithmetic(self.config, source.shares, max(source.lengths), evaluated)
        self.report.add("batches", arithmetic.data(), arithmetic.lines())
        for warning in arithmetic.warnings():
            self.report.warn(warning)
        room = disk(self.config, self.plan.num_weights(), source.lengths, self._image_bytes())
        self.report.add("disk", room.data(), room.lines())
        for problem in room.problems():
            self._note(problem)

    def _image_bytes(self) -> int:
        """What stored images take, guessed from some that are decoded here: rows whose pixels are damaged show too."""
        source, stored = self.plan.training, list[int]()
        for place in np.unique(np.linspace(0, len(source) - 1, min(len(source), ENCODED)).astype(int)).tolist():
            with self.report.guarded():
                refs = self.plan.encoder.encode(source[place]).images
                stored += [Path(ref.path).stat().st_size for ref in refs]
        images = sum(len(found.sizes) for found in self._profiles.values())
        return int(sum(stored) / len(stored) * images) if stored else 0

    def _note(self, problem: MMRLError | str) -> None:
        if isinstance(problem, str):
            self.report.warn(problem)
        else:
            self.report.blame(problem)
