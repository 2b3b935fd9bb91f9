"""Looks at everything of a run that needs no device, part by part; one part's fault does not hide the next one's."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mmrl import registry
from mmrl.checking.answers import check_golds, try_rewards
from mmrl.checking.budget import Arithmetic, disk
from mmrl.checking.profile import Profile, profile
from mmrl.checking.report import Report, counted
from mmrl.config import Config, RewardSpec
from mmrl.errors import DataError, MMRLError
from mmrl.plan import RunPlan
from mmrl.prompts import PromptSource
from mmrl.scoring.scorer import Scorer
from mmrl.types import EncodedPrompt

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
            folder = self.plan.folder
            self.report.add(
                "model", folder.family.model_type, [f"{folder.family.model_type}, {folder.vocabulary.size} token ids"]
            )
            for part in (partial(self._dataset, "train"), partial(self._dataset, "eval"), self._both):
                with self.report.guarded():
                    part()
            for part in (self._sample, self._batches):
                if "train" in self._profiles:
                    with self.report.guarded():
                        part()
        if "model" not in self.report.data:
            self._rows_without_a_model()

    def _plugins(self) -> None:
        algorithm = self.plan.algorithm
        names = [type(algorithm).__name__]
        self.report.add("algorithm", names[0], [f"{names[0]}, {algorithm.aggregation.mode}"])
        rewards = [registry.resolve("reward", spec.name).__name__ for spec in self.config.rewards]
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
        chosen = self.plan.chosen[source.name]
        causes = counted(source.causes)
        data: dict[str, Any] = {
            "prompts": len(source),
            "rows": len(source) + len(source.dropped),
            "dropped": len(source.dropped),
            "dropped_by_cause": dict(source.causes),
            "chosen": chosen,
            **found.data(),
        }
        lines = [f"{label}: {value}" for label, value in chosen.items()]
        lines.append(f"{len(source)} of {data['rows']} rows kept" + (f"; dropped: {causes}" if causes else ""))
        lines += [f"  {prompt_id}: {reason}" for prompt_id, reason in source.dropped[:5]]
        self.report.add(name, data, [*lines, *found.lines()])
        if 2 * len(source.dropped) > data["rows"]:
            self.report.warn(f"{source.name}: more than half of the rows are dropped ({causes})")
        self._golds(name, source)

    def _golds(self, name: str, source: PromptSource) -> None:
        spec = self._accuracy()
        if spec is None or (name == "train" and self.plan.algorithm.source != "rollouts"):
            return
        if registry.resolve("reward", spec.name).workers is not None:  # type: ignore[attr-defined]
            lines = [f"golds      not graded: reward {spec.metric!r} is tried on one row alone"]
            self.report.add(f"{name}_golds", None, lines, title="")
            return
        golds = check_golds(source, spec)
        self.report.add(f"{name}_golds", golds.data(), golds.lines(), title="")
        for problem in golds.problems(source.name, self.config.data.max_bad_rows):
            self._note(problem)

    def _accuracy(self) -> RewardSpec | None:
        return next((spec for spec in self.config.rewards if spec.metric == self.config.accuracy), None)

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

    def _sample(self) -> None:
        source = self.plan.training
        places = np.unique(np.linspace(0, len(source) - 1, min(len(source), ENCODED)).astype(int)).tolist()
        prompts = list[EncodedPrompt]()
        for place in places:
            with self.report.guarded():
                prompts.append(self.plan.encoder.encode(source[place]))
        if not prompts:
            return
        first = max(prompts, key=lambda prompt: bool(prompt.images))
        rendered = first.text if len(first.text) <= _SHOWN_CHARACTERS else first.text[:_SHOWN_CHARACTERS] + "..."
        patches = [ref.width * ref.height // self.plan.media.grid.factor**2 for ref in first.images]
        note = f"; its image tokens stand for {', '.join(map(str, patches))} tokens" if patches else ""
        self.report.add(
            "sample",
            {"id": first.id, "text": first.text, "tokens": len(first.token_ids), "image_tokens": patches},
            [f"{first.id}, {len(first.token_ids)} tokens{note}", *(f"| {line}" for line in rendered.splitlines())],
        )
        self._media(prompts)
        if self.config.rewards and first.answer is not None:
            with Scorer(self.config.rewards) as scorer:
                self._try_rewards(scorer, first)

    def _try_rewards(self, scorer: Scorer, prompt: EncodedPrompt) -> None:
        trials = try_rewards(scorer, prompt, self.config.sampler.max_new_tokens)
        lines = [f"gold {prompt.answer!r}"[:100], *(trial.line() for trial in trials)]
        self.report.add("trial", [trial.data() for trial in trials], lines)
        right, wrong = trials[0], trials[1]
        if not right.total > wrong.total:
            self._note(
                DataError(
                    f"A right answer earns {right.total:g} and a wrong one {wrong.total:g}",
                    where=f"rewards, tried on {prompt.id}",
                    remedy="look at the trial above: the rewards cannot teach the answer",
                )
            )

    def _media(self, prompts: list[EncodedPrompt]) -> None:
        """Guess what stored images take from those that were decoded."""
        stored = [Path(ref.path).stat().st_size for prompt in prompts for ref in prompt.images]
        per_image = sum(stored) / len(stored) if stored else 0.0
        images = sum(len(found.sizes) for found in self._profiles.values())
        self._image_bytes = int(per_image * images)

    def _batches(self) -> None:
        source = self.plan.training
        evaluated = len(self.plan.evaluation) if self.plan.evaluation is not None else 0
        arithmetic = Arithmetic(self.config, len(source), max(source.lengths), evaluated)
        self.report.add("batches", arithmetic.data(), arithmetic.lines())
        for warning in arithmetic.warnings():
            self.report.warn(warning)
        room = disk(self.config, self.plan.weight_bytes(), source.lengths, getattr(self, "_image_bytes", 0))
        self.report.add("disk", room.data(), room.lines())
        for problem in room.problems():
            self._note(problem)

    def _note(self, problem: MMRLError | str) -> None:
        if isinstance(problem, str):
            self.report.warn(problem)
        else:
            self.report.errors.append(problem)
