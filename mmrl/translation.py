"""A config of EasyR1 in mmrl's words, as far as that goes; of other trainers the plain numbers that are meant alike.

What a file leaves out has mmrl's defaults here and EasyR1's there: only what is written is translated.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.synonyms import spelled, synonym

_SAME: Mapping[str, str] = {
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "sampler.max_new_tokens",
    "data.image_dir": "data.image_root",
    "data.min_pixels": "data.min_pixels",
    "data.max_pixels": "data.max_pixels",
    "data.rollout_batch_size": "trainer.prompts_per_step",
    "data.seed": "trainer.seed",
    "worker.actor.max_grad_norm": "learner.max_grad_norm",
    "worker.actor.ppo_epochs": "learner.epochs",
    "worker.actor.clip_ratio_low": "algorithm.clip_low",
    "worker.actor.clip_ratio_high": "algorithm.clip_high",
    "worker.actor.clip_ratio_dual": "algorithm.dual_clip",
    "worker.actor.model.model_path": "model.path",
    "worker.actor.model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    "worker.actor.model.trust_remote_code": "model.trust_remote_code",
    "worker.actor.optim.lr": "learner.lr",
    "worker.actor.optim.weight_decay": "learner.weight_decay",
    "worker.actor.optim.lr_warmup_steps": "learner.warmup_steps",
    "worker.rollout.n": "sampler.group_size",
    "worker.rollout.temperature": "sampler.temperature",
    "worker.rollout.gpu_memory_utilization": "sampler.gpu_memory_utilization",
    "worker.rollout.tensor_parallel_size": "sampler.tensor_parallel_size",
    "worker.rollout.enforce_eager": "sampler.engine.enforce_eager",
    "worker.rollout.enable_chunked_prefill": "sampler.engine.enable_chunked_prefill",
    "worker.rollout.max_num_batched_tokens": "sampler.engine.max_num_batched_tokens",
}
"""EasyR1's keys whose values mean the same here."""

_AS_ALWAYS: Mapping[str, Any] = {
    "data.shuffle": True,
    "data.filter_overlong_prompts": True,
    "data.video_key": "videos",
    "algorithm.kl_type": "fixed",
    "worker.hybrid_engine": True,
    "worker.actor.padding_free": True,
    "worker.actor.dynamic_batching": True,
    "worker.actor.ulysses_size": 1,
    "worker.actor.optim.strategy": "adamw",
    "worker.actor.optim.lr_warmup_ratio": 0.0,
    "worker.actor.fsdp.enable_rank0_init": True,
    "worker.actor.fsdp.enable_cpu_offload": False,
    "worker.actor.offload.offload_params": False,
    "worker.actor.offload.offload_optimizer": False,
    "worker.rollout.name": "vllm",
    "worker.rollout.top_p": 1.0,
    "worker.rollout.top_k": -1,
    "worker.rollout.limit_images": 0,
    "worker.rollout.disable_tqdm": False,
    "trainer.val_before_train": True,
    "trainer.val_only": False,
    "trainer.save_model_only": False,
    "trainer.find_last_checkpoint": True,
}
"""Values that say what mmrl does anyway."""

_ALIKE = frozenset(
    {
        "model.path", "data.max_prompt_tokens", "sampler.group_size", "sampler.max_new_tokens", "sampler.temperature",
        "sampler.gpu_memory_utilization", "learner.lr", "learner.weight_decay", "learner.max_grad_norm",
        "algorithm.kl.coef", "trainer.steps", "trainer.epochs", "trainer.seed",
    }
)  # fmt: skip
"""Keys whose values are meant alike in the configs of other trainers too."""

_ESTIMATORS = {"low_var_kl": "k3", "mse": "k2", "kl": "k1"}
_MEANS = {"token": "token-mean", "seq": "seq-mean-token-mean"}


@dataclass(slots=True)
class Translation:
    """What became of a config.

    Attributes:
        values: mmrl's values by section.
        left_out: (their key, its value, what to do) of everything that was not translated.
    """

    values: dict[str, Any] = field(default_factory=dict)
    left_out: list[tuple[str, Any, str]] = field(default_factory=list)

    def lines(self) -> list[str]:
        """What was not translated, a line each."""
        return [f"{key}: {value}" + (f"  ({note})" if note else "") for key, value, note in self.left_out]


