"""The audit of a run's own model, sampler and learner, in a process of its own.

    python -m mmrl.commands.doctor.audited_run CONFIG ROWS

CONFIG is a file of the resolved config as JSON. Rows are appended to ROWS as they are known, one JSON object a line: a
process that aborts leaves those it had. The run folder is not touched, no data are read and no reward is asked.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.commands.alternating import alternating
from mmrl.commands.doctor.engine_rows import image_rows, moved_row, weight_row
from mmrl.commands.doctor.finding import REPORT, Finding, failure
from mmrl.commands.doctor.teacher_rows import Lesson, lessons, taught, teacher_rows
from mmrl.commands.doctor.text_rows import special_row, turn_rows
from mmrl.commands.doctor.verdicts import shown
from mmrl.config.load import from_mapping
from mmrl.config.sections import Config
from mmrl.engine.text.tool_prompt import SENTINEL
from mmrl.engine_api import Engine, SamplingRequest
from mmrl.errors import MMRLError, NumericsError
from mmrl.ops.parity import Gap
from mmrl.runs.setup import RunSetup
from mmrl.step.audit.agreement import agreement_rows
from mmrl.step.audit.probe_prompts import fitting
from mmrl.step.audit.probe_row import ProbeRow
from mmrl.step.audit.probed import probed
from mmrl.step.audit.scores import score_rows, scores_of
from mmrl.step.audit.sight import SIGHT
from mmrl.step.audit.start_audit import cheap_rows
from mmrl.step.audit.tokens import prompt_row
from mmrl.step.audit.values import value_rows
from mmrl.step.learn import LearnSettings, finished, learn
from mmrl.types import EncodedPrompt, FloatArray, ScoredGroup

if TYPE_CHECKING:
    from mmrl.engine.text.encoding import Encoder

GROUP_SIZE = 16
NEW_TOKENS = 16
"""Completions of a prompt and their tokens, at most."""
PROMPT_TOKENS = 256
"""Tokens of a prompt for which the audit's engines have room at least, so that every probe fits."""
ALONE = ("texts", "probes", "inspection")
"""Stages on which no other builds."""
MAX_IMAGES = 2
"""Images of a probe, at most."""
RATES = {False: 1e-3, True: 1e-2}
"""Learning rates of the audit's one optimizer step, of weights and of adapters: large enough for every type to show."""


