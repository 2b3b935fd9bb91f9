"""A causal model that answers one question: the log-probs and entropies of completion tokens in a packed row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mmrl.config.sections import LoraConfig
from mmrl.engine import device
from mmrl.engine.network import adapters, attention, experts, quantization
from mmrl.engine.network.buffers import read_buffers
from mmrl.engine.network.family import SCORE_WEIGHT, UNUSED
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.image_form import Features
from mmrl.engine.network.image_needs import check_takes_image_features
from mmrl.engine.network.layout import rows_at
from mmrl.engine.network.linear_attention import pack_states
from mmrl.engine.network.merged_linear import Kept
from mmrl.engine.network.packed_inputs import PackedInputs, UniqueImages
from mmrl.engine.network.sequence import divide_rows
from mmrl.errors import ConfigError, first_line
from mmrl.ops.logprobs import chunked_logprobs
from mmrl.system.freed_memory import trim_heap

GATHERED_BYTES = 2**28
"""Most bytes of partitioned weights that are gathered at a time, unless one weight has more."""


class Policy(torch.nn.Module):
    """A transformers model behind the sampler's view of it: its temperature, its vocabulary.

    Args:
        model: A causal language model, vision-language or text.
        temperature: Temperature of sampling.
        entropy_gradient: True if the loss uses the entropies.
        adapted: The model's adapters; if there are any, only they are trained.
        routers: The model's routers, if it is a mixture of experts; see ``experts.routed``.

    Attributes:
        family: The model's family.
        banned_V: (V,) bool, True for ids that are never sampled.
    """

    banned_V: torch.Tensor

    def __init__(
        self,
        model: Any,
        folder: ModelFolder,
        *,
        temperature: float,
        chunk_bytes: int,
        entropy_gradient: bool = False,
        adapted: Sequence[adapters.Adapter] = (),
        routers: Sequence[experts.Router] = (),
    ) -> None:
        super().__init__()
        self.model, self.adapted, self.routers = model, tuple(adapted), tuple(routers)
        self.family, self._folder = folder.family, folder
        self.temperature, self._entropy_gradient = temperature, entropy_gradient
        self.head = self._made_head(chunk_bytes)
        banned_V = torch.zeros(folder.vocabulary.size, dtype=torch.bool)
        banned_V[list(folder.vocabulary.banned)] = True
        self.register_buffer("banned_V", banned_V, persistent=False)

    def _made_head(self, chunk_bytes: int) -> torch.nn.Module:
        """The module that makes of hidden states what ``forward`` answers."""
        cap = getattr(self._folder.config.get_text_config(), "final_logit_softcapping", None)
        logits = 3 if cap else 1  # as many numbers of each logit are in memory at a time
        chunk_tokens = max(chunk_bytes // (4 * logits * self._folder.vocabulary.size), 1)
        return Head(self.model.get_output_embeddings(), chunk_tokens, cap)

    @property
    def scored_by(self) -> str:
        """The name of the model's class, if it is a reward model; else empty."""
        return ""

    @property
    def score(self) -> torch.nn.Parameter | None:
        """The weight of a reward model's head; None of a policy."""
        return None if not self.scored_by else self.model.score.weight

    def forward(self, inputs: PackedInputs | UniqueImages) -> Any:
        """(T,) log-probs of the row's completion tokens, and with gradients (T,) entropies in nats, both 0 where the
        policy did not write the token; for images alone, their features.

        One method does both, as DeepSpeed hooks into this one.
        """
        if isinstance(inputs, UniqueImages):
            return self._image_features(inputs)
        hidden_OH, reads, updates = self._hidden_states(inputs), inputs.written, torch.is_grad_enabled()
        logprobs, entropies = self.head(
            rows_at(hidden_OH, reads.positions),
            reads.of(inputs.targets_T),
            self.banned_V,
            self.temperature,
            entropy=updates,  # nothing else has a use for it
            entropy_gradient=self._entropy_gradient,
        )
        return reads.whole(logprobs), reads.whole(entropies) if updates else entropies

    def _hidden_states(self, inputs: PackedInputs) -> torch.Tensor:
        """(O, H) last hidden states of this rank's tokens of a row."""
        images: dict[str, Any] = {}
        if inputs.images is not None:
            features = self._image_features(inputs.images) if isinstance(inputs.images, UniqueImages) else inputs.images
            images["mm_encoder_outputs"] = {"image": self._folder.images.encoded(features)}
        for router in self.routers:
            router.routing = inputs.routing
        outputs = self.model.base_model(**inputs.model_inputs, **images, attention_mask=None, use_cache=False)
        hidden_OH: torch.Tensor = outputs.last_hidden_state[0]
        return hidden_OH

    def _image_features(self, images: UniqueImages) -> list[Features]:
        """The vision tower's features of the images, one entry per place."""
        form = self._folder.images
        features = form.features(self.model.base_model, images.pixels, images.grids_U3, images.derived)
        if images.division is not None:
            features = images.division.whole(features)
        return [features[place] for place in images.places]

    def without_adapters(self) -> AbstractContextManager[None]:
        """The model that is adapted."""
        return adapters.switched_off(self.adapted)

    @property
    def is_whole(self) -> bool:
        """True if ``named_weights`` yields the weights themselves, in their type, and no copies."""
        packed = quantization.packed_layers(self.model)
        return not self.adapted and not any(map(_is_partitioned, self.parameters())) and not any(packed)

    def named_weights(
        self, dtype: torch.dtype, *, tied: bool = True, kept: Kept | None = None
    ) -> Generator[tuple[str, torch.Tensor]]:
        """Every weight under its state-dict name, unpacked, with its adapter merged into it; collective.

        Partitioned weights are gathered once each, in buckets of at most ``GATHERED_BYTES``, or one weight. A bucket
        is dropped before the next one is gathered, except for those of its weights that the receiver keeps. A receiver
        that stops early closes the iterator, on all ranks.

        Args:
            tied: True to yield a tied head as well, right after the embedding.
            kept: Counts what rounding leaves of the adapters.
        """
        adapted = {id(adapter.weight): adapter for adapter in self.adapted}
        packed = {id(layer.weight): layer for layer in quantization.packed_layers(self.model)}
        factors = {id(factor) for adapter in self.adapted for factor in adapter.factors.values()}
        names: dict[torch.nn.Parameter, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=not tied):
            if id(parameter) not in factors:
                names.setdefault(parameter, []).append(name.replace(".base_layer.", ".") if adapted else name)
        for bucket in _buckets(names):
            of_bucket = [adapted[id(each)].factors.values() for each in bucket if id(each) in adapted]
            with gathered(*bucket, *itertools.chain.from_iterable(of_bucket)):
                for parameter in bucket:
                    # Its storage lives as long as the receiver keeps it: DeepSpeed gives the parameter another one.
                    if adapter := adapted.get(id(parameter)):
                        weight = adapter.merged(dtype, kept)
                    elif layer := packed.get(id(parameter)):
                        weight = layer.unpacked().to(dtype)
                    else:
                        weight = parameter.detach().to(dtype)
                    for name in names[parameter]:
                        yield name, weight
            if _is_partitioned(bucket[0]) and bucket[0].device.type == "cpu":
                trim_heap()


