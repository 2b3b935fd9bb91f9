"""Translates a config of EasyR1 into mmrl's keys, and from other trainers' configs the plain numbers of like meaning.

Only written keys are translated. A key that a file leaves out has mmrl's default here and EasyR1's there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError
from pydantic import ValidationError

from mmrl.config.foreign_asynchrony import STALENESS, staleness_of
from mmrl.config.foreign_datasets import by_name, dataset_at, places
from mmrl.config.plugin_specs import RewardSpec
from mmrl.config.sections import Config
from mmrl.config.synonyms import Synonym, spelled, synonym
from mmrl.config.yaml_tree import to_flow

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
    "worker.actor.optim.lr_scheduler_type": "learner.schedule",
    "worker.rollout.n": "sampler.group_size",
    "worker.rollout.temperature": "sampler.temperature",
    "worker.rollout.gpu_memory_utilization": "sampler.gpu_memory_utilization",
    "worker.rollout.tensor_parallel_size": "sampler.tensor_parallel_size",
    "worker.rollout.enforce_eager": "sampler.engine.enforce_eager",
    "worker.rollout.enable_chunked_prefill": "sampler.engine.enable_chunked_prefill",
    "worker.rollout.max_num_batched_tokens": "sampler.engine.max_num_batched_tokens",
    "trainer.save_limit": "trainer.keep_checkpoints",
}
"""EasyR1's keys whose values mean the same here."""

_DEFAULTS: Mapping[str, Any] = {
    "algorithm.kl_coef": 1e-3,
    "algorithm.kl_penalty": "kl",
    "worker.actor.clip_ratio_low": 0.2,
    "worker.actor.clip_ratio_high": 0.3,
    "worker.actor.clip_ratio_dual": 3.0,
    "worker.actor.loss_avg_mode": "token",
    "worker.actor.optim.weight_decay": 1e-2,
}
"""EasyR1's defaults that differ from mmrl's."""

_AS_ALWAYS: Mapping[str, Any] = {
    "data.shuffle": True,
    "data.filter_overlong_prompts": True,
    "data.image_key": "images",
    "data.video_key": "videos",
    "algorithm.disable_kl": False,
    "algorithm.kl_type": "fixed",
    "worker.hybrid_engine": True,
    "worker.actor.padding_free": True,
    "worker.actor.dynamic_batching": True,
    "worker.actor.loss_type": "default",
    "worker.actor.model.freeze_vision_tower": False,
    "worker.actor.optim.strategy": "adamw",
    "worker.actor.optim.lr_warmup_ratio": 0.0,
    "worker.actor.fsdp.enable_rank0_init": True,
    "worker.actor.fsdp.enable_cpu_offload": False,
    "worker.actor.offload.offload_params": False,
    "worker.actor.offload.offload_optimizer": False,
    "worker.rollout.name": "vllm",
    "worker.rollout.enforce_eager": False,
    "worker.rollout.enable_chunked_prefill": True,
    "worker.rollout.top_p": 1.0,
    "worker.rollout.top_k": -1,
    "worker.rollout.limit_images": 0,
    "worker.rollout.disable_tqdm": False,
    "trainer.val_before_train": True,
    "trainer.val_only": False,
    "trainer.save_model_only": False,
    "trainer.find_last_checkpoint": True,
    "trainer.critic_warmup": 0,
    "max_steps": -1,
}
"""Values that mean mmrl's fixed behaviour."""

_ALIKE = frozenset(
    {
        "model.path", "data.max_prompt_tokens", "sampler.group_size", "sampler.max_new_tokens", "sampler.temperature",
        "sampler.gpu_memory_utilization", "learner.lr", "learner.weight_decay", "learner.max_grad_norm",
        "learner.sequence_parallel_size", "algorithm.kl.coef", "trainer.steps", "trainer.epochs", "trainer.seed",
    }
)  # fmt: skip
"""Keys whose values mean the same in the configs of other trainers too."""

_KWARGS = "worker.reward.reward_function_kwargs"
_ASIDE = re.compile(r"(^|\.)(critic|ref|(val|eval)(_\w+|idation|uation)?)\.")
"""Sections of configs that are not about the policy's training."""
_ESTIMATORS = {"low_var_kl": "k3", "mse": "k2", "kl": "k1"}
_MEANS = {"token": "token-mean", "seq": "seq-mean-token-mean"}