class Audit:
    """The stages, in order.

    Args:
        folder: For images.
        emit: Takes each row as soon as it is known.
    """

    def __init__(self, config: Config, folder: Path, emit: Callable[[Finding], None]) -> None:
        self._config, self._emit = audited(config), emit
        self._setup = RunSetup(self._config, folder / "media")
        self._engine: Engine
        self._prompts: tuple[EncodedPrompt, ...] = ()
        self._told = set[str]()

    def run(self) -> None:
        """Run all stages; one that fails gives a row, and ends those that build on it."""
        chain: list[tuple[str, Callable[[], None]]] = [("model", self._open), ("texts", self._texts)]
        chain += [("engines", self._start), ("probes", self._cheap)]
        chain += [("inspection", partial(self._inspect, "before an update")), ("update", self._update)]
        chain += [("after the update", self._after)]
        try:
            for done, (name, stage) in enumerate(chain, 1):
                if not self._attempt(name, stage) and name not in ALONE:
                    if left := ", ".join(name for name, _ in chain[done:]):
                        self._emit(Finding("engine", "audit: not run", "warn", left))
                    return
        finally:
            if hasattr(self, "_engine"):
                self._engine.close()

    def _attempt(self, name: str, stage: Callable[[], None]) -> bool:
        try:
            stage()
        except NumericsError as error:
            self._emit(Finding("numbers", f"audit: {name}", "bad", str(error), REPORT))
        except MMRLError as error:
            self._emit(Finding("engine", f"audit: {name}", "bad", error.what, _answer(error)))
        except Exception as error:  # whatever a library raises is what this command looks for
            self._emit(Finding("engine", f"audit: {name}", "bad", failure(error), REPORT))
        else:
            return True
        return False

    def _row(self, row: ProbeRow) -> None:
        """Emit a row; of those with one name, the first."""
        if row.probe not in self._told:
            self._told.add(row.probe)
            self._emit(shown(row))

    def _open(self) -> None:
        """Everything of the run that needs no device, but for its data."""
        setup = self._setup
        _ = setup.algorithm, setup.folder, setup.num_adapter_weights, setup.teachers, setup.critic
        most = MAX_IMAGES * setup.folder.family.vision
        tokens = self._config.data.max_prompt_tokens
        found = fitting(self._encoder, max_tokens=tokens, max_images=most, total_tokens=inf)
        self._prompts = tuple(probe.encoded for probe in found.prompts)

    @cached_property
    def _encoder(self) -> Encoder:
        """The run's own; where its environment is refused, one without tools, so that its engines are audited too."""
        from mmrl.engine.text.encoding import Encoder

        try:
            return self._setup.encoder
        except MMRLError:  # the texts' stage tells of it
            return Encoder(self._setup.folder, self._setup.media)

    def _texts(self) -> None:
        from mmrl.engine.text.encoding import Encoder

        setup, folder = self._setup, self._setup.folder
        self._row(special_row(folder, self._encoder))
        self._row(prompt_row(self._prompts, self._encoder))
        with_images = [prompt for prompt in self._prompts if prompt.images]
        needed = self._config.environment is not None
        encoder = setup.encoder if needed else Encoder(folder, setup.media, tools=[SENTINEL])
        image = with_images[0].images[0] if with_images else None
        for row in turn_rows(encoder, folder, image, needed=needed):
            self._row(row)

    def _start(self) -> None:
        from mmrl.cluster.launch import start_engine
        from mmrl.engine.spec import EngineSpec

        setup, begin = self._setup, time.monotonic()
        most = max((len(prompt.images) for prompt in self._prompts), default=0)
        parts = (self._config, setup.folder, setup.media, setup.algorithm, most, setup.with_sampler)
        self._engine = start_engine(EngineSpec(*parts, teachers=setup.teachers, critic=setup.critic))
        about = self._engine.describe()
        names = [str(about[key]) for key in ("device_name", "sampler", "learner", "attention", "model_type")]
        ranks = self._config.cluster.num_ranks
        found = f"{', '.join(names)}, {self._engine.precision}, {ranks} rank{'s' * (ranks > 1)}"
        self._emit(Finding("engine", "audit: engines", "ok", f"{found}; ready after {time.monotonic() - begin:.0f} s"))

    def _cheap(self) -> None:
        """The probes with which a run begins."""
        for row in cheap_rows(self._engine, self._encoder, self._config, total_tokens=inf):
            self._row(row)

    def _inspect(self, when: str) -> None:
        if not self._setup.with_sampler:
            return
        once = [prompt for prompt in self._prompts if len({ref.hash for ref in prompt.images}) == len(prompt.images)]
        found = self._engine.inspect(once)
        if when == "before an update":
            for row in image_rows(found.images, self._engine.precision):
                self._row(row)
        self._row(weight_row(found.weights, when))

    def _update(self) -> None:
        """One optimizer step on the probes, with rewards that alternate; none where no probe fits."""
        if not self._prompts:
            return
        setup = self._setup
        groups = self._groups()
        samples = [rollout for group in groups for rollout in group.rollouts]
        with self._engine.learning() as learner:
            trained = learner.network(setup.algorithm.network)

            def numbers() -> list[FloatArray]:
                return [trained.final_values(samples)] if setup.trains_reward_model else trained.score(samples)

            before = numbers()
            finished(learn(groups, setup.algorithm, learner, LearnSettings.of(self._config, frozenset(), 1)))
            moved = Gap.between(before, numbers())
        self._row(moved_row(moved, self._engine.precision, "scores" if setup.trains_reward_model else "log-probs"))

    def _after(self) -> None:
        if not self._prompts:
            return
        self._inspect("after an update")
        if (scores := scores_of(self._engine, self._encoder, self._config, total_tokens=inf)) is not None:
            for row in worst_of_each([row for row in score_rows(scores) if not row.probe.startswith(SIGHT)]):
                self._row(row)
            return
        if (found := probed(self._engine, self._encoder, self._config, total_tokens=inf)) is not None:
            for row in worst_of_each([*agreement_rows(found), *value_rows(found)]):
                self._row(row)
            for row in teacher_rows(found, self._lessons):
                self._row(row)

    @cached_property
    def _lessons(self) -> list[Lesson]:
        return lessons(self._config.reference.models, [folder.family.vision for folder in self._setup.teachers])

    def _groups(self) -> list[ScoredGroup]:
        setup, sampler = self._setup, self._config.sampler
        prompts = list(taught(self._prompts, self._lessons))
        if not setup.step_source.samples:
            needs = setup.algorithm.needs()
            return [setup.step_source.group(prompt, needs, self._encoder) for prompt in prompts]
        requests = [
            SamplingRequest(prompt, sampler.group_size, sampler.temperature, sampler.max_new_tokens, seed=index << 16)
            for index, prompt in enumerate(prompts)
        ]
        with self._engine.sampling() as sampling:
            groups = dict(sampling.generate(requests))
        names, greedy = [spec.metric for spec in self._config.rewards], setup.algorithm.needs().greedy_rollout
        return [alternating(groups[index], names, greedy=greedy) for index in range(len(requests))]