def translate(
    config: Mapping[str, Any], *, dataset: str, algorithms: Collection[str], trackers: Collection[str], near: Path
) -> Translation:
    """A config of EasyR1, or as far as its keys are meant alike of another trainer, as mmrl's.

    Args:
        config: Its nested values.
        dataset: The plugin that reads files.
        algorithms: Those that are installed; another is left out.
        trackers: Those that are installed.
        near: The folder from which relative paths count too.
    """
    return _Translator(config, dataset, algorithms, trackers, near).translation


class _Translator:
    def __init__(
        self,
        config: Mapping[str, Any],
        dataset: str,
        algorithms: Collection[str],
        trackers: Collection[str],
        near: Path,
    ) -> None:
        self._left = dict(_flat(config))
        self._algorithms, self._installed_trackers, self._near = algorithms, trackers, near
        self.translation = Translation()
        self._datasets(dataset)
        self._template()
        self._algorithm()
        self._model()
        self._learner()
        self._rewards()
        self._trainer()
        for key, ours in _SAME.items():
            if (value := self._take(key)) is not None:
                self._set(ours, value)
        self._rest()

    def _take(self, key: str) -> Any:
        return self._left.pop(key, None)

    def _set(self, key: str, value: Any) -> None:
        *parents, last = key.split(".")
        place = self.translation.values
        for parent in parents:
            place = place.setdefault(parent, {})
        place.setdefault(last, value)

    def _leave(self, key: str, value: Any, note: str) -> None:
        self.translation.left_out.append((key, value, note))

    def _datasets(self, name: str) -> None:
        columns = {"prompt": self._take("data.prompt_key"), "answer": self._take("data.answer_key")}
        images = self._take("data.image_key")
        # Their default is named though rows may have no such column; mmrl finds one of that name.
        columns |= {} if images == "images" else {"images": images}
        named = {role: column for role, column in columns.items() if column is not None}
        for part, key in (("train", "data.train_files"), ("eval", "data.val_files")):
            files = self._take(key)
            if isinstance(files, str) and files:
                path, _, split = files.partition("@")
                self._set(f"data.{part}", {"name": name, "path": path, **({"split": split} if split else {}), **named})
            elif files:
                self._leave(key, files, f"one path in data.{part}.path, and for training others in data.mix")

    def _template(self) -> None:
        path = self._take("data.format_prompt")
        if path is None:
            return
        for place in (Path(path).expanduser(), self._near / path):
            if place.is_file():
                text = place.read_text(encoding="utf-8").strip()
                self._set("data.prompt_template", re.sub(r"(\{\{[^}]*?)\bcontent\b", r"\1prompt", text))
                return
        note = "the file was not found; data.prompt_template takes it, with `prompt` in place of `content`"
        self._leave("data.format_prompt", path, note)

    def _algorithm(self) -> None:
        estimator, loss = self._take("algorithm.adv_estimator"), self._take("worker.actor.loss_type")
        loss = None if loss == "default" else loss
        for key, name in (("worker.actor.loss_type", loss), ("algorithm.adv_estimator", estimator)):
            if name is not None and spelled(str(name)) in self._algorithms:
                self._set("algorithm.name", spelled(str(name)))
            elif name is not None:
                self._leave(key, name, "no installed algorithm is called so")
        mean = self._take("worker.actor.loss_avg_mode")
        if mean in _MEANS:
            self._set("algorithm.aggregation", _MEANS[mean])
        elif mean is not None:
            self._leave("worker.actor.loss_avg_mode", mean, "see algorithm.aggregation")
        if self._take("algorithm.online_filtering"):
            self._set("algorithm.dynamic_sampling", {})
        else:
            for key in ("algorithm.filter_key", "algorithm.filter_low", "algorithm.filter_high"):
                self._take(key)
        self._penalty()

    def _penalty(self) -> None:
        in_loss, off = self._take("algorithm.use_kl_loss"), self._take("algorithm.disable_kl")
        coefficient, kind = self._take("algorithm.kl_coef"), self._take("algorithm.kl_penalty")
        if off or not coefficient:
            return
        where, estimator = "loss" if in_loss else "reward", _ESTIMATORS.get(kind)
        self._set("algorithm.kl", {"coef": coefficient, "where": where})
        if estimator is not None and (estimator == "k1") == (where == "reward"):
            self._set("algorithm.kl.estimator", estimator)
        elif kind is not None:
            self._leave("algorithm.kl_penalty", kind, f"not possible in the {where}; see algorithm.kl.estimator")

    def _model(self) -> None:
        if self._take("worker.actor.model.freeze_vision_tower"):
            self._set("model.freeze", ["vision", "projector"])
        prefix = "worker.actor.model.lora."
        rank, alpha = self._take(prefix + "rank"), self._take(prefix + "alpha")
        targets, without = self._take(prefix + "target_modules"), self._take(prefix + "exclude_modules")
        if not rank:
            return
        every = ["language"] if without and "visual" in without else ["language", "vision", "projector"]
        named = every if targets in (None, "all-linear") else [each.strip() for each in str(targets).split(",")]
        self._set("model.lora", {"rank": rank, **({} if alpha is None else {"alpha": alpha}), "targets": named})
        if without and "visual" not in without:
            self._leave(prefix + "exclude_modules", without, "name what to adapt in model.lora.targets")

    def _learner(self) -> None:
        size, batch = self._take("worker.actor.global_batch_size"), self._left.get("data.rollout_batch_size")
        if size and batch and batch % size == 0:
            self._set("learner.minibatches", batch // size)
        elif size is not None:
            self._leave("worker.actor.global_batch_size", size, "learner.minibatches divides a rollout batch")
        full = self._take("worker.actor.fsdp.enable_full_shard")
        if full is not None:
            self._set("learner.zero_stage", 3 if full else 2)
        schedule = self._take("worker.actor.optim.lr_scheduler_type")
        if schedule in ("constant", "linear", "cosine"):
            self._set("learner.schedule", schedule)
        elif schedule is not None:
            self._leave("worker.actor.optim.lr_scheduler_type", schedule, "learner.schedule: constant, linear, cosine")

    def _rewards(self) -> None:
        function = self._take("worker.reward.reward_function")
        options = {key: self._take(key) for key in [*self._left] if key.startswith("worker.reward.reward_function_kw")}
        if function is not None:
            name = function if ":" in function else f"{function}:main"
            named = {key.rpartition(".")[2]: value for key, value in options.items() if value not in (None, {})}
            self.translation.values["rewards"] = [{"name": name, **named}]

    def _trainer(self) -> None:
        steps, epochs = self._take("trainer.max_steps"), self._take("trainer.total_epochs")
        if steps is not None or epochs is not None:
            self._set("trainer.epochs" if steps is None else "trainer.steps", epochs if steps is None else steps)
        ranks = (self._take("trainer.nnodes") or 1) * (self._take("trainer.n_gpus_per_node") or 1)
        if ranks > 1:
            self.translation.values["cluster"] = {"name": "ray", "ranks": ranks}
        saving, evaluating = self._take("trainer.save_freq"), self._take("trainer.val_freq")
        if saving is not None:
            self._set("trainer.save_every", max(saving, 0))
        samples = self._take("worker.rollout.val_override_config.n")
        if "eval" in self.translation.values.get("data", {}):
            for key, value in (("eval_every", evaluating), ("eval_samples", samples)):
                if value is not None:
                    self._set(f"trainer.{key}", max(value, 0))
        kept = self._take("trainer.save_limit")
        if kept is not None and kept > 0:
            self._set("trainer.keep_checkpoints", kept)
        elif kept is not None:
            self._leave("trainer.save_limit", kept, "trainer.keep_checkpoints is a number")
        folder, experiment = self._take("trainer.save_checkpoint_path"), self._take("trainer.experiment_name")
        if folder or experiment:
            self._set("trainer.run_dir", folder or f"runs/{experiment}")
        self._trackers(self._take("trainer.logger"))

    def _trackers(self, loggers: str | Sequence[str] | None) -> None:
        names = [loggers] if isinstance(loggers, str) else list(loggers or ())
        wanted = [name for name in names if name not in ("console", "file")]
        found = [{"name": name} for name in wanted if name in self._installed_trackers]
        if found:
            self.translation.values["trackers"] = found
        for name in wanted:
            if name not in self._installed_trackers:
                self._leave("trainer.logger", name, "no installed tracker is called so")

    def _rest(self) -> None:
        """What no rule has taken: plain values that are meant alike, and then all that is left out."""
        for key, value in self._left.items():
            if value is None or value == {} or _AS_ALWAYS.get(key, _Nothing) == value:
                continue
            found = synonym(key)
            ours = "" if found is None else found.key
            is_plain = isinstance(value, str if ours == "model.path" else int | float) and not isinstance(value, bool)
            if ours in _ALIKE and is_plain and not key.startswith(("critic.", "worker.critic.", "worker.ref.")):
                self._set(ours, value)
            else:
                said = [ours, "" if found is None else found.note]
                self._leave(key, value, ": ".join(filter(None, said)))


class _Nothing:
    """Equals no value."""


def _flat(value: Any, key: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        return [pair for name, item in value.items() for pair in _flat(item, f"{key}.{name}" if key else str(name))]
    return [(key, value)]
