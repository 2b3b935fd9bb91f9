"""Memory of a rank's device, phase by phase: the learner's share, and each phase's besides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from mmrl.config.sections import Config
from mmrl.engine import device
from mmrl.engine.learner.learner_settings import deepspeed_settings
from mmrl.engine.machine.host_memory import HostMemory
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.shape import model_shape
from mmrl.engine.network.sizes import largest_adapted, quantized_sizes, weight_bytes
from mmrl.engine.network.weights import shards
from mmrl.engine.sampler.sampler_memory import SamplerMemory, sampler_memory
from mmrl.engine.sampler.sleep_backend import discards_weights
from mmrl.engine.trained_sizes import Sizes, TrainedSize, trained_sizes
from mmrl.interfaces import Algorithm
from mmrl.ops.activations import activations, forward_activations
from mmrl.ops.cost import ModelShape, Work
from mmrl.ops.memory import (
    FrozenSize,
    States,
    Zero,
    cache_bytes_per_sequence,
    cache_bytes_per_token,
    layer_weights,
    states,
)
from mmrl.ops.pinned import locked_bytes
from mmrl.ops.sequence import RowPart, possible_sizes
from mmrl.token_columns import REFERENCE

PHASES = {
    "sample": "sampling",
    "logprob": "log-probs",
    "update": "forward and backward",
    "step": "the optimizer step",
}
"""Names of the phases."""
KINDS = {
    "master": "float32 copies",
    "sampler": "the sampler's share",
    "runtime": "CUDA and sleeping sampler",
    "layer": "the weight that a layer makes to compute with",
}
"""Names of kinds of bytes whose keys say too little."""


@dataclass(frozen=True, slots=True)
class FrozenModelSize:
    """A frozen model, as a plan of memory needs it.

    Attributes:
        weight_bytes: Bytes of each of its weights.
        is_initial: True for the initial policy, False for a teacher.
    """

    shape: ModelShape
    size: FrozenSize
    weight_bytes: Sequence[int]
    is_initial: bool

    @classmethod
    def of(cls, folder: ModelFolder, width: int, *, is_initial: bool) -> FrozenModelSize:
        """The size of a model with ``width`` bytes a number."""
        shape, weights = model_shape(folder.config), weight_bytes(folder, width, quantize=False)
        return cls(shape, FrozenSize(sum(weights) // width, shape.largest_weight), weights, is_initial)


class PlannedModel:
    """A model, an algorithm and a device, as a plan of memory needs them.

    Args:
        sizes: Trained and frozen parameters of each part of the policy, or of the reward model that is trained.
        teachers: The folders of the teachers, if the reference is not the initial policy.
        critic: The critic's folder, if it does not begin as the policy.

    Attributes:
        networks: Those that are trained, the policy or a reward model first.
        width: Bytes of a weight.
    """

    def __init__(
        self,
        config: Config,
        folder: ModelFolder,
        sizes: Sizes,
        algorithm: Algorithm,
        kind: device.DeviceKind,
        teachers: Sequence[ModelFolder] = (),
        critic: ModelFolder | None = None,
    ) -> None:
        self.kind, self._folder = kind, folder
        self.precision = device.precision(kind, config.model.dtype)
        self.width = 2 if self.precision == "bfloat16" else 4
        self.networks = trained_sizes(config, folder, sizes, algorithm, self.width, critic)
        lora = config.model.lora
        unpacked = quantized_sizes(folder)[1] if config.model.quantize else 0
        self._made = unpacked, 0 if lora is None else largest_adapted(folder, lora)
        self.vocabulary = folder.vocabulary.size
        self.frozen_models: list[FrozenModelSize] = []
        if REFERENCE in algorithm.needs().roles and (teachers or lora is None):
            others = teachers or [folder]
            self.frozen_models = [FrozenModelSize.of(each, self.width, is_initial=each is folder) for each in others]
        self._samplers: dict[tuple[int, int, int], SamplerMemory] = {}

    @property
    def first(self) -> TrainedSize:
        """The policy, or a reward model that is trained alone."""
        return self.networks[0]

    @property
    def shape(self) -> ModelShape:
        """The first network's."""
        return self.first.shape

    def sampler(self, config: Config) -> SamplerMemory:
        """vLLM's memory on a rank, of whose config only the numbers of ranks and of those that share may differ."""
        sampler = config.sampler
        key = (sampler.tensor_parallel_size, sampler.pipeline_parallel_size, config.cluster.num_sampler_ranks)
        if key not in self._samplers:
            self._samplers[key] = sampler_memory(config, self._folder, self.width)
        return self._samplers[key]

    def host(self, config: Config, *, samples: bool) -> HostMemory:
        """One rank's tensors in its machine's memory.

        Args:
            samples: True if vLLM takes turns with the learner.
        """
        held = self.states(config)
        if self.kind == "cpu":
            return HostMemory(learner=held.host)
        reference, place = 0, device.reference_place(self.kind, config.learner.zero_stage)
        for other in self.frozen_models:
            if place == "host":
                sizes = {str(number): size for number, size in enumerate(other.weight_bytes)}
                reference += locked_bytes(sum(map(sizes.__getitem__, piece)) for piece in shards(sizes))
            elif place == "sharded" and config.learner.offload == "parameters":
                reference += locked_bytes(size // config.cluster.num_learner_ranks for size in other.weight_bytes)
        discards = samples and discards_weights(config.sampler)
        asleep = self.sampler(config).locked(discards=discards) if samples else 0
        return HostMemory(asleep, held.locked, reference, discards)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of all weights as the sampler gets them, adapters merged and nothing in 4 bits."""
        return sum(weight_bytes(self._folder, self.width, quantize=False))

    def cache_bytes_per_token(self, config: Config) -> int:
        """Bytes of a token's keys and values on one of the ranks that sample together."""
        return cache_bytes_per_token(self.shape, **self._shares(config))

    def sequence_bytes(self, config: Config, tokens: int) -> int:
        """Bytes of a sequence of so many tokens there."""
        return tokens * self.cache_bytes_per_token(config) + cache_bytes_per_sequence(
            self.shape, **self._shares(config)
        )

    def _shares(self, config: Config) -> dict[str, int]:
        """Bytes of a number, and the ranks that divide layers and heads of the sampler."""
        sampler = config.sampler
        return {
            "width": self.width,
            "tensor_parallel": sampler.tensor_parallel_size,
            "pipeline_parallel": sampler.pipeline_parallel_size,
        }

    def states(self, config: Config) -> States:
        """States of one rank: of all networks together, which are trained in turns."""
        held = reduce(States.beside, (self.states_of(network, config) for network in self.networks))
        copies = 0 if config.reference.reset_every is None or self.frozen_models else self.first.trained * self.width
        return replace(held, reference=held.reference + copies)  # a policy's adapters are copied whole on each rank

    def states_of(self, network: TrainedSize, config: Config) -> States:
        """States that one network adds; the frozen models are beside the first one."""
        learner, references = config.learner, self.frozen_models if network is self.first else []
        settings = deepspeed_settings(learner, self.precision, self.kind)
        alone = network.on_base(config)
        return states(
            network.trained,
            0 if alone else network.frozen,
            width=self.width,
            zero=Zero.of(settings, config.cluster.num_learner_ranks),
            largest=network.shape.largest_weight,
            reference=device.reference_place(self.kind, learner.zero_stage) if references else None,
            references=[other.size for other in references] or None,
            quantized=0 if alone else network.quantized,
            weight_bytes=() if alone or learner.offload == "none" else network.weight_bytes,
        )

    def _logits(self, row: Work, *, scores: bool) -> int:
        if scores:
            return 0
        logits = 4 * min(device.LOGITS_CHUNK_BYTES[self.kind] // 4, row.predicted * self.vocabulary)
        return logits * (1 if self.width == 4 else 2)

    def _mask(self, part: RowPart) -> int:
        """The mask of a row's shared prompts, which each rank that holds a part has whole; a kernel for rows of several
        lengths takes none."""
        return 0 if device.packs_lengths(self.kind, self.precision) else part.row.masked_pairs * self.width

    def activations(self, part: RowPart, *, checkpointing: bool) -> int:
        """Activations of one rank's part of a micro-batch, of the network that has most of them."""
        return self._mask(part) + max(
            activations(
                self._with_repeats(each.shape),
                part,
                width=self.width,
                checkpointing=checkpointing,
                tower_trained=each.training.reaches("vision"),
                logits_bytes=self._logits(part.own, scores=each.scores),
            )
            for each in self.networks
        )

    def _with_repeats(self, shape: ModelShape) -> ModelShape:
        """The shape with the heads of keys and values that attention keeps: on a CPU torch repeats them for each query
        head."""
        return replace(shape, kv_heads=shape.heads) if self.kind == "cpu" else shape

    def sequence_sizes(self, config: Config) -> list[int]:
        """Numbers of ranks that may share a row; see ``ops.sequence.possible_sizes``."""
        shapes = [each.shape for each in self.networks] + [each.shape for each in self.frozen_models]
        return possible_sizes(shapes, config.cluster.num_learner_ranks)

    def _layer_weights(self) -> int:
        """Weights that a layer makes for each of its passes."""
        quantized, adapted = self._made
        at_once = device.MERGED_AT_ONCE[self.kind]
        return layer_weights(quantized=quantized, adapted=adapted, width=self.width, merged_at_once=at_once)

    def _teacher_features(self, config: Config, rows: Sequence[RowPart]) -> int:
        """Bytes of image features of the teacher with most; they are the policy's if their towers turn out equal."""
        teachers = [other for other in self.frozen_models if not other.is_initial]
        return max((self._feature_bytes(other.shape, config, rows) for other in teachers), default=0)

    def _image_features(self, config: Config, rows: Sequence[RowPart]) -> int:
        """Bytes of image features, kept for a step by networks whose tower is not trained.

        Towers that are equal and frozen share them. See ``device.IMAGE_FEATURE_BYTES``.
        """
        own = [each for each in self.networks if not each.training.reaches("projector")]
        different = {id(each) if each.is_own else 0: each for each in own}
        return sum(self._feature_bytes(each.shape, config, rows) for each in different.values())

    def _feature_bytes(self, shape: ModelShape, config: Config, rows: Sequence[RowPart]) -> int:
        """Bytes of the features that a model's tower makes of the images of a step; ranks that share rows have them
        all."""
        if (tower := shape.tower) is None:
            return 0
        patches = sum(part.row.patches for part in rows) * config.learner.minibatches
        tokens = patches // (_row_groups(config) * tower.merge**2)
        return min(tokens * tower.mergers * tower.out * self.width, device.IMAGE_FEATURE_BYTES[self.kind])

    def _sampler_extra(self, config: Config) -> int:
        """Bytes for vLLM beside weights and cache."""
        if self.kind == "cpu":
            return device.SAMPLER_BYTES[self.kind]
        found = self.sampler(config)
        counted = sum(found.state) + found.working + device.ASLEEP_BYTES[self.kind]
        return max(counted, device.SAMPLER_BYTES[self.kind])

    def footprint(self, config: Config, rows: Sequence[RowPart], longest: int, *, samples: bool) -> Footprint:
        """One rank's footprint.

        Args:
            rows: A rank's parts of the micro-batches of all ranks, or of the largest ones.
            longest: Tokens of the longest prompt and completion.
            samples: True if vLLM takes turns with the learner.
        """
        checkpointing = config.model.gradient_checkpointing
        heads = [(each.shape, each.scores) for each in self.networks]
        heads += [(other.shape, self.first.scores) for other in self.frozen_models]
        forward = [
            forward_activations(shape, part, width=self.width, logits_bytes=self._logits(part.own, scores=scores))
            + self._mask(part)
            for part in rows
            for shape, scores in heads
        ]
        return Footprint(
            self.states(config),
            max(self.activations(part, checkpointing=checkpointing) for part in rows),
            max(forward),
            self._image_features(config, rows),
            device.RUNTIME_BYTES[self.kind],
            device.ASLEEP_BYTES[self.kind] * (samples and self.kind == "cuda"),
            sum(self.sampler(config).weights),
            self._sampler_extra(config),
            self.sequence_bytes(config, longest),
            layer=self._layer_weights(),
            teacher_features=self._teacher_features(config, rows),
        )


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one rank's device.

    Attributes:
        states: DeepSpeed's states.
        activations: Activations of the largest micro-batch.
        forward: The same without gradients.
        image_features: Features of images, kept for a step.
        runtime: Allowed for memory outside of tensors.
        asleep: Allowed for a sampler that sleeps.
        sampler_weights: This rank's part of the sampler's weights.
        sampler_extra: Allowed for the sampler's activations and CUDA graphs.
        sequence: Cache of the longest sequence.
        layer: The largest weight that a layer makes to compute with: out of its 4 bits, or with its adapter.
        teacher_features: As ``image_features``, of a teacher while it computes.
    """

    states: States
    activations: int
    forward: int
    image_features: int
    runtime: int
    asleep: int
    sampler_weights: int
    sampler_extra: int
    sequence: int
    layer: int = 0
    teacher_features: int = 0

    def learning(self) -> dict[str, dict[str, int]]:
        """Bytes by phase and kind, while the learner owns the device."""
        held, kept = self.states, self.states.kept
        runtime = {"runtime": self.runtime + self.asleep}
        kept |= {"image features": self.image_features}
        used = kept | {"reference": held.reference + held.reference_used}
        used["image features"] = self.image_features + self.teacher_features
        own = {"gradients": held.gradients, "buckets": held.buckets}
        whole = {"gathered": held.gathered, "layer": self.layer}
        buckets = own | {"buckets": held.buckets + held.reduced}
        found = {
            "logprob": used | whole | {"activations": self.forward},
            "update": kept | buckets | whole | {"activations": self.activations},
            "step": kept | (own if held.keeps_gradients else {"gradients": held.gradients}) | {"step": held.step},
        }
        return {phase: {k: count for k, count in (kinds | runtime).items() if count} for phase, kinds in found.items()}

    def sampling(self, share: int) -> dict[str, int]:
        """Bytes by kind, while the sampler owns the device and may use ``share`` of it."""
        return self.states.kept | {"sampler": share} | ({"runtime": self.runtime} if self.runtime else {})

    def least_share(self, sequences: int = 1) -> int:
        """Bytes that the sampler needs for so many of the longest sequences at once."""
        return self.sampler_weights + self.sampler_extra + sequences * self.sequence

    @property
    def peak(self) -> int:
        """The learner's most bytes."""
        return max(sum(kinds.values()) for kinds in self.learning().values())

    def least_memory(self, *, samples: bool) -> int:
        """Bytes that a device needs; a sampler needs room for one of the longest sequences."""
        sampling = sum(self.sampling(self.least_share()).values()) if samples else 0
        return max(self.peak, sampling)


def _row_groups(config: Config) -> int:
    """Groups of learner ranks that have rows of their own."""
    return config.cluster.num_learner_ranks // config.learner.sequence_parallel_size


def bound(phases: Mapping[str, Mapping[str, int]]) -> tuple[str, str]:
    """The phase that takes most, and the kind of bytes that takes most of it."""
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    return phase, max(phases[phase], key=lambda kind: phases[phase][kind])


def floor2(fraction: float) -> float:
    """Round down to hundredths."""
    return math.floor(fraction * 100 + 1e-9) / 100


def ceil2(fraction: float) -> float:
    """Round up to hundredths."""
    return math.ceil(fraction * 100 - 1e-9) / 100
