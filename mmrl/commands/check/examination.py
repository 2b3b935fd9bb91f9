"""Examines everything of a run that needs no device; one part's fault does not hide the next one's."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mmrl.commands.check.answers import try_rewards
from mmrl.commands.check.episodes import cut_turns, observed_roles, walk
from mmrl.commands.check.given_rows import GivenRows
from mmrl.commands.check.networks import critic_lines, model_lines, prompt_lines, teacher_lines
from mmrl.commands.check.overlaps import overlaps
from mmrl.commands.check.profile import Profile, profile
from mmrl.commands.check.references import check_references
from mmrl.config.sections import Config, is_component
from mmrl.data.images import normalise
from mmrl.data.order import request_seed
from mmrl.data.prompts import Progress, PromptSource
from mmrl.errors import DataError, MMRLError, PluginError
from mmrl.interfaces import Reward
from mmrl.ops.categories import categories_text
from mmrl.plugin_host import registry
from mmrl.plugin_host.used import used_plugins
from mmrl.rollout.rewards.scorer import Scorer
from mmrl.runs.budget import Arithmetic, disk
from mmrl.runs.checks import check_ahead
from mmrl.runs.directory import check_place
from mmrl.runs.episodes import playing
from mmrl.runs.monitoring import fault_of, monitors_of
from mmrl.runs.reward_scale import scale_warnings
from mmrl.runs.run_warnings import config_warnings, image_warnings, learning_warnings, model_warnings
from mmrl.runs.sampled_rows import sampled_warnings
from mmrl.runs.scored_rows import right_answer, row_warnings, writing
from mmrl.runs.setup import RunSetup
from mmrl.runs.summary import SHOWN_ROWS, kept_rows
from mmrl.system.console import Console
from mmrl.system.report import Report, counted, excerpt, rows, shortened
from mmrl.system.table import table
from mmrl.types import EncodedPrompt, Prompt

if TYPE_CHECKING:
    from mmrl.engine.text.encoding import Encoder

GRADED = 10_000
"""Rows whose reference answers are graded by a reward, evenly spread over a longer dataset."""
TRIED = 8
"""Prompts of a source that rewards are tried on until they can score one."""
ENCODED = 32
"""Prompts whose images are always decoded and stored, evenly spread over a dataset."""
DECODING_S = 10.0
"""Seconds for decoding the images of further rows of a dataset."""
_TOOL_PROMPTS = {
    "template": "the model's chat template",
    "text": "a text in the system turn",
    "none": "nothing in the prompt",
}


def examine(config: Config, media_folder: Path) -> Report:
    """Look at a run.

    Args:
        media_folder: A temporary folder for the images that are decoded.

    Raises:
        MMRLError: The plugins do not fit the config, so nothing else can be looked at.
    """
    console = Console(0, sys.stderr)
    with ExitStack() as stack:
        stack.callback(console.close)
        return _Examination(config, media_folder, console.progress, stack).report


class _Examination:
    def __init__(self, config: Config, media_folder: Path, progress: Progress, stack: ExitStack) -> None:
        self.config, self.report = config, Report()
        self._progress, self._stack = progress, stack
        self._scorer: Scorer | None = None
        self.setup = RunSetup(config, media_folder, scans=True, progress=progress)
        self._profiles: dict[str, Profile] = {}
        self._stored, self._observed = list[int](), list[int]()
        self._given = GivenRows(self.setup)
        self._judges_style = False
        self._plugins()
        if config.rewards and self.setup.with_sampler:
            # First of all, as the workers import their rewards while this process imports the rest.
            with self.report.guarded():
                self._scorer = stack.enter_context(Scorer(config.rewards))
        with self.report.guarded():
            check_place(Path(config.trainer.run_dir).expanduser())
        with self.report.guarded():
            self.report.add("model", self.setup.folder.family.model_type, model_lines(self.setup))
            self._limits()
            with self.report.guarded():
                if teachers := teacher_lines(self.setup):
                    self.report.add("reference", [each.name for each in self.setup.teachers], teachers)
            with self.report.guarded():
                if critic := critic_lines(self.setup):
                    self.report.add("critic", (self.setup.critic or self.setup.folder).name, critic)
            parts: list[Callable[[], None]] = [partial(self._dataset, name) for name in ("train", *self._sets)]
            for part in (*parts, self._both, self._learnable):
                with self.report.guarded():
                    part()
            for part in (self._samples, self._episodes, self._batches):
                if "train" in self._profiles:
                    with self.report.guarded():
                        part()
        if "model" not in self.report.data:
            self._rows_without_a_model()

    @property
    def _sets(self) -> dict[str, str]:
        """The evaluation sets' names in the config by those in the report: ``eval`` or ``eval.NAME``."""
        return {each.key.removeprefix("data."): name for name, each in self.config.evaluations.items()}

    @property
    def _is_ahead(self) -> bool:
        """True if a new run does not read its training rows at the start."""
        return self.setup.training.num_rows > self.config.data.scan_rows

    def _plugins(self) -> None:
        algorithm = self.setup.algorithm
        name = type(algorithm).__name__
        self.report.add("algorithm", name, [f"{name}, {algorithm.aggregation.mode}"])
        rewards = [
            spec.metric if spec.metric == spec.name else f"{spec.metric} ({spec.name})" for spec in self.config.rewards
        ]
        self.report.add("rewards", rewards, [", ".join(rewards) or "none"])
        self.report.data["plugins"] = [dataclasses.asdict(info) for info in used_plugins(self.config)]
        for tracker in self.config.trackers:
            registry.create("tracker", tracker)
        monitors_of(self.config, lambda label, error: self._note(fault_of(label, error)))
        self.report.warnings += config_warnings(self.setup)

    def _limits(self) -> None:
        """Warn of what the model's family does in another way, or not at all on a machine like this one."""
        from mmrl.engine.device import detect

        self.report.warnings += model_warnings(self.setup)
        if (error := self.setup.refusal_on(detect())) is not None:
            here = "a run on a device like this machine's is refused"
            self.report.warnings.append(f"{error.where}: {error.what}; {here}")

    def _rows_without_a_model(self) -> None:
        """Report the datasets' rows without the model."""
        evaluated = {shown: self.config.evaluations[name].spec for shown, name in self._sets.items()}
        for name, spec in {"train": self.config.data.train, **evaluated}.items():
            with self.report.guarded():
                count = self.setup.num_rows(f"data.{name}", spec)
                self.report.add(name, {"rows": count}, [rows(count)])

    def _dataset(self, name: str) -> None:
        source = self.setup.training if name == "train" else self.setup.evaluations[self._sets[name]]
        found = self._profiles[name] = profile(
            source, self.setup.media.grid, self.setup.folder.image_tokens, self._progress
        )
        chosen = {key: each.about for key, each in self.setup.loaded_for(source.name).items()}
        causes = ", ".join(f"{count} x {cause}" for cause, count in source.causes.most_common())
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
        lines += kept_rows(source)
        if name == "train" and self._is_ahead:
            most = self.config.data.scan_rows
            lines.append(
                f"a run measures each row when it is reached, and counts all of them (data.scan_rows is {most})"
            )
            with self.report.guarded():
                check_ahead(self.config, self.setup.folder, source.num_rows, samples=self.setup.with_sampler)
        if len(data["sources"]) > 1:
            lines.append(f"sources    {counted(data['sources'])}")
        if any(source.categories):
            data["categories"] = dict(source.categories)
            lines.append(f"categories {categories_text(source.categories)}")
        self.report.add(name, data, [*lines, *found.lines()])
        spread = np.unique(np.linspace(0, len(source) - 1, min(len(source), GRADED)).astype(int)).tolist()
        self.report.warnings += [
            *source.warnings,
            *sampled_warnings(self.setup, source),
            *row_warnings(self.setup, source, spread),
        ]
        if 2 * len(source.dropped) > source.num_rows:
            self.report.warn(f"{source.name}: more than half of the rows are dropped ({causes})")
        self._images(name, source)
        self._references(name, source, found.sources)

    def _images(self, name: str, source: PromptSource) -> None:
        """Decode images of rows all over the dataset, then of all rows in turn while there is time.

        A row with damaged pixels is treated as in a run: it is left out, or too many of them are an error.
        """
        known, grid, errors = len(source.dropped), self.setup.media.grid, list[DataError]()
        encoder, learns = self.setup.encoder, name == "train" and not self.setup.step_source.samples
        encode = self._given.learnable if learns else encoder.encode
        spread = np.unique(np.linspace(0, len(source) - 1, min(len(source), ENCODED)).astype(int)).tolist()
        until, looked = time.monotonic() + DECODING_S, 0
        for count, place in enumerate(dict.fromkeys([*spread, *range(len(source))])):
            if count >= len(spread) and time.monotonic() > until:
                break
            looked += 1
            try:
                if count < len(spread) or learns:
                    encoded = source.attempt(place, encode)
                    self._stored += [] if encoded is None else [Path(ref.path).stat().st_size for ref in encoded.images]
                else:
                    source.attempt(place, lambda prompt: [normalise(raw, grid).size for raw in prompt.images])
            except DataError as error:
                errors.append(error)
        damaged = [f"{prompt_id}: {reason}" for prompt_id, reason in source.dropped[known:]]
        self.report.data[f"{name}_decoded"] = {"rows": looked, "damaged": damaged}
        if learns:
            learned = f"learned    {self.setup.step_source.texts} {self.setup.targets}"
            self.report.add("targets", self.setup.targets, [learned, *self._given.lines()], title="")
            self.report.data |= {"pairs": self._given.data()} if self._given.compared else {}
        self.report.show("", [f"decoded    {looked} of {rows(len(source))}; {len(damaged)} cannot be used"])
        self.report.show("", [f"             {line}" for line in shortened(damaged, SHOWN_ROWS)])
        if errors and self.config.data.on_bad_row == "fail":
            where = "; ".join(shortened([error.where for error in errors], SHOWN_ROWS))
            first = errors[0]
            self._note(DataError(first.what, where=where, possible=first.possible, remedy=first.remedy))
        elif errors:
            self._note(errors[-1])
        elif damaged:
            self.report.warn(f"{source.name}: {rows(len(damaged))} cannot be used, and a run takes others instead")

    def _references(self, name: str, source: PromptSource, row_sources: Sequence[str]) -> None:
        """Grade the reference answers by each reward that tells right from wrong on its rows."""
        if name == "train" and not self.setup.step_source.samples:
            return
        reports = list[dict[str, Any]]()
        accuracy = self.config.accuracy if name == "train" else self.config.evaluations[self._sets[name]].accuracy
        specs = [
            (place, spec)
            for place, spec in enumerate(self.config.rewards)
            if accuracy and is_component(accuracy, [spec.metric])
        ]
        loaded = self.setup.loaded_for(source.name).values()
        columns = {each.about["answer"] for each in loaded if "answer" in each.about}
        where = source.name + (f", column {', '.join(sorted(columns))}" if columns else "")
        for place, spec in specs if self._scorer is not None else ():
            scored = [i for i, each in enumerate(row_sources) if spec.sources is None or each in spec.sources]
            if not scored:
                continue
            shown = (
                repr(spec.metric)
                if len(specs) == 1
                else f"{spec.metric!r} ({spec.name}, {', '.join(spec.sources or ())})"
            )
            if cast(type[Reward], registry.resolve("reward", spec)).workers is not None:
                self.report.show("", [f"answers    not graded: reward {shown} is tried on one row alone"])
                continue
            places = np.linspace(0, len(scored) - 1, min(len(scored), GRADED)).astype(int).tolist()
            assert self._scorer is not None
            reward = self._scorer.reward(place)
            chosen = (source[scored[at]] for at in places)
            writer = writing(spec)
            written = () if writer is None else (partial(_written_by, writer, self.setup.encoder),)
            references = check_references(chosen, reward, shown, *written)
            reports.append(references.data())
            self.report.add(f"{name}_references", reports, references.lines(), title="")
            alone = len({each.metric for each in self.config.rewards}) == 1
            self._judges_style |= references.judges_style(alone)
            for problem in references.problems(where, self.config.data.max_bad_rows, alone):
                self._note(problem)
            if not self._judges_style and (warning := references.partly_right()):
                self.report.warn(f"{source.name}: {warning}")

    def _learnable(self) -> None:
        """Ask the algorithm about the training rows."""
        if "train" in self._profiles:
            self.report.warnings += learning_warnings(self.setup)

    def _both(self) -> None:
        """Warn of training rows without images, and count rows of evaluation sets that are in data.train."""
        if "train" not in self._profiles:
            return
        self.report.warnings += image_warnings(self.setup)
        counts, warnings = overlaps(self._profiles, self._sets)
        self.report.warnings += warnings
        if counts:
            self.report.data["eval_rows_in_train"] = counts.get("", counts)

    def _samples(self) -> None:
        """Show a prompt of each source as the model reads it, and try the rewards on it."""
        source, sources = self.setup.training, self._profiles["train"].sources
        # Prompts with images come first: those are the ones that go wrong.
        order = sorted(range(len(sources)), key=lambda place: not self._profiles["train"].image_tokens[place])
        samples, trials = list[dict[str, Any]](), list[dict[str, Any]]()
        for name in dict.fromkeys(sources):
            with self.report.guarded():
                places = islice((place for place in order if sources[place] == name), TRIED)
                made = (source.attempt(place, self.setup.encoder.encode) for place in places)
                prompts = (prompt for prompt in made if prompt is not None)
                first = next(prompts, None)
                if first is None:
                    continue
                samples.append(self._show(first))
                self.report.data["samples"] = samples
                if self._scorer is not None and self._scorer.scores(name):
                    trials.append(self._try_rewards(self._scorer, chain([first], prompts)))
                    self.report.data["trials"] = trials

    def _episodes(self) -> None:
        """Show how observations reach the policy, and play a prompt by scripts in the environment."""
        if (spec := self.config.environment) is None or not self.setup.with_sampler:
            return
        facts, encoder, folder = self.setup.environment, self.setup.encoder, self.setup.folder
        assert facts is not None
        ways = encoder.ways_of_observations(images=spec.max_images > 0)
        names = [tool["function"]["name"] for tool in facts.tools]
        shown = f"{', '.join(names)}, by {_TOOL_PROMPTS[encoder.tools_by]}" if names else "none"
        deviation = encoder.deviation(images=spec.max_images > 0)
        line = "what is appended to a turn is what the chat template writes for the whole conversation"
        line += f", but that {deviation}, and the policy reads them" if deviation else ""
        data: dict[str, Any] = {"tools": names, "tool_prompt": encoder.tools_by, "roles": ways}
        self.report.add("episodes", data, [f"tools: {shown}", line])
        made = (self.setup.training.attempt(place, encoder.encode) for place in range(len(self.setup.training)))
        prompt = next(prompt for prompt in made if prompt is not None)
        seed = request_seed(self.config.trainer.seed, 0, f"environment/{prompt.id}", 0)
        with playing(self.setup) as player:
            assert player is not None
            walks = walk(player, facts, folder, encoder.end_of_turn, prompt, seed)
            contents = [played.content or () for each in walks for played in each.rollout.episode]
            observed = [part for content in contents for part in content if not isinstance(part, str)]
            self._observed = [Path(ref.path).stat().st_size for ref in observed]
            data["prompt"], data["scripts"] = prompt.id, [each.data() for each in walks]
            data["roles"] = roles = observed_roles(walks, ways)
            self.report.show("", [f"observations with {kind}: as {role} messages" for kind, role in roles.items()])
            self.report.show(
                "", [f"{prompt.id}, played by scripts in place of the policy; lines of its own are marked:"]
            )
            for place, each in enumerate(walks):
                self.report.show("", list(each.lines(player, with_prompt=not place)))
            self.report.warnings += cut_turns(walks, player.limits)
        for each in walks:
            if each.rollout.failure:
                what = f"the environment {each.rollout.failure}"
                where = f"environment: {spec.name}, script {each.script.kind!r}"
                self._note(PluginError(what, where=where, remedy="correct the environment"))

    def _show(self, prompt: EncodedPrompt) -> dict[str, Any]:
        patches = [self.setup.folder.image_tokens(ref.width, ref.height) for ref in prompt.images]
        lines = prompt_lines(prompt, patches)
        lines += self._given.shown(prompt) if prompt.prompt.candidates and not self.setup.step_source.samples else []
        self.report.show("sample", lines)
        return {"id": prompt.id, "text": prompt.text, "tokens": len(prompt.token_ids), "image_tokens": patches}

    def _try_rewards(self, scorer: Scorer, prompts: Iterator[EncodedPrompt]) -> dict[str, Any]:
        """Use the first prompt whose right answer can be scored; without a reference answer, none is right or wrong."""
        for prompt in prompts:
            scoring = [
                each for each in self.config.rewards if each.sources is None or prompt.prompt.source in each.sources
            ]
            own = [right_answer(each, prompt) for each in map(writing, scoring) if each is not None]
            answers = try_rewards(scorer, prompt, self.config.sampler.max_new_tokens, [*filter(None, own)])
            if answers[0].is_scored:
                break
        answer = prompt.prompt.answer
        shown = "no reference answer" if answer is None else f"reference answer {excerpt(answer)}"
        reasons = [line for answer in answers for line in answer.reason_lines()]
        self.report.show("trial", [shown, *table([answer.cells() for answer in answers], "<><"), *reasons])
        self.report.warnings += scale_warnings(
            self.setup, [each.total for each in answers if each.is_scored], prompt.id
        )
        right, wrong = answers[0], answers[1]
        if answer is not None and not right.total > wrong.total:
            what, where = f"A right answer earns {right.total:g} and a wrong one {wrong.total:g}", "rewards, tried on"
            remedy = "look at the trial above: the rewards cannot teach the answer"
            if self._judges_style:
                self.report.warn(f"{where} {prompt.id}: {what[0].lower()}{what[1:]}")
            else:
                self._note(DataError(what, where=f"{where} {prompt.id}", remedy=remedy))
        return {"id": prompt.id, "source": prompt.prompt.source, "answers": [answer.data() for answer in answers]}

    def _batches(self) -> None:
        source = self.setup.training
        self.config = self.setup.count_steps(source.num_rows if self._is_ahead else None)
        evaluated = {name: len(source) for name, source in self.setup.evaluations.items()}
        sizes = source.shares, source.longest, evaluated, self.setup.step_source, self._profiles["train"].largest_image
        arithmetic = Arithmetic(self.config, *sizes)
        self.report.add("batches", arithmetic.data(), arithmetic.lines())
        self.report.warnings += arithmetic.warnings()
        room = disk(
            self.config,
            self.setup.num_saved(),
            source.lengths,
            self._image_bytes(),
            evaluated=evaluated,
            observed_bytes=max(self._observed, default=0),
            demonstrated=None if self.setup.step_source.samples else float(np.mean(self._given.lengths or [0])),
        )
        self.report.add("disk", room.data(), room.lines())
        for problem in room.problems():
            self._note(problem)

    def _image_bytes(self) -> int:
        """Bytes of stored images, estimated from the decoded ones."""
        stored = self._stored
        images = sum(found.sizes.total() for found in self._profiles.values())
        return int(sum(stored) / len(stored) * images) if stored else 0

    def _note(self, problem: MMRLError | str) -> None:
        if isinstance(problem, str):
            self.report.warn(problem)
        else:
            self.report.blame(problem)


def _written_by(reward: Reward, encoder: Encoder, prompt: Prompt) -> tuple[EncodedPrompt, str | None]:
    """A row as the reward sees it, and the right answer that it writes."""
    seen = encoder.measure(prompt)
    return seen, right_answer(reward, seen)
