"""The sections of the config as frozen classes. A field's docstring is its help; defaults live only here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from mmrl.config.base import MAY_CHANGE, Contradiction, Count, CountOrNever, MayChange, Seconds, Section, Settings, Text
from mmrl.config.cluster import ClusterConfig
from mmrl.config.critic import CriticConfig
from mmrl.config.data import DataConfig
from mmrl.config.evaluation_names import key_of
from mmrl.config.evaluations import EvaluationSet, contradictions_of, own_judges
from mmrl.config.partial import PartialConfig
from mmrl.config.plugin_specs import (
    EVERY,
    NONE,
    EnvironmentSpec,
    Kind,
    MonitorSpec,
    PluginSpec,
    RewardSpec,
)
from mmrl.config.reference import ReferenceConfig
from mmrl.config.stop_condition import StopCondition
from mmrl.config.yaml_tree import to_flow
from mmrl.errors import plural
from mmrl.types import ENVIRONMENT

RENAMED = {"sampler.memory_fraction": "sampler.gpu_memory_utilization"}
"""New names of keys by their old names, which still work in this version."""

_MEMORY = (
    "kv_cache_memory_bytes", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "enforce_eager",
    "enable_prefix_caching", "enable_chunked_prefill", "block_size", "swap_space", "max_model_len", "seed",
)  # fmt: skip
"""Arguments of vLLM that are a matter of memory and speed."""


def _only(accepted: object, why: str) -> Any:
    """A validator that refuses every value but one, and says why."""

    def check(value: Any) -> Any:
        if value != accepted or isinstance(value, bool) != isinstance(accepted, bool):
            raise ValueError(f"must be {to_flow(accepted)}: {why}")
        return value

    return check


def _condition(text: str) -> str:
    StopCondition.read(text)
    return text


_EVERY = (MonitorSpec(name=EVERY),)


def _every(value: Any) -> Any:
    return _EVERY if value == EVERY else value


_TRUNCATED = (
    "log-probs would be renormalised over the tokens that are left, which the learner cannot reproduce;"
    " set top_p: 1.0, top_k: -1"
)


class LoraConfig(Section):
    """Low-rank adapters (LoRA) beside linear layers, whose weights stay as they are."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 16
    """Rank of the adapters' product."""
    alpha: Annotated[int, Field(ge=1, le=10**6)] = 32
    """The product is scaled by alpha / rank."""
    targets: Annotated[tuple[Text, ...], Field(min_length=1, strict=False)] = ("language",)
    """Linear layers to adapt: language, vision, projector, ends of their names such as q_proj, patterns with *."""


class ModelConfig(Section):
    """The policy."""

    path: Annotated[Text, MAY_CHANGE]
    """A Hugging Face model folder, or a name on the hub."""
    revision: Annotated[Text | None, MAY_CHANGE] = None
    """Branch, tag or commit of a model on the hub; null is its default branch."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of weights and activations; auto is bfloat16 on a GPU and float32 on a CPU."""
    freeze: Annotated[tuple[Literal["vision", "projector", "language"], ...], Field(strict=False)] = ()
    """Parts that are not trained: any of vision, projector, language."""
    gradient_checkpointing: Annotated[bool, MAY_CHANGE] = True
    """Recompute activations in the backward pass, for less memory and more time."""
    lora: LoraConfig | None = None
    """Train low-rank adapters in place of the weights; null trains the weights."""
    quantize: Literal["nf4"] | None = None
    """nf4: beside adapters, keep the weights of the language model's linear layers in 4 bits in the learner (QLoRA)."""
    trust_remote_code: Annotated[bool, MAY_CHANGE] = False
    """Run Python code that comes with the model's folder."""
    chat_template: Annotated[Text | None, MAY_CHANGE] = None
    """A file with a Jinja chat template in place of the model's own; checkpoints and exports have it too."""

    def contradictions(self) -> Iterator[Contradiction]:
        if len(set(self.freeze)) == 3:
            yield Contradiction(("freeze",), "model.freeze leaves nothing to train", "leave out at least one part")
        if self.freeze and self.lora:
            what = "model.lora trains its adapters and no weight, so there is nothing to freeze"
            remedy = "remove model.freeze, and name the layers in model.lora.targets"
            yield Contradiction(("freeze", "lora"), what, remedy)
        if self.quantize and not self.lora:
            what = "weights in 4 bits cannot be trained, and model.lora is null, so there is nothing to train"
            yield Contradiction(("quantize", "lora"), what, "set model.lora, or remove model.quantize")