@dataclass(slots=True)
class Translation:
    """The outcome of a translation.

    Attributes:
        values: mmrl's values by section.
        left_out: (their key, its value, what to do) for each key that was not translated.
    """

    values: dict[str, Any] = field(default_factory=dict)
    left_out: list[tuple[str, Any, str]] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The keys that were not translated, a line each."""
        return [f"{key}: {to_flow(value)}" + (f"  ({note})" if note else "") for key, value, note in self.left_out]


def translate(
    config: Mapping[str, Any],
    *,
    dataset: str,
    algorithms: Collection[str],
    trackers: Mapping[str, Collection[str]],
    near: Path,
) -> Translation:
    """Translate a config of EasyR1, or the keys of like meaning of another trainer's config.

    Args:
        config: Its nested values.
        dataset: The plugin that reads files.
        algorithms: The installed ones; another is left out.
        trackers: The installed ones, each with the names of its options.
        near: A further folder from which relative paths count.

    Raises:
        ConfigError: It asks for asynchronous time that mmrl does not have.
    """
    return _Translator(config, dataset, algorithms, trackers, near).translation


class _Translator:
    """Every key stays in ``_left`` until it is used. The rest is listed in the end."""

    def __init__(
        self,
        config: Mapping[str, Any],
        dataset: str,
        algorithms: Collection[str],
        trackers: Mapping[str, Collection[str]],
        near: Path,
    ) -> None:
        written = dict(_flat(config))
        is_whole = "worker.actor.model.model_path" in written  # which EasyR1 requires, and no other trainer has
        self._left = {**(_DEFAULTS if is_whole else {}), **written}
        self._algorithms, self._installed_trackers, self._near = algorithms, trackers, near
        self._without_kl = [
            key.rpartition("use_kl")[0]
            for key, value in self._left.items()
            if value is False and key.rpartition(".")[2].startswith("use_kl")
        ]
        self.translation = Translation()
        self._datasets(dataset)
        self._template()
        self._algorithm()
        self._penalty()
        self._adapters()
        self._learner()
        self._rewards()
        self._trainer()
        self._trackers()
        for key, ours in _SAME.items():
            if _AS_ALWAYS.get(key, _Nothing) != self._left.get(key):
                self._move(key, ours)
        self._alike()
        self._rest()

    def _get(self, key: str, *kinds: type) -> Any:
        """Their value, if it is of one of these types and not used yet; else None."""
        value = self._left.get(key)
        return value if type(value) in kinds else None

    def _drop(self, *keys: str) -> None:
        for key in keys:
            self._left.pop(key, None)

    def _put(self, ours: str, value: Any, *theirs: str) -> None:
        """Set our key for theirs, which then count as used, unless it has another value or cannot have this one."""
        *parents, last = ours.split(".")
        is_double = ours == "trainer.epochs" and self._has("trainer.steps")
        if is_double or not _fits(ours, value):
            return
        place = self.translation.values
        for parent in parents:
            place = place.setdefault(parent, {})
        if place.setdefault(last, value) == value:
            self._drop(*theirs)

    def _has(self, ours: str) -> bool:
        section, _, name = ours.partition(".")
        return name in self.translation.values.get(section, {})

    def _move(self, key: str, ours: str) -> None:
        """Set our key to their value."""
        kinds = (int, float) if ours.startswith("algorithm.") else (int, float, bool, str)
        if (value := self._get(key, *kinds)) is not None:
            self._put(ours, value, key)

    def _leave(self, key: str, note: str) -> None:
        """List a key as not translated, if it is written."""
        value = self._left.pop(key, None)
        if value is not None and value not in ("", [], {}):
            self.translation.left_out.append((key, value, note))

    def _datasets(self, name: str) -> None:
        keys = {"prompt": "data.prompt_key", "answer": "data.answer_key", "images": "data.image_key"}
        named = {role: column for role, key in keys.items() if (column := self._get(key, str))}
        # Their default is named though rows may have no such column; mmrl finds one of that name.
        columns = {role: column for role, column in named.items() if (role, column) != ("images", "images")}
        for part, key in (("train", "data.train_files"), ("eval", "data.val_files")):
            found = {place: dataset_at(name, place, columns) for place in places(self._get(key, str, list))}
            if len(found) == 1 or (found and part == "eval"):
                self._put(f"data.{part}", by_name(found) if len(found) > 1 else next(iter(found.values())), key)
            else:
                self._leave(key, f"one path in data.{part}.path, and for training others in data.mix")
        if self._has("data.train"):
            self._drop(*(keys[role] for role in named))

    def _template(self) -> None:
        key = "data.format_prompt"
        if path := self._get(key, str):
            for place in (Path(path), self._near / path):
                with suppress(OSError, RuntimeError, ValueError, TemplateError):
                    text = place.expanduser().read_text(encoding="utf-8").strip()
                    self._put("data.prompt_template", _with_prompt(text), key)
                    return
            note = "no template can be read there; data.prompt_template takes it, with `prompt` in place of `content`"
            self._leave(key, note)

    def _algorithm(self) -> None:
        for key in ("worker.actor.loss_type", "algorithm.adv_estimator"):
            name = spelled(self._get(key, str) or "")
            if name in self._algorithms:
                self._put("algorithm.name", name, key)
            elif name != "default":
                self._leave(key, "no installed algorithm is called so")
        mean = "worker.actor.loss_avg_mode"
        if ours := _MEANS.get(self._get(mean, str) or ""):
            self._put("algorithm.aggregation", ours, mean)
        filtering = "algorithm.online_filtering"
        if self._get(filtering, bool):
            self._put("algorithm.dynamic_sampling", {}, filtering)
        elif self._left.get(filtering) in (None, False):
            self._drop(filtering, "algorithm.filter_key", "algorithm.filter_low", "algorithm.filter_high")

    def _penalty(self) -> None:
        names = ("kl_coef", "kl_penalty", "use_kl_loss", "disable_kl")
        coefficient, kind, in_loss, off = (f"algorithm.{name}" for name in names)
        value = self._get(coefficient, int, float)
        if self._get(off, bool) or value == 0:
            self._put("algorithm.kl", {"coef": 0.0}, coefficient, kind, in_loss, off)
        elif self._left.get(coefficient) is None:
            self._leave(in_loss, "EasyR1 has a kl_coef of 1e-3 where none is written; see algorithm.kl.coef")
        elif value is not None and self._left.get(in_loss) in (None, True, False):
            where = "loss" if self._left.get(in_loss) else "reward"
            self._put("algorithm.kl", {"coef": value, "where": where}, coefficient, in_loss)
            estimator = _ESTIMATORS.get(self._get(kind, str) or "")
            if estimator is not None and (estimator == "k1") == (where == "reward"):
                self._put("algorithm.kl.estimator", estimator, kind)
            else:
                self._leave(kind, f"not possible in the {where}; see algorithm.kl.estimator")

    def _adapters(self) -> None:
        names = ("lora.rank", "lora.alpha", "lora.target_modules", "lora.exclude_modules", "freeze_vision_tower")
        rank, alpha, targets, without, frozen = (f"worker.actor.model.{name}" for name in names)
        freezes = self._get(frozen, bool)
        if self._left.get(rank) in (None, 0):
            self._drop(rank, alpha, targets, without)
            if freezes:
                self._put("model.freeze", ["vision", "projector"], frozen)
            return
        named = self._get(targets, str) or "all-linear"
        is_language = named == "all-linear" and "visual" in (self._get(without, str) or "")
        if not is_language:
            self._leave(without, "name the layers in model.lora.targets")
        every = ["language"] if is_language else ["language", "vision", "projector"]
        parts = every if named == "all-linear" else [each.strip() for each in named.split(",") if each.strip()]
        used = [rank, without, *([targets] if self._get(targets, str) else [])]
        self._put("model.lora", {"rank": self._left[rank], "targets": parts}, *used)
        if self._has("model.lora"):
            self._move(alpha, "model.lora.alpha")
            if freezes and is_language:
                self._drop(frozen)
            elif freezes:
                self._leave(frozen, "adapters alone are trained; name the layers in model.lora.targets")

    def _learner(self) -> None:
        key = "worker.actor.global_batch_size"
        size, batch = self._get(key, int) or 0, self._get("data.rollout_batch_size", int) or 0
        if size > 0 and batch % size == 0:
            self._put("learner.minibatches", batch // size, key)
        sharding = "worker.actor.fsdp.enable_full_shard"
        if (full := self._get(sharding, bool)) is not None:
            self._put("learner.zero_stage", 3 if full else 2, sharding)

    def _rewards(self) -> None:
        key = "worker.reward.reward_function"
        if function := self._get(key, str):
            options = self._get(_KWARGS, dict) or {}
            wrong = [name for name, value in options.items() if value is None or name in RewardSpec.model_fields]
            kept = {name: value for name, value in options.items() if name not in wrong}
            name = function if ":" in function else f"{function}:main"
            self._put("rewards", [{"name": name, **kept}], key, *([_KWARGS] if options else []))
            note = "a reward's option cannot be null or be called so"
            self.translation.left_out += [(f"{_KWARGS}.{name}", options[name], note) for name in wrong]

    def _trainer(self) -> None:
        sizes = ("trainer.nnodes", "trainer.n_gpus_per_node")
        nodes, gpus = (1 if self._left.get(key) is None else self._get(key, int) for key in sizes)
        if nodes == gpus == 1:
            self._drop(*sizes)
        elif nodes is not None and gpus is not None:
            self._put("cluster", {"name": "ray", "ranks": nodes * gpus}, *sizes)
        evaluates = self._has("data.eval")
        for key, ours, is_set in (
            ("trainer.save_freq", "trainer.save_every", True),
            ("trainer.val_freq", "trainer.eval_every", evaluates),
            ("worker.rollout.val_override_config.n", "trainer.eval_samples", evaluates),
        ):
            if is_set and (number := self._get(key, int)) is not None:
                self._put(ours, max(number, 0), key)
        for key, folder in (("trainer.save_checkpoint_path", ""), ("trainer.experiment_name", "runs/")):
            if name := self._get(key, str):
                self._put("trainer.run_dir", f"{folder}{name}", key)
        for key, value in staleness_of(self._left).items():
            self._put(STALENESS, value, key)

    def _trackers(self) -> None:
        key = "trainer.logger"
        loggers = self._get(key, str, list) or []
        names = [loggers] if isinstance(loggers, str) else loggers
        wanted = [name for name in names if name not in ("console", "file")]
        if found := [self._tracker(name) for name in wanted if name in self._installed_trackers]:
            self._put("trackers", found)
            named = {option for each in found for option in each}
            self._drop(*(["trainer.project_name"] if named & {"project", "experiment"} else []))
        missing = [name for name in wanted if name not in self._installed_trackers]
        self.translation.left_out += [(key, name, "no installed tracker is called so") for name in missing]
        if names:
            self._drop(key)

    def _tracker(self, name: str) -> dict[str, Any]:
        """A tracker's entry, in the project of theirs; one that knows only experiments has the project as one."""
        project = self._get("trainer.project_name", str)
        option = next((each for each in ("project", "experiment") if each in self._installed_trackers[name]), None)
        return {"name": name, **({option: project} if option and project else {})}

    def _alike(self) -> None:
        """Translate plain values that mean the same in other trainers; steps win over epochs."""
        found = {key: ours for key in self._left if (ours := _meant(key).key) in _ALIKE and not self._aside(key, ours)}
        for key, ours in sorted(found.items(), key=lambda pair: pair[1] == "trainer.epochs"):
            self._move(key, ours)

    def _aside(self, key: str, ours: str) -> str:
        """The reason why their value differs in meaning from ours of that name; empty if it does not."""
        if _ASIDE.search(key):
            return "not about the policy's training"
        is_off = ours == "algorithm.kl.coef" and any(key.startswith(parent) for parent in self._without_kl)
        return "KL is off there" if is_off else ""

    def _rest(self) -> None:
        """List all keys that are left."""
        for key, value in [*self._left.items()]:
            if _AS_ALWAYS.get(key, _Nothing) == value:
                continue
            found = _meant(key)
            aside = self._aside(key, found.key) if found.key in _ALIKE else ""
            why = ": ".join(filter(None, [found.key, found.note]))
            self._leave(key, aside or why or "no key of mmrl's is known for it")


class _Nothing:
    """Equals no value."""


def _meant(key: str) -> Synonym:
    return synonym(key) or Synonym("")


def _fits(key: str, value: Any) -> bool:
    """True if mmrl's key can have that value, as far as plugins do not decide."""
    for part in reversed(key.split(".")):
        value = {part: value}
    try:
        Config.model_validate(value)
    except ValidationError as error:
        return all(details["type"] == "missing" for details in error.errors())
    return True


def _with_prompt(template: str) -> str:
    """A template with ``prompt`` in place of its variable ``content``; raises TemplateError if it is none."""
    environment, words, before = Environment(), list[str](), ""
    environment.parse(template)
    for _, kind, word in environment.lex(template):
        words.append("prompt" if (kind, word) == ("name", "content") and before != "." else word)
        before = word
    return "".join(words)


def _flat(value: Any, key: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping) and value and key != _KWARGS:
        return [pair for name, item in value.items() for pair in _flat(item, f"{key}.{name}" if key else str(name))]
    return [(key, value)]