class Head(torch.nn.Module):
    """A model's head, applied to one chunk of tokens after the other.

    At ZeRO 3 the ranks gather a module's own parameters together at each call, and drop them afterwards. So this module
    owns the head's parameters, and every rank calls it once a row, however many chunks its row has. The model's own
    head module is never called. This is no leaf module of DeepSpeed: 0.19 reduces a leaf's gradients in its backward
    hook, where a tied weight lacks the embedding's gradient.

    Args:
        linear: The model's head.
        cap: Bound of the logits, ``cap * tanh(logit / cap)``; None for no bound.

    Attributes:
        chunk_tokens: Tokens whose logits are in memory at a time.
    """

    def __init__(self, linear: torch.nn.Linear, chunk_tokens: int, cap: float | None = None) -> None:
        super().__init__()
        self._cap = cap
        self.weight, self.bias = linear.weight, linear.bias
        self.chunk_tokens = chunk_tokens

    def forward(self, hidden_TH: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``ops.logprobs.chunked_logprobs``."""

        def logits(hidden_CH: torch.Tensor) -> torch.Tensor:
            found = F.linear(hidden_CH, self.weight, self.bias)
            return found if self._cap is None else torch.tanh(found / self._cap) * self._cap

        return chunked_logprobs(logits, hidden_TH, *args, chunk_tokens=self.chunk_tokens, **options)


class Loading:
    """The class of model that a folder is read as, here one that generates text."""

    made = Policy
    """The class around the model."""

    def read(self, folder: ModelFolder, options: dict[str, Any]) -> Any:
        """The folder's model with its weights.

        Raises:
            ConfigError: The files cannot be read, or lack weights of the model.
        """
        return _read(folder, options)

    def empty(self, folder: ModelFolder, options: dict[str, Any]) -> Any:
        """As ``empty_model``."""
        return empty_model(folder, options)


def load_policy(
    folder: ModelFolder,
    kind: device.DeviceKind,
    dtype: str,
    *,
    freeze: Sequence[str],
    temperature: float,
    entropy_gradient: bool = False,
    lora: LoraConfig | None = None,
    adapter: Path | None = None,
    seed: int = 0,
    with_weights: bool = True,
    quantize: bool = False,
    rounded_as: torch.dtype | None = None,
    loading: Loading | None = None,
) -> Policy:
    """Load a model in the host's memory, with packed attention in its language model.

    Args:
        freeze: Parts without gradient.
        lora: Adapters to train in place of the weights.
        adapter: The folder with adapters to go on from; without it new ones are drawn with ``seed``.
        with_weights: True to read the weights. Else they have no content, and take no memory until they are filled.
        quantize: True to keep the language model's linear layers in 4 bits.
        rounded_as: The element type as which a quantised model's weights are unpacked, to have them whole instead.
        loading: Reads the folder as another class of model.

    Raises:
        ConfigError: The files cannot be read, or lack weights of the model, which transformers would draw at random.
        ResourceError: transformers is too old for a model that reads images, or bitsandbytes cannot quantise here.
    """
    from transformers import GenerationConfig

    attention.register()
    packed = device.attention(kind, dtype)
    options = {
        "dtype": getattr(torch, dtype),
        "attn_implementation": {"text_config": packed, "vision_config": "sdpa"} if folder.family.vision else packed,
        "trust_remote_code": folder.trust_remote_code,
    }
    if quantize:
        quantization.check_device(device.torch_device(kind))
    # Weights that are quantised are read as they are stored: no copy of them in another type is made, and the bytes
    # do not depend on the run's.
    reading = {**options, "dtype": "auto"} if quantize else options
    with torch.random.fork_rng(devices=[]):  # some layers draw numbers when they are made
        loading = loading or Loading()
        model = loading.read(folder, reading) if with_weights else loading.empty(folder, options)
    if folder.family.vision:
        check_takes_image_features(model.base_model, f"{folder.key}.path: {folder.name}")
        # Not above: for a name with "flash" in it, transformers would there look for a package.
        tower = device.tower_attention(kind, dtype) if folder.images.packed_tower else "sdpa"
        model.set_attn_implementation({"vision_config": tower})
    pack_states(model)
    divide_rows(model)
    routers = experts.routed(model)
    quantized = quantization.quantizable(adapters.linear_layers(model), folder.family) if quantize else []
    if rounded_as is None:
        quantization.quantize(model, quantized, options["dtype"], with_weights=with_weights)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(folder.family.part_of(name) not in (*freeze, UNUSED) or name == SCORE_WEIGHT)
            parameter.data = parameter.data.to(options["dtype"])  # some files keep a few in float32
    if rounded_as is not None:
        quantization.round_weights(model, quantized, rounded_as)
    adapted: Sequence[adapters.Adapter] = ()
    if lora is not None:
        layers = adapters.chosen_layers(list(adapters.linear_layers(model)), folder.family, lora.targets)
        adapted = adapters.attach(model, layers, lora, seed)
        if adapter is not None and with_weights:
            score = dict(model.named_parameters()).get(SCORE_WEIGHT)
            adapters.load(adapted, adapter, score)
    # The folder's sampling defaults are kept as a file; here they would only be validated when the model is saved.
    model.generation_config = GenerationConfig()
    return loading.made(
        model,
        folder,
        temperature=temperature,
        chunk_bytes=device.LOGITS_CHUNK_BYTES[kind],
        entropy_gradient=entropy_gradient,
        adapted=adapted,
        routers=routers,
    )


def _auto(folder: ModelFolder) -> Any:
    """The class of transformers that finds the folder's own class."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if folder.family.vision else AutoModelForCausalLM


def _read(folder: ModelFolder, options: dict[str, Any]) -> Any:
    """The folder's model with its weights."""
    try:
        model, found = _auto(folder).from_pretrained(
            folder.path, use_safetensors=True, output_loading_info=True, **options
        )
    except Exception as error:  # files of somebody else's: transformers raises whatever it stumbles over
        raise ConfigError(
            f"the model's weights cannot be read: {first_line(error)}",
            where=f"{folder.key}.path: {folder.path}",
            remedy="fetch the files again, or see that the machine has memory for the model",
        ) from error
    if absent := sorted(found["missing_keys"]):
        raise ConfigError(
            f"the model's files lack {len(absent)} of its weights: {', '.join(absent[:5])}",
            where=f"{folder.key}.path: {folder.path}",
            remedy="name a complete folder of a model that generates text",
        )
    return model


def empty_model(folder: ModelFolder, options: dict[str, Any], class_of: Callable[[Any], Any] | None = None) -> Any:
    """The folder's model with untouched memory for its weights; what is never trained is read.

    Args:
        class_of: The class of a config's model; by default the one that generates text.
    """
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(folder.path, trust_remote_code=folder.trust_remote_code)
    with no_init_weights():
        options = {key: value for key, value in options.items() if key != "trust_remote_code" or class_of is None}
        make = _auto(folder).from_config if class_of is None else class_of(config)._from_config
        model = make(config, **options)
    model.tie_weights()
    with torch.no_grad():
        read_buffers(model, Path(folder.path))
    return model.eval()  # as a model that was read


def gathered(*parameters: torch.nn.Parameter, changes: bool = False) -> AbstractContextManager[Any]:
    """The parameters whole, if they are partitioned; all ranks enter together.

    Args:
        changes: True to keep what the block makes of them; rank 0's counts.
    """
    if not any(map(_is_partitioned, parameters)):
        return nullcontext()
    import deepspeed

    writer = 0 if changes else None
    found: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=writer)
    return found


def _buckets(parameters: Iterable[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """The parameters that are gathered together, in their order."""
    bucket, room = list[torch.nn.Parameter](), GATHERED_BYTES
    for parameter in parameters:
        size = getattr(parameter, "ds_numel", 0) * parameter.element_size()
        if bucket and size > room:
            yield bucket
            bucket, room = [], GATHERED_BYTES
        bucket.append(parameter)
        room -= size
    if bucket:
        yield bucket


def _is_partitioned(parameter: torch.nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id")