class SamplerConfig(Section):
    """Sampling of completions."""

    name: Literal["vllm", "hf"] = "vllm"
    """vllm, or hf: transformers' own generate, slow, for machines without vLLM."""
    engine: Annotated[Settings, MayChange(_MEMORY)] = Field(default_factory=dict)
    """Further engine arguments of vLLM; {} or null takes back those of an earlier file."""
    group_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Completions per prompt."""
    max_new_tokens: Count = 1024
    """Longest completion, the end-of-sequence token included."""
    temperature: Annotated[float, Field(ge=0.01, le=10)] = 1.0
    """Temperature of sampling and of the learner's log-probs; greedy sampling has no distribution to learn from."""
    top_p: Annotated[float, AfterValidator(_only(1.0, _TRUNCATED))] = 1.0
    """Only 1.0: the learner cannot reproduce a truncated distribution."""
    top_k: Annotated[int, AfterValidator(_only(-1, _TRUNCATED))] = -1
    """Only -1 (all tokens): the learner cannot reproduce a truncated distribution."""
    tensor_parallel_size: Annotated[Count, MAY_CHANGE] = 1
    """Ranks that share one copy of the sampler's weights, each with a part of every layer."""
    pipeline_parallel_size: Annotated[Count, MAY_CHANGE] = 1
    """Parts into which the sampler's layers are divided, one after the other: each part has `tensor_parallel_size`
    ranks of its own."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1), MAY_CHANGE] = 0.5
    """Share of the device's memory that the sampler may use while it samples."""
    partial: PartialConfig | None = None
    """Rollouts that are not finished when a round ends go on in the next step; null finishes all of a step's."""

    @property
    def ranks_together(self) -> int:
        """Neighbouring ranks that hold one copy of the weights, and sample the same requests."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def contradictions(self) -> Iterator[Contradiction]:
        if self.name != "vllm" and self.engine:
            what = f"sampler.engine is for vllm, but sampler.name is {self.name}"
            yield Contradiction(("engine", "name"), what, "set sampler.name: vllm, or remove sampler.engine")
        for key in ("tensor_parallel_size", "pipeline_parallel_size"):
            if self.name != "vllm" and getattr(self, key) > 1:
                what = f"sampler.{key} is for vllm, but sampler.name is {self.name}"
                yield Contradiction((key, "name"), what, f"set sampler.{key}: 1")


class LearnerConfig(Section):
    """Updates of the policy."""

    deepspeed: Settings = Field(default_factory=dict)
    """Further settings of DeepSpeed; {} or null takes back those of an earlier file."""
    lr: Annotated[float, Field(gt=0, le=1)] = 1e-6
    """Learning rate of AdamW, after warm-up."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Weight decay of AdamW."""
    warmup_steps: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Optimizer steps in which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up; linear and cosine end at 0."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients with a larger norm are scaled down to it."""
    minibatches: Count = 1
    """Optimizer steps per pass over a rollout batch; the completions of a prompt stay together if there are enough."""
    epochs: Count = 1
    """Passes over a rollout batch."""
    tokens_per_microbatch: Annotated[Count, MAY_CHANGE] = 8192
    """Tokens that a rank holds of one packed row: a matter of memory, not of results."""
    sequence_parallel_size: Annotated[Count, MAY_CHANGE] = 1
    """Ranks that hold one packed row together, each a part of its tokens: rows may be so many times as long."""
    share_prefix: Annotated[Literal["auto", "off"], MAY_CHANGE] = "auto"
    """auto: a prompt, its images too, is computed once per row for all of its completions; off: with each of them."""
    router_aux_loss_coef: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Mixtures of experts: factor of the loss that is least where the experts of a layer have equally much to do."""
    routing: Literal["own", "compared", "replayed"] = "own"
    """Mixtures of experts: replayed: the update sends each token to the experts to which the sampler sent it; compared:
    the share of tokens with other experts is a metric; own: neither."""
    zero_stage: Annotated[int, Field(ge=0, le=3), MAY_CHANGE] = 3
    """DeepSpeed shards over ranks: 1 optimizer states, 2 gradients too, 3 parameters too."""
    offload: Annotated[Literal["none", "optimizer", "parameters"], MAY_CHANGE] = "none"
    """Kept in the host's memory: optimizer: AdamW, which then steps there; parameters: AdamW and the parameters."""

    def contradictions(self) -> Iterator[Contradiction]:
        keys = ("offload", "zero_stage")
        if self.offload != "none" and not self.zero_stage:
            what = "DeepSpeed offloads only tensors of ZeRO, and learner.zero_stage is 0"
            yield Contradiction(keys, what, "set learner.zero_stage: 1 or more, or offload: none")
        if self.offload == "parameters" and self.zero_stage in (1, 2):
            what = "DeepSpeed offloads parameters at ZeRO's stage 3 alone"
            yield Contradiction(keys, what, "set learner.zero_stage: 3, or offload: optimizer")


