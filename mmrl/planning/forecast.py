"""What a run will take: parameters, memory of each rank, tokens of a step and, where a device may be tried, seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.checking.budget import gigabytes
from mmrl.checking.report import Report
from mmrl.config import Config
from mmrl.engine import device
from mmrl.engine.collation import shares_prefix
from mmrl.engine.counting import training_of
from mmrl.engine.shape import model_shape
from mmrl.errors import ResourceError
from mmrl.media import normalised_size
from mmrl.ops.cost import Training, Work
from mmrl.ops.memory import activations, cache_bytes_per_token, states
from mmrl.plan import RunPlan
from mmrl.planning.calibration import calibrate, estimate
from mmrl.planning.workload import Example, Workload, workload
from mmrl.types import Prompt

SAMPLED = 256
"""Training prompts whose images are looked at, evenly spread over the data."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What a config does not say.

    Attributes:
        memory_bytes: Of the device that each rank will have, a GPU; None for the device at hand.
        completion_tokens: Of every completion; None for the most there may be.
        measure: Whether to take small steps on the device at hand.
    """

    memory_bytes: int | None = None
    completion_tokens: int | None = None
    measure: bool = False


def forecast(config: Config, media_folder: Path, assumptions: Assumptions) -> Report:
    """Tell what the run takes.

    Args:
        media_folder: A temporary folder for images.

    Raises:
        MMRLError: The config does not fit its plugins, model or data.
    """
    return _Forecast(config, media_folder, assumptions).report


class _Forecast:
    def __init__(self, config: Config, media_folder: Path, assumptions: Assumptions) -> None:
        self.config, self.assumptions, self.report = config, assumptions, Report()
        self.plan = RunPlan(config, media_folder, with_weights=assumptions.measure)
        self.kind: device.DeviceKind = "cuda" if assumptions.memory_bytes is not None else device.detect()
        self.precision = device.precision(self.kind, config.model.dtype)
        self.width = 2 if self.precision == "bfloat16" else 4
        self.samples = self.plan.algorithm.source == "rollouts"
        self.group_size = config.sampler.group_size if self.samples else 1
        self.report.warnings += [*self.plan.warnings, *self.plan.model_warnings]
        self.shape = model_shape(self.plan.folder.config)
        self._model()
        self._data()
        self._step()
        self._learner()
        if self.plan.with_sampler:
            self._sampler()
        if assumptions.measure:
            self._time()

    @cached_property
    def trained(self) -> int:
        return sum(trained for trained, _ in self.plan.part_sizes.values())

    @cached_property
    def frozen(self) -> int:
        return sum(frozen for _, frozen in self.plan.part_sizes.values())

    @cached_property
    def training(self) -> Training:
        trained = {part: count for part, (count, _) in self.plan.part_sizes.items()}
        return training_of(trained, adapted=self.config.model.lora is not None)

    @cached_property
    def examples(self) -> list[Example]:
        """Training prompts, evenly spread over the data."""
        source = self.plan.training
        places = np.unique(np.linspace(0, len(source) - 1, min(len(source), SAMPLED)).astype(int)).tolist()
        return [self._example(source[place], source.lengths[place]) for place in places]

    def _example(self, prompt: Prompt, tokens: int) -> Example:
        grid, merge = self.plan.media.grid, self.shape.tower.merge if self.shape.tower is not None else 1
        side = grid.factor // merge
        sizes = [normalised_size(raw, grid) for raw in prompt.images]
        longest = self.assumptions.completion_tokens or self.config.sampler.max_new_tokens
        if not self.samples:
            encoder = self.plan.encoder
            longest = len(encoder.demonstrate(encoder.encode(prompt)).token_ids)
        return Example(tokens, longest, tuple((1, height // side, width // side) for width, height in sizes))

    def _workload(self, examples: Sequence[Example]) -> Workload:
        share = shares_prefix(self.config.learner, self.plan.folder)
        return workload(self.config, self.shape, examples, group_size=self.group_size, share=share)

    @cached_property
    def work(self) -> Workload:
        return self._workload(self.examples)

    def _model(self) -> None:
        parts = {
            part: {"trained": trained, "frozen": frozen} for part, (trained, frozen) in self.plan.part_sizes.items()
        }
        lines = [
            f"{part:<10} {_millions(trained)} trained, {_millions(frozen)} frozen"
            for part, (trained, frozen) in self.plan.part_sizes.items()
        ]
        head = f"{self.plan.folder.family.model_type}, {_millions(self.trained + self.frozen)} parameters"
        kind = "GPU" if self.kind == "cuda" else "CPU"
        lines = [f"{head}, {self.precision} on a {kind}", *lines]
        data = {"type": self.plan.folder.family.model_type, "precision": self.precision, "parts": parts}
        self.report.add("model", data, lines)

    def _data(self) -> None:
        prompts = [example.prompt_tokens for example in self.examples]
        patches = [sum(t * h * w for t, h, w in example.grids) for example in self.examples]
        merged = self.shape.tower.merge**2 if self.shape.tower is not None else 1
        found: dict[str, Any] = {
            "prompts_looked_at": len(prompts),
            "prompt_tokens": _spread(prompts),
            "image_tokens": _spread([count // merged for count in patches]),
            "patches": _spread(patches),
        }
        lines = [
            f"{len(prompts)} of {len(self.plan.training)} prompts: mean {np.mean(prompts):.0f} tokens, most "
            f"{max(prompts)}",
        ]
        if any(patches):
            tokens = found["image_tokens"]
            lines.append(
                f"of them for images: mean {tokens['mean']:g}, most {tokens['max']}; patches: mean "
                f"{found['patches']['mean']:g}, most {found['patches']['max']}"
            )
        self.report.add("data", found, lines)

    def _step(self) -> None:
        work, config = self.work, self.config
        one, unshared = (
            work.total,
            sum(example.prompt_tokens + example.completion_tokens for example in self._step_examples()),
        )
        completion = self.examples[0].completion_tokens if self.samples else _spread(self._lengths())["mean"]
        flops = work.updates * self.shape.update_flops(one, self.training)
        data = {
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
        lines = [
            f"{data['completions']} completions of {completion:g} tokens ({assumed}): {unshared} tokens with their "
            f"prompts, {one.tokens} as packed for each optimizer step",
            f"{work.updates} optimizer step(s) of {work.microbatches} micro-batch(es) a rank; {flops / 1e12:.4g} TFLOP",
        ]
        self.report.add("step", data, lines)

    def _lengths(self) -> list[int]:
        return [example.completion_tokens for example in self.examples]

    def _step_examples(self) -> list[Example]:
        """One for each completion of a step."""
        prompts = range(self.config.trainer.prompts_per_step)
        return [self.examples[number % len(self.examples)] for number in prompts for _ in range(self.group_size)]

    def _activations(self, row: Work, checkpointing: bool) -> int:
        logits = 4 * min(device.LOGITS_CHUNK_BYTES[self.kind] // 4, row.predicted * self.plan.folder.vocabulary.size)
        return activations(
            self.shape,
            row,
            width=self.width,
            checkpointing=checkpointing,
            tower_trained=self.training.reaches("vision"),
            logits_bytes=logits * (1 if self.width == 4 else 2),
        )

    def _learner(self) -> None:
        config, needs = self.config, self.plan.algorithm.needs()
        held = states(
            self.trained,
            self.frozen,
            width=self.width,
            zero_stage=config.learner.zero_stage,
            ranks=config.cluster.ranks,
            offload=config.learner.offload,
            reference=needs.reference_logprobs and config.model.lora is None,
            fused=self.kind == "cpu",
        )
        rows = [row for rank in self.work.rows for row in rank]
        taken = {
            checkpointing: max(self._activations(row, checkpointing) for row in rows) for checkpointing in (False, True)
        }
        peak = held.peak(taken[config.model.gradient_checkpointing])
        data = {
            **asdict(held),
            "activations": taken[config.model.gradient_checkpointing],
            "activations_without_checkpointing": taken[False],
            "activations_with_checkpointing": taken[True],
            "peak": peak,
        }
        lines = [
            f"at most {gigabytes(peak)} on each of {config.cluster.ranks} rank(s), an estimate:",
            f"weights {gigabytes(held.weights)}, float32 copies {gigabytes(held.master)}, optimizer "
            f"{gigabytes(held.optimizer)}, gradients {gigabytes(held.gradients)}",
            f"activations of the largest micro-batch: {gigabytes(taken[False])}, with gradient_checkpointing "
            f"{gigabytes(taken[True])} ({'on' if config.model.gradient_checkpointing else 'off'})",
            f"optimizer step {gigabytes(held.step)}",
        ]
        lines += [f"gathered weights at most {gigabytes(held.gathered)}"] if held.gathered else []
        lines += [f"reference model {gigabytes(held.reference)}"] if held.reference else []
        lines += [f"in the host's memory {gigabytes(held.host)}"] if held.host else []
        self.report.add("learner", data, lines)
        if (memory := self._memory()) is not None and peak > memory:
            self.report.blame(
                ResourceError(
                    f"an update may take {gigabytes(peak)} of each rank's {gigabytes(memory)}",
                    where="learner",
                    remedy="lower learner.tokens_per_microbatch, turn model.gradient_checkpointing on, raise "
                    "learner.zero_stage and cluster.ranks, train adapters (model.lora), or set learner.offload",
                )
            )
        self.resident = held.resident

    def _memory(self) -> int | None:
        """Of the device of a rank; of a CPU nothing is known of what else the machine is to hold."""
        if self.assumptions.memory_bytes is not None:
            return self.assumptions.memory_bytes
        found = device.free_memory_bytes(self.kind)
        return None if found is None else found[1]

    def _sampler(self) -> None:
        config, sampler = self.config, self.config.sampler
        weights = (self.trained + self.frozen) * self.width // sampler.tensor_parallel_size
        if config.model.lora is not None:  # the sampler has the merged weights
            weights = self.frozen * self.width // sampler.tensor_parallel_size
        per_token = cache_bytes_per_token(self.shape, width=self.width, tensor_parallel=sampler.tensor_parallel_size)
        longest = max(self.plan.training.lengths) + sampler.max_new_tokens
        memory, cache = self._memory(), None
        if sampler.name != "vllm":
            cache = None
        elif self.kind == "cpu":
            given = sampler.engine.get("kv_cache_memory_bytes")
            cache = given if isinstance(given, int) else device.CPU_KV_CACHE_BYTES
        elif memory is not None:
            cache = int(memory * sampler.memory_fraction) - weights
        data: dict[str, Any] = {
            "weights": weights,
            "cache_per_token": per_token,
            "cache": cache,
            "longest_sequence": longest,
            "sequences": None if cache is None else max(cache, 0) // (per_token * longest),
        }
        lines = [f"weights {gigabytes(weights)}, cache {per_token} bytes a token"]
        if sampler.name == "vllm" and cache is not None:
            lines.append(
                f"cache of {gigabytes(max(cache, 0))} holds {data['sequences']} sequences of {longest} tokens, the "
                "longest there may be; more wait"
            )
        elif cache is None:
            lines.append("how many sequences fit: name the memory of a rank's GPU (--memory GB)")
        self.report.add("sampler", data, lines)
        if self.kind == "cuda" and memory is not None and sampler.name == "vllm":
            self._fit_together(memory, cache or 0, per_token * longest)

    def _fit_together(self, memory: int, cache: int, sequence: int) -> None:
        """Weights and optimizer stay while vLLM samples."""
        fraction = self.config.sampler.memory_fraction
        if self.resident + fraction * memory > memory:
            self.report.blame(
                ResourceError(
                    f"what the learner keeps takes {gigabytes(self.resident)}, and sampler.memory_fraction leaves it "
                    f"{gigabytes(int((1 - fraction) * memory))}",
                    where=f"sampler.memory_fraction: {fraction:g}",
                    remedy="lower it, raise learner.zero_stage and cluster.ranks, or set learner.offload",
                )
            )
        if cache < sequence:
            self.report.blame(
                ResourceError(
                    "not one sequence of the longest fits beside the sampler's weights",
                    where=f"sampler.memory_fraction: {fraction:g}",
                    remedy="raise it, or lower data.max_prompt_tokens or sampler.max_new_tokens",
                )
            )

    def _time(self) -> None:
        found = calibrate(self.config, self.plan)
        examples = self.examples
        if self.samples:
            mean = max(round(found.completion_tokens), 1)
            examples = [replace(example, completion_tokens=mean) for example in examples]
        work = self._workload(examples)
        seconds = estimate(self.config, self.shape, self.training, work, found)
        data = {"measured": asdict(found), **{f"{n}_s": v for n, v in asdict(seconds).items()}, "step_s": seconds.step}
        lines = [
            f"about {seconds.step:.3g} s a step, an estimate: generate {seconds.generate:.3g}, log-probs "
            f"{seconds.logprob:.3g}, update {seconds.update:.3g}, weight sync {seconds.sync:.3g}",
            f"from {found.prompts} prompts on one rank here: completions of {found.completion_tokens:.0f} tokens, "
            f"{found.update_flops_per_s / 1e9:.4g} GFLOP/s in the update; scoring and evaluations come on top",
        ]
        self.report.add("time", data, lines)


def _millions(count: int) -> str:
    return f"{count / 1e9:.3g} G" if count >= 1e9 else f"{count / 1e6:.3g} M"


def _spread(values: Sequence[int]) -> dict[str, float]:
    return {"mean": round(float(np.mean(values)), 1), "max": max(values)}
