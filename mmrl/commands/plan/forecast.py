"""Forecasts a run: parameters, memory of each rank, tokens of a step and, where a device may be tried, seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.commands.plan import split
from mmrl.commands.plan.episodes import limit_lines, limits, longest_episode, observed_grids
from mmrl.commands.plan.evaluations import evaluation_time
from mmrl.commands.plan.networks import model_of, second_network
from mmrl.commands.plan.proposal import propose
from mmrl.commands.plan.shared_rows import check_gpus, oversized_image, shared_rows
from mmrl.commands.plan.workload import Example, Grid, Workload, given_example, group_size_of, workload
from mmrl.config.sections import Config
from mmrl.data.images import normalised_size
from mmrl.data.prompts import PromptSource
from mmrl.engine import device
from mmrl.engine.footprint import KINDS, PHASES, Footprint, PlannedModel, bound
from mmrl.engine.learner.collation import shares_prefix
from mmrl.engine.trained_sizes import update_flops
from mmrl.errors import DataError, HubError, HubUnreachableError, ResourceError, plural
from mmrl.runs.budget import gigabytes
from mmrl.runs.run_warnings import config_warnings, model_warnings
from mmrl.runs.setup import RunSetup
from mmrl.system.report import Report
from mmrl.types import Prompt

SAMPLED = 256
"""Training prompts whose images are looked at, evenly spread over the data."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Facts that a config lacks.

    Attributes:
        gpus: Number of ranks, each with a GPU; None for the config's.
        memory_bytes: Memory of each rank's GPU; None for the device at hand.
        completion_tokens: Length of every completion; None for the longest allowed.
        measure: True to take small steps on the device at hand.
    """

    gpus: int | None = None
    memory_bytes: int | None = None
    completion_tokens: int | None = None
    measure: bool = False


def forecast(config: Config, media_folder: Path, assumptions: Assumptions) -> Report:
    """Forecast a run.

    Args:
        media_folder: A temporary folder for images.

    Raises:
        MMRLError: The config does not fit its plugins, model or data.
    """
    return _Forecast(config, media_folder, assumptions).report


class _Forecast:
    def __init__(self, config: Config, media_folder: Path, assumptions: Assumptions) -> None:
        self.config, self.assumptions, self.report = config, assumptions, Report()
        self._cluster_changes: dict[str, Any] = {}
        if assumptions.gpus is not None and assumptions.gpus != config.cluster.num_ranks:
            cluster: dict[str, Any] = {"name": "ray" if assumptions.gpus > 1 else "local", "ranks": assumptions.gpus}
            if config.cluster.is_split:
                cluster = split.divided(config.cluster, assumptions.gpus, config.sampler.ranks_together)
            check_gpus(config.learner, assumptions.gpus, cluster.get("learner_ranks", assumptions.gpus))
            self._cluster_changes = {f"cluster.{name}": value for name, value in cluster.items()}
            self.config = config = config.model_copy(update={"cluster": config.cluster.model_copy(update=cluster)})
        setup = self.setup = RunSetup(config, media_folder, with_weights=assumptions.measure)
        self.kind: device.DeviceKind = "cuda" if assumptions.memory_bytes is not None else device.detect()
        self.samples = self.setup.step_source.samples
        self.texts = self.setup.step_source.texts.replace("comparisons", "candidates")
        self.group_size = group_size_of(config, setup.algorithm.needs(), samples=self.samples)
        self.report.warnings += [*config_warnings(self.setup), *model_warnings(self.setup)]
        kind = "GPU" if self.kind == "cuda" else "CPU"
        if (error := self.setup.refusal_on(self.kind)) is not None:
            self.report.warnings.append(f"{error.where}: {error.what}; such a run is refused on a {kind}")
        others = setup.teachers, setup.critic
        self.model = PlannedModel(config, setup.folder, setup.part_sizes, setup.algorithm, self.kind, *others)
        self.shape = self.model.shape
        self._works: dict[tuple[int, int], Workload] = {}
        self.report.add("model", *model_of(setup, self.model, kind))
        self._data()
        self._step()
        self._learner()
        if self.setup.with_sampler:
            self._sampler()
        self._host()
        if self.kind == "cuda" and (memory := self._memory()) is not None:
            self._fit(memory)
        if assumptions.measure:
            self._time()

    @cached_property
    def examples(self) -> list[Example]:
        """Training prompts, evenly spread over the data."""
        if (source := self.source) is None:
            return [self._longest_example()]
        places = np.unique(np.linspace(0, len(source) - 1, min(len(source), SAMPLED)).astype(int)).tolist()
        if source.is_scanned:
            return [self._example(source[place], source.lengths[place]) for place in places]
        found = (self._measured(source, place) for place in places)
        return [example for example in found if example is not None] or [self._longest_example()]

    def _measured(self, source: PromptSource, place: int) -> Example | None:
        """A row that nobody has measured before; None if it cannot be used."""
        tokens = self.setup.encoder.num_tokens
        try:
            return source.make(place, lambda prompt: self._example(prompt, tokens(prompt)))
        except HubError:
            raise
        except DataError:
            return None

    @cached_property
    def source(self) -> PromptSource | None:
        """The training prompts; None, with a note, if their hub cannot be asked."""
        try:
            return self.setup.prompts
        except HubUnreachableError as error:
            self.report.notes.append(f"{error}\n  prompts of data.max_prompt_tokens are assumed")
            return None

    @cached_property
    def longest_prompt(self) -> int:
        """In tokens."""
        return self.config.data.max_prompt_tokens if self.source is None else self.source.longest

    def _longest_example(self) -> Example:
        """The longest prompt allowed; most of its tokens are an image's if the model reads any."""
        data = self.config.data
        grids: tuple[Grid, ...] = ()
        if self.setup.folder.family.vision:
            grids = (self.setup.folder.images.largest_grid(data.max_pixels, data.max_prompt_tokens * 3 // 4),)
        return Example(data.max_prompt_tokens, self._completion_tokens, grids, self._inserted, self._observed)

    @property
    def _completion_tokens(self) -> int:
        return self.assumptions.completion_tokens or longest_episode(self.config)

    @property
    def _inserted(self) -> int:
        return max(self._completion_tokens - self.config.sampler.max_new_tokens, 0) if self.samples else 0

    @cached_property
    def _observed(self) -> tuple[Grid, ...]:
        return observed_grids(self.config, self.setup.folder) if self.samples else ()

    def _example(self, prompt: Prompt, tokens: int) -> Example:
        sizes = [normalised_size(raw, self.setup.media.grid) for raw in prompt.images]
        grids = tuple(self.setup.folder.images.grid(*size) for size in sizes)
        if self.samples:
            return Example(tokens, self._completion_tokens, grids, self._inserted, self._observed)
        encoder, needs = self.setup.encoder, self.setup.algorithm.needs()
        group = self.setup.step_source.group(encoder.encode(prompt), needs, encoder)
        return given_example(group, grids, self.group_size)

    def _workload(self, config: Config, examples: Sequence[Example]) -> Workload:
        needs, share = self.setup.algorithm.needs(), shares_prefix(config.learner, self.setup.folder)
        return workload(config, self.shape, examples, needs, group_size=self.group_size, share=share)

    def _work(self, config: Config) -> Workload:
        """The workload of a config of which only the micro-batches, and the ranks that share them, may differ."""
        sizes = config.learner.tokens_per_microbatch, config.learner.sequence_parallel_size
        if sizes not in self._works:
            self._works[sizes] = self._workload(config, self.examples)
        return self._works[sizes]

    def _data(self) -> None:
        prompts = [example.prompt_tokens for example in self.examples]
        patches = [sum(t * h * w for t, h, w in example.grids) for example in self.examples]
        merged = self.shape.tower.merge**2 if self.shape.tower is not None else 1
        known = "unknown" if self.source is None else len(self.source)
        found: dict[str, Any] = {
            "prompts_looked_at": len(prompts),
            "prompt_tokens": _spread(prompts),
            "image_tokens": _spread([count // merged for count in patches]),
            "patches": _spread(patches),
        }
        lines = [f"{len(prompts)} of {known} prompts: mean {np.mean(prompts):.0f} tokens, most {max(prompts)}"]
        if any(patches):
            tokens = found["image_tokens"]
            lines.append(
                f"of them for images: mean {tokens['mean']:g}, most {tokens['max']}; patches: mean "
                f"{found['patches']['mean']:g}, most {found['patches']['max']}"
            )
        self.report.add("data", found, lines)

    def _step(self) -> None:
        work, config = self._work(self.config), self.config
        one = work.total
        shown = [self.examples[number % len(self.examples)] for number in range(config.trainer.prompts_per_step)]
        unshared = sum(self.group_size * each.prompt_tokens + sum(self._lengths([each])) for each in shown)
        completion = self.examples[0].completion_tokens if self.samples else _spread(self._lengths())["mean"]
        flops = work.updates * update_flops(self.model.networks, one)
        data: dict[str, Any] = {
            "completions": config.trainer.prompts_per_step * self.group_size,
            "completion_tokens": completion,
            "sample_tokens": unshared,
            "updates": work.updates,
            "row_tokens_per_update": one.tokens,
            "patches_per_update": one.patches,
            "microbatches_per_update": work.microbatches,
            "flops": flops,
        }
        assumed = "assumed, each" if self.samples else "mean"
        what = "episodes" if self.samples and config.environment is not None else self.texts
        lines = [
            f"{data['completions']} {what} of {completion:g} tokens ({assumed}): {unshared} tokens with their "
            f"prompts, {one.tokens} as packed for each optimizer step",
            f"{work.updates} optimizer step(s) of {work.microbatches} micro-batch(es) a rank; {flops / 1e12:.4g} TFLOP",
        ]
        for each in self.model.networks[1:]:
            own = work.updates * each.update_flops(one)
            lines[-1] += f", of them {own / 1e12:.4g} the {each.role}'s, which takes as many steps"
        if config.environment is not None and self.samples:
            episode = limits(config, config.environment, self._observed, self.setup.algorithm.needs().branches)
            data, lines = {**data, "episode": episode}, [*lines, *limit_lines(episode)]
        self.report.add("step", data, lines)
        if config.learner.sequence_parallel_size > 1:
            self.report.add("shared_rows", *shared_rows(config, self.model, work.parts))

    def _lengths(self, examples: Sequence[Example] | None = None) -> list[int]:
        """Tokens of each completion of the examples, by default of all."""
        return [n for each in examples or self.examples for n in each.completions(self.group_size)]

    def _footprint(self, config: Config) -> Footprint:
        longest = self.longest_prompt + config.max_sampled_tokens
        return self.model.footprint(config, self._work(config).parts, longest, samples=self._shares_device)

    def _learner(self) -> None:
        config, found = self.config, self.footprint
        held = found.states
        taken = {
            checkpointing: max(
                self.model.activations(part, checkpointing=checkpointing) for part in self._work(config).parts
            )
            for checkpointing in (False, True)
        }
        data = {
            **asdict(held),
            "activations": found.activations,
            "activations_without_checkpointing": taken[False],
            "activations_with_checkpointing": taken[True],
            "peak": found.peak,
        }
        lines = [
            f"at most {gigabytes(found.peak)} on each of {config.cluster.num_learner_ranks} rank(s), an estimate:",
            f"weights {gigabytes(held.weights)}, float32 copies {gigabytes(held.master)}, optimizer "
            f"{gigabytes(held.optimizer)}, gradients {gigabytes(held.gradients)}, buckets {gigabytes(held.buckets)}",
            f"activations of the largest micro-batch: {gigabytes(taken[False])}, with gradient_checkpointing "
            f"{gigabytes(taken[True])} ({'on' if config.model.gradient_checkpointing else 'off'})",
            f"optimizer step {gigabytes(held.step)}",
        ]
        lines += [f"gathered weights at most {gigabytes(held.gathered)}"] if held.gathered else []
        for each in self.model.networks[1:]:
            data[each.role], told = second_network(self.model, each, self.config)
            lines += told
        if others := self.model.frozen_models:
            name = "reference model" if others[0].is_initial else plural(len(others), "teacher")
            more = f", while it computes {gigabytes(held.reference_used)} more" if held.reference_used else ""
            lines.append(f"{name} {gigabytes(held.reference)}{more}")
        self.report.add("learner", data, lines)

    @cached_property
    def footprint(self) -> Footprint:
        return self._footprint(self.config)

    def _memory(self) -> int | None:
        """Memory of a rank's device; None on a CPU, whose memory has other uses too."""
        if self.assumptions.memory_bytes is not None:
            return self.assumptions.memory_bytes
        return device.total_memory_bytes(self.kind)

    def _sampler(self) -> None:
        sampler = self.config.sampler
        weights = self.footprint.sampler_weights
        per_token = self.model.cache_bytes_per_token(self.config)
        longest = self.longest_prompt + self.config.max_sampled_tokens
        memory, cache = self._memory(), None
        if sampler.name != "vllm":
            cache = None
        elif self.kind == "cpu":
            given = sampler.engine.get("kv_cache_memory_bytes")
            cache = given if isinstance(given, int) else device.CPU_KV_CACHE_BYTES
        elif memory is not None:
            cache = int(memory * sampler.gpu_memory_utilization) - self.footprint.least_share(0)
        data: dict[str, Any] = {
            "weights": weights,
            "cache_per_token": per_token,
            "cache": cache,
            "longest_sequence": longest,
            "sequences": None if cache is None else max(cache, 0) // self.footprint.sequence,
        }
        lines = [f"weights {gigabytes(weights)}, cache {per_token} bytes a token"]
        if sampler.name == "vllm" and cache is not None:
            lines.append(
                f"cache of {gigabytes(max(cache, 0))} holds {data['sequences']} sequences of {longest} tokens, the "
                "longest there may be; more wait"
            )
        elif sampler.name == "vllm":
            lines.append("how many sequences fit: name the memory of a rank's GPU (--memory GB)")
        if self.kind == "cuda" and sampler.name == "vllm":
            lines.append(
                f"beside it {gigabytes(self.footprint.sampler_extra)} are allowed for activations and CUDA graphs"
            )
        self.report.add("sampler", data, lines)

    def _host(self) -> None:
        """Report what a rank keeps in its machine's memory."""
        found = self.model.host(self.config, samples=self._shares_device)
        ranks, lines = self.config.cluster.num_learner_ranks, list[str]()
        data: dict[str, Any] = {**asdict(found), "needed": found.needed}
        if found.kept:
            what = f"{gigabytes(found.needed)} of its machine's memory for each of {ranks} rank(s)"
            lines.append(f"{what}: {found.parts()}")
        if self._shares_device and found.kept:
            asleep = "drops its weights, and backs up the rest" if found.discards else "backs up its weights too"
            lines.append(f"a sleeping vLLM {asleep}; page-locked tensors are as large as torch makes them")
        if self.config.cluster.is_split:
            data["snapshots"], line = split.snapshots(self.config, self.model)
            lines.append(line)
        if lines:
            self.report.add("host", data, lines)

    @property
    def _shares_device(self) -> bool:
        """True if vLLM takes turns with the learner on a GPU."""
        samples = self.setup.with_sampler and self.config.sampler.name == "vllm"
        return self.kind == "cuda" and samples and not self.config.cluster.is_split

    def _fit(self, memory: int) -> None:
        """Report a GPU's largest phase, and the settings that fit."""
        config, found, samples = self.config, self.footprint, self._shares_device
        share = int(config.sampler.gpu_memory_utilization * memory)
        phases = found.learning() | ({"sample": found.sampling(share)} if samples else {})
        phase, kind = bound(phases)
        most = sum(phases[phase].values())
        parts = ", ".join(
            f"{KINDS.get(name, name)} {gigabytes(count)}"
            for name, count in sorted(phases[phase].items(), key=lambda pair: -pair[1])
        )
        lines = [f"at most {gigabytes(most)} of {gigabytes(memory)} on each GPU, in {PHASES[phase]}: {parts}"]
        lines += [f"{PHASES[name]} {gigabytes(sum(kinds.values()))}" for name, kinds in phases.items() if name != phase]
        data = {"memory": memory, "most": most, "phase": phase, "kind": kind, "phases": phases}
        self.report.add("memory", data, lines)
        if config.cluster.is_split:
            try:
                self.report.add("sampling", *split.sampler_alone(config, found, memory))
            except ResourceError as error:
                self.report.blame(error)
        try:
            together = self.group_size if self.setup.algorithm.needs().whole_groups else 1
            longest = max(sum(self._lengths([example])[:together]) for example in self.examples)
            smallest = self.longest_prompt + longest
            take, ranks = self._footprint, self.model.sequence_sizes(config)
            proposal = propose(config, self.shape, take, memory, samples=samples, smallest=smallest, row_ranks=ranks)
        except ResourceError as error:
            grids = [grid for example in self.examples for grid in (*example.grids, *example.observed)]
            self.report.blame(oversized_image(config, self.model, grids, memory, samples=samples) or error)
            return
        changes = self._cluster_changes | dict(proposal.changes)
        said = " ".join(f"{key}={_plain(value)}" for key, value in changes.items())
        if not proposal.changes:
            self.report.show("", [f"it fits: {gigabytes(memory - most)} of each GPU are left"])
            said = f"{said}, for as many GPUs" if said else "nothing needs to change"
        self.report.add("proposal", changes, [said])
        if proposal.changes:
            self._too_much(memory, most, phase, changes)

    def _too_much(self, memory: int, most: int, phase: str, changes: Mapping[str, Any]) -> None:
        fraction = self.config.sampler.gpu_memory_utilization
        if most > memory:
            said = f"{PHASES[phase]} may take {gigabytes(most)} of each GPU's {gigabytes(memory)}"
        else:
            said = "not one sequence of the longest fits beside the sampler's weights"
        self.report.blame(
            ResourceError(
                said,
                where=f"sampler.gpu_memory_utilization: {fraction:g}"
                if phase == "sample" or most <= memory
                else "learner",
                remedy="set " + ", ".join(f"{key}={_plain(value)}" for key, value in changes.items()),
            )
        )

    def _time(self) -> None:
        from mmrl.commands.plan.calibration import calibrate, estimate  # the engines

        found = calibrate(self.config, self.setup)
        examples, mean = self.examples, max(round(found.completion_tokens) + self._inserted, 1)
        if self.samples:
            examples = [replace(example, completion_tokens=mean) for example in examples]
        seconds = estimate(self.config, self.model.networks, self._workload(self.config, examples), found)
        data = {"measured": asdict(found), **{f"{n}_s": v for n, v in asdict(seconds).items()}, "step_s": seconds.step}
        learning = f"log-probs {seconds.logprob:.3g}, update {seconds.update:.3g}"
        parts = f"generate {seconds.generate:.3g}, {learning}, weight sync {seconds.sync:.3g}"
        lines = [
            f"about {seconds.step:.3g} s a step, an estimate: {parts if self.samples else learning}",
            f"from {found.prompts} prompts on one rank here: {self.texts} of {found.completion_tokens:.0f} tokens, "
            f"{found.update_flops_per_s / 1e9:.4g} GFLOP/s in the update{self.samples * '; scoring comes on top'}",
        ]
        if self.config.cluster.is_split:
            data["split"], told = split.waiting(seconds, self.config)
            data["step_s"], lines[0] = data["split"]["step_s"], told[0]
            lines += told[1:]
        completions = self.config.trainer.prompts_per_step * self.group_size
        evaluation, told = evaluation_time(self.setup, seconds.generate, completions)
        lines += told
        if self.config.environment is not None:
            lines.append("its completions had one turn; the environment, and what a turn waits for it, come on top")
        self.report.add("time", data | evaluation, lines)


def _plain(value: object) -> str:
    """A value as in an override."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _spread(values: Sequence[int]) -> dict[str, float]:
    return {"mean": round(float(np.mean(values)), 1), "max": max(values)}