class TrainerConfig(Section):
    """The loop."""

    steps: Annotated[Count, MAY_CHANGE] = 200
    """Rollout batches to train on."""
    epochs: Annotated[Annotated[float, Field(gt=0, le=10**6)] | None, MAY_CHANGE] = None
    """In place of `steps`: passes over the training rows that are kept, also a part of one."""
    stop_when: Annotated[Annotated[str, AfterValidator(_condition)] | None, MAY_CHANGE] = None
    """End earlier, after a step whose metrics fulfil this, such as `eval/accuracy >= 0.9`: a metric, a comparison (>=,
    <=, >, <) and a number."""
    prompts_per_step: Count = 128
    """Prompts in a rollout batch."""
    staleness: Annotated[int, Field(ge=0, le=4)] = 0
    """Steps by which the sampler's weights are behind, where ranks of their own sample: they go on meanwhile."""
    eval_every: Annotated[CountOrNever, MAY_CHANGE] = 10
    """Steps between evaluations. One more comes before the first step and one after the last. 0: no evaluation."""
    eval_samples: Annotated[int, Field(ge=1, le=4096), MAY_CHANGE] = 1
    """Completions per evaluation prompt: 1 is greedy, more are sampled at the sampler's temperature."""
    eval_metric: Annotated[str | None, MAY_CHANGE] = None
    """The reward that tells right from wrong, for eval/accuracy: value 1 is right; null for the first."""
    blank_every: Annotated[CountOrNever, MAY_CHANGE] = 0
    """Evaluations from one to the next that answers 64 of the prompts with blank images too. 0: never."""
    tracked_rollouts: Annotated[CountOrNever, MAY_CHANGE] = 4
    """Completions of each evaluation that trackers get with their images, beside histograms. 0: none of both."""
    save_every: Annotated[CountOrNever, MAY_CHANGE] = 20
    """Steps between checkpoints. One more comes before the first step and one after the last. 0: these two alone."""
    keep_checkpoints: Annotated[Count, MAY_CHANGE] = 3
    """Checkpoints kept, the newest ones."""
    save_optimizer: Annotated[Literal["all", "last", "none"], MAY_CHANGE] = "all"
    """Checkpoints that hold the optimizer's state, from which a run goes on: all, the last one alone, or none."""
    best_metric: Annotated[str | None, MAY_CHANGE] = None
    """A metric, such as eval/accuracy or eval/NAME/accuracy, by which the best checkpoint is kept too; null: none."""
    best_is: Annotated[Literal["max", "min"], MAY_CHANGE] = "max"
    """max if more of `best_metric` is better, min if less."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Fixes data order and sampling."""
    run_dir: Annotated[Text, MAY_CHANGE] = "runs/run"
    """Folder of everything that the run writes."""
    on_mismatch: Annotated[Literal["stop", "warn"], MAY_CHANGE] = "stop"
    """Reaction when sampler and learner disagree about log-probs."""
    on_alarm: Annotated[Literal["warn", "stop"], MAY_CHANGE] = "warn"
    """stop: an alarm of a monitor ends the run, with a checkpoint and exit code 6."""
    step_timeout_s: Annotated[Seconds | None, MAY_CHANGE] = None
    """Seconds that a step, evaluation or checkpoint may take; then Ray ranks restart, or the run ends. null: any."""
    max_restarts: Annotated[int, Field(ge=0, le=1000), MAY_CHANGE] = 3
    """Times that ranks which were lost, hang or ran out of memory are started again from the last checkpoint."""

    @property
    def known_steps(self) -> int | None:
        """The number of steps; None while it depends on the data."""
        return self.steps if self.epochs is None else None

    @property
    def stop_condition(self) -> StopCondition | None:
        """The condition that ends the run before its last step; None if there is none."""
        return None if self.stop_when is None else StopCondition.read(self.stop_when)

    def evaluates(self, step: int) -> bool:
        """True if an evaluation is due after ``step`` (0: before the first), provided that there is data for it."""
        return self.eval_every > 0 and (step in (0, self.steps) or step % self.eval_every == 0)

    def blanks(self, step: int) -> bool:
        """True if the evaluation after ``step`` is one with blank images too: each ``blank_every``-th, and the last."""
        every = self.eval_every * self.blank_every
        return every > 0 and (step == self.steps or step % every == 0)

    def saves(self, step: int) -> bool:
        """True if a checkpoint is due after ``step``, which has been taken."""
        return step == self.steps or (self.save_every > 0 and step % self.save_every == 0)