def worst_of_each(rows: Sequence[ProbeRow]) -> Iterator[ProbeRow]:
    """The row nearest to its bound of each pair of computations; rows of a pair differ in the prompt."""
    pairs: dict[str, list[ProbeRow]] = {}
    for row in rows:
        pairs.setdefault(row.probe.partition(", ")[0], []).append(row)
    for pair, own in pairs.items():
        worst = max(own, key=lambda row: (row.verdict == "bad", row.ratio))
        prompt = worst.probe.partition(", ")[2]
        found = f"{worst.found}, on the worst of {len(own)} prompts ({prompt})"
        yield replace(worst, probe=f"{pair}, after an update", found=found)


def audited(config: Config) -> Config:
    """The run's config with few short completions, and one optimizer step whose effect every type shows."""
    values = config.model_dump(mode="json")
    sampler, learner, data = values["sampler"], values["learner"], values["data"]
    sampler["group_size"] = min(sampler["group_size"], GROUP_SIZE)
    sampler["max_new_tokens"] = min(sampler["max_new_tokens"], NEW_TOKENS)
    learner |= {"lr": RATES[config.model.lora is not None], "warmup_steps": 0, "schedule": "constant"}
    learner |= {"minibatches": 1, "epochs": 1}
    if values["critic"]:
        values["critic"] |= {"lr": learner["lr"], "pretrain_steps": 0}
    data["max_prompt_tokens"] = max(data["max_prompt_tokens"], PROMPT_TOKENS)
    return from_mapping(values)


def _answer(error: MMRLError) -> str:
    """Where, what is possible and what to do, on one line."""
    parts = [error.where, f"possible: {error.possible}" if error.possible else "", error.remedy]
    return "; ".join(filter(None, parts))


def main(config: str, path: str) -> None:
    """Audit the run of a config, each row a line of the file at ``path``."""
    from mmrl.cluster.process import prepare_process

    prepare_process()
    warnings.simplefilter("ignore")
    values = json.loads(Path(config).read_text("utf-8"))
    with open(path, "a", encoding="utf-8") as file, tempfile.TemporaryDirectory() as folder:

        def emit(finding: Finding) -> None:
            print(json.dumps(asdict(finding)), file=file, flush=True)

        try:
            audit = Audit(from_mapping(values), Path(folder), emit)
        except MMRLError as error:
            emit(Finding("engine", "audit: config", "bad", error.what, _answer(error)))
            return
        audit.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