class Config(Section):
    """The whole config of a run."""

    model: ModelConfig
    data: DataConfig
    rewards: Annotated[tuple[RewardSpec, ...], Field(strict=False)] = ()
    """The rewards that score completions; their weighted sum is the reward."""
    algorithm: PluginSpec
    """The learning rule."""
    environment: EnvironmentSpec | None = None
    """The plugin that answers the policy's turns; null makes every completion one turn."""
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    critic: CriticConfig | None = None
    """The network that predicts returns, for algorithms that ask for one; null is none, {} one with defaults."""
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    cluster: Annotated[ClusterConfig, MAY_CHANGE] = Field(default_factory=ClusterConfig)
    trackers: Annotated[tuple[PluginSpec, ...], Field(strict=False), MAY_CHANGE] = ()
    """Trackers, which get metrics beside metrics.jsonl and the console."""
    monitors: Annotated[tuple[MonitorSpec, ...], Field(strict=False), BeforeValidator(_every), MAY_CHANGE] = _EVERY
    """Monitors, which look at each step and tell what goes wrong; `all` is every installed one, [] is none."""

    @property
    def accuracy(self) -> str | None:
        """The reward component that tells right from wrong; None if nothing is scored."""
        own = next((reward.metric for reward in self.rewards), None if self.environment is None else ENVIRONMENT)
        return self.trainer.eval_metric or own

    @property
    def policy_updates(self) -> int:
        """Optimizer steps of the policy: none in steps in which the critic alone learns."""
        alone = 0 if self.critic is None else min(self.critic.pretrain_steps, self.trainer.steps)
        return (self.trainer.steps - alone) * self.learner.minibatches * self.learner.epochs

    @property
    def evaluations(self) -> Mapping[str, EvaluationSet]:
        """The sets that the run is evaluated on, by their names; the name of the only one may be empty."""
        sampler, count = self.sampler, self.trainer.eval_samples
        args = count, sampler.temperature, sampler.max_new_tokens, self.accuracy
        return {name: EvaluationSet.of(name, spec, *args) for name, spec in self.data.evaluated.items()}

    @property
    def max_completion_tokens(self) -> int:
        """Most tokens after a prompt: a completion's, or an episode's."""
        most = self.sampler.max_new_tokens
        return most if self.environment is None else self.environment.limits(most)[1]

    @property
    def max_sampled_tokens(self) -> int:
        """As ``max_completion_tokens``, those of evaluations among them, which nothing is learned from."""
        return max([self.max_completion_tokens, *(each.max_new_tokens for each in self.evaluations.values())])

    def plugins(self) -> Iterator[tuple[str, Kind, PluginSpec]]:
        """Dotted key, kind and spec of every plugin that is named."""
        if self.data.train.name != NONE:
            yield "data.train", "dataset", self.data.train
        for index, spec in enumerate(self.data.mix):
            yield f"data.mix.{index}", "dataset", spec
        for name, spec in self.data.evaluated.items():
            yield key_of(name), "dataset", spec
        for index, reward in enumerate(self.rewards):
            yield f"rewards.{index}", "reward", reward
        if self.algorithm.name != NONE:
            yield "algorithm", "algorithm", self.algorithm
        if self.environment is not None:
            yield "environment", "environment", self.environment
        for index, tracker in enumerate(self.trackers):
            yield f"trackers.{index}", "tracker", tracker
        for index, monitor in enumerate(self.monitors):
            if monitor.name != EVERY:
                yield f"monitors.{index}", "monitor", monitor

    def contradictions(self) -> Iterator[Contradiction]:
        """Contradictions within every section, then between sections."""
        for name, section in self:
            if isinstance(section, Section):
                yield from (found.below(name) for found in section.contradictions())
        yield from self._of_rewards()
        yield from self._of_monitors()
        yield from self._of_evaluation()
        yield from self._of_sizes()
        if self.critic is not None:
            yield from self.critic.against(self.model.lora is not None, self.trainer.known_steps)
        if self.environment is not None:
            sampler = self.sampler
            yield from self.environment.against(sampler.max_new_tokens, sampler.ranks_together, sampler.engine)

    def _of_rewards(self) -> Iterator[Contradiction]:
        by_label: dict[str, list[RewardSpec]] = {}
        for reward in self.rewards:
            by_label.setdefault(reward.metric, []).append(reward)
        for label, rewards in sorted(by_label.items()):
            if any(one.shares_rows_with(other) for one, other in combinations(rewards, 2)):
                remedy = "keep one, give one a label of its own, or give them sources of their own"
                yield Contradiction(("rewards",), f"two rewards are called {label!r}", remedy)
            if len({reward.weight for reward in rewards}) > 1:
                what = f"the rewards called {label!r} have different weights, and are one component of the sum"
                yield Contradiction(("rewards",), what, "give them the same weight, or labels of their own")

    def _of_monitors(self) -> Iterator[Contradiction]:
        labels = [monitor.label for monitor in self.monitors]
        for label in sorted({label for label in labels if labels.count(label) > 1}):
            yield Contradiction(("monitors",), f"two monitors are called {label!r}", "keep one")
        if any(each.name == EVERY and (each.off or each.options) for each in self.monitors):
            what, remedy = f"{EVERY!r} stands for other monitors", "give options to a monitor that you name beside it"
            yield Contradiction(("monitors",), f"{what}, and has no options", remedy)

    def _of_evaluation(self) -> Iterator[Contradiction]:
        data, trainer = self.data, self.trainer
        labels = [reward.metric for reward in self.rewards]
        judges = {"trainer.eval_metric": trainer.eval_metric, **own_judges(data.evaluated)}
        for key, judge in judges.items():
            if self.environment is None and judge and not is_component(judge, labels):
                remedy = f"name one of: {', '.join(labels) or '(there are no rewards)'}"
                yield Contradiction((key, "rewards"), f"{key} is {judge!r}, which is no reward", remedy)
        for key in ("eval_every", "eval_samples", "eval_metric", "blank_every"):
            value = getattr(trainer, key)
            if not data.eval and value != TrainerConfig.model_fields[key].default and value != 0:
                what = f"trainer.{key} is set, but data.eval is null"
                yield Contradiction((f"trainer.{key}", "data.eval"), what, f"set data.eval, or remove trainer.{key}")
        stop = trainer.stop_condition
        awaited = {"trainer.best_metric": trainer.best_metric, "trainer.stop_when": stop.metric if stop else None}
        episode_tokens = None if self.environment is None else self.sampler.max_new_tokens
        yield from contradictions_of(self.evaluations, awaited, episode_tokens)
        if stop is not None and stop.metric.startswith("eval/") and not (data.eval and trainer.eval_every):
            what = f"trainer.stop_when waits for {stop.metric}, and nothing is evaluated"
            keys = ("trainer.stop_when", "data.eval", "trainer.eval_every")
            yield Contradiction(keys, what, "set data.eval and trainer.eval_every")
        if trainer.blank_every and not trainer.eval_every:
            what = "trainer.blank_every counts evaluations, and trainer.eval_every is 0: there are none"
            yield Contradiction(("trainer.blank_every", "trainer.eval_every"), what, "set trainer.eval_every")

    def _of_sizes(self) -> Iterator[Contradiction]:
        cluster, sampler, learner, trainer = self.cluster, self.sampler, self.learner, self.trainer
        sizes = ("tensor_parallel_size", "pipeline_parallel_size")
        together = {f"sampler.{key}": getattr(sampler, key) for key in sizes}
        yield from cluster.against(together, trainer.staleness, learner.sequence_parallel_size)
        if sampler.partial is not None:
            scheduling = None if self.environment is None else self.environment.scheduling
            yield from sampler.partial.against(sampler.name, learner.routing, scheduling, sampler.engine)
        if trainer.prompts_per_step * sampler.group_size < learner.minibatches:
            what = f"learner.minibatches is {learner.minibatches}, but a step has fewer completions"
            keys = ("learner.minibatches", "trainer.prompts_per_step", "sampler.group_size")
            yield Contradiction(keys, what, "raise trainer.prompts_per_step or sampler.group_size")
        updates = max(self.policy_updates, 1)
        if learner.warmup_steps >= updates and trainer.epochs is None:  # else it is checked when steps are known
            steps = plural(updates, "optimizer step")
            what = f"learner.warmup_steps is {learner.warmup_steps}, but the run has only {steps}"
            remedy = "warm up for fewer optimizer steps than there are"
            yield Contradiction(("learner.warmup_steps", "trainer.steps"), what, remedy)


def is_component(name: str, rewards: Iterable[str]) -> bool:
    """True for one of these labels of rewards, and for a name that may be a component of one: `<label>/<name>`."""
    return any(name == label or name.startswith(f"{label}/") for label in rewards)
