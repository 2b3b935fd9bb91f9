"""The sampler on vLLM in SPMD mode: the engine lives in the rank's own process and takes weights from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch

from mmrl.config.sections import SamplerConfig
from mmrl.data.images import MediaStore
from mmrl.engine import device
from mmrl.engine.machine.start_errors import start_errors
from mmrl.engine.network.family import Family
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.shape import mixed_layers, model_shape
from mmrl.engine.sampler import sleep_backend
from mmrl.engine.sampler.admissions import SteppingSampler, continued, turn_ids
from mmrl.engine.sampler.one_token import one_token_requests
from mmrl.engine.sampler.vllm_arguments import check_engine_keys
from mmrl.engine.sampler.vllm_exit import leave_asleep
from mmrl.engine.text.encoding import unexpanded
from mmrl.engine_api import SamplingRequest
from mmrl.errors import NumericsError
from mmrl.system.read_ahead import ReadAhead
from mmrl.types import NO_VERSION, FinishReason, FloatArray, IntArray, Rollout, RolloutGroup, Sample, Segment

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.outputs import CompletionOutput

T = TypeVar("T")

IMAGE_CACHE_GIB = 1
"""Preprocessed images that vLLM keeps in the rank's memory, until it sleeps; ``sampler.engine`` may say otherwise."""


class VLLMSampler(SteppingSampler):
    """Implements ``engine_api.Sampler`` on one rank; a step is one of vLLM's engine.

    A turn of an episode is a request of its own, of all tokens and images before it: vLLM has most of them in its
    caches.

    Attributes:
        arguments: vLLM's arguments, as plain values.
        weight_version: Version of the weights that vLLM holds; ``NO_VERSION`` if it holds the folder's, or none.
    """

    def __init__(
        self, folder: ModelFolder, media: MediaStore, kind: device.DeviceKind, arguments: dict[str, Any]
    ) -> None:
        from vllm import LLM

        most = device.ADMITTED_AT_ONCE[kind]
        super().__init__(most, most and arguments.get("max_num_batched_tokens"))
        self._folder, self._images = folder, ReadAhead(media.load, device.READING_THREADS[kind])
        self._sleep_level = device.sleep_level(kind)
        self._packs_experts = device.packs_experts(kind)
        self._mixed_layers = mixed_layers(folder.config)
        self._request_ids = itertools.count()
        self._pending: dict[str, tuple[int, SamplingRequest]] = {}
        self._unfinished: dict[int, CompletionOutput] = {}  # the last of each ticket that may be cut
        self.weight_version = NO_VERSION
        self.arguments = {**arguments}
        if folder.family.vision:
            self.arguments["mm_processor_kwargs"] = folder.images.processor_arguments(media.grid)
        stages = arguments["pipeline_parallel_size"]
        processor = banned_ids_processor(folder.vocabulary.banned, device.model_runner(kind, stages))
        threads = torch.get_num_threads()
        with start_errors("vLLM does not start", "sampler", every=True):
            self._llm = LLM(**self.arguments, logits_processors=[processor])
        if torch.get_num_threads() != threads:
            # vLLM's worker leaves one on a GPU, unless OMP_NUM_THREADS is set: no number for a learner beside it.
            torch.set_num_threads(threads)
        # At once, as the first sleep would already back up everything.
        asleep = self._sleep_level is not None
        self._discarding = sleep_backend.install(self._llm.collective_rpc) if asleep else None
        if kind == "cpu" and stages > 1:
            # vLLM makes the buffers between stages in its first warm-up, which it leaves out on a CPU.
            self._llm.collective_rpc("execute_dummy_batch")

    def sleep(self) -> None:
        """Give the device's memory to the learner."""
        if self._sleep_level is not None:
            with start_errors("vLLM does not fall asleep", "sampler", later=True):
                self._llm.sleep(self._sleep_level)
            if self._discarding is not None:  # the weights are gone
                self.weight_version = NO_VERSION

    @property
    def backs_up_weights(self) -> bool:
        """True if the last sleep has copied the weights to the host's memory, and not dropped them."""
        return self._sleep_level is not None and not (self._discarding is not None and self._discarding.drops)

    def wake(self, part: device.SamplerMemory) -> None:
        """Take a part of the device's memory back; idempotent. Requests run once all parts are awake."""
        if self._sleep_level is not None and self._llm.llm_engine.is_sleeping():
            self._llm.wake_up([part])

    def close(self) -> None:
        """Let the process end while vLLM sleeps; an awake one ends by itself."""
        if self._sleep_level is not None and self._llm.llm_engine.is_sleeping():
            leave_asleep(self._llm)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace all weights in one call, and drop every cache that the old ones filled.

        Preprocessed images stay: they depend on pixels alone, and have their hash as key. A sleep drops them too.
        """
        weights = as_in_files(weights, self._folder.family)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        if self._discarding is not None:
            self._discarding.check()
        if self._folder.family.mixture and self._packs_experts:
            self._llm.apply_model(pack_experts)
        self.forget_prompts()
        self.weight_version = version

    def with_model(self, function: Callable[[torch.nn.Module], T]) -> T:
        """A function's answer to this rank's part of the model, which is awake."""
        found: list[T] = self._llm.apply_model(function)
        return found[0]

    def forget_prompts(self) -> None:
        """Drop attention states, and what the tower has made of images; preprocessed images stay.

        Raises:
            NumericsError: A request is left.
        """
        self._llm.llm_engine.reset_encoder_cache()
        if not self._llm.reset_prefix_cache():
            raise NumericsError(
                "vLLM kept attention states of earlier requests, or of old weights",
                where="sampler",
                remedy="report this: a request is left",
            )

    def submit(self, requests: Sequence[SamplingRequest]) -> Sequence[int]:
        self._images.announce(ref for request in requests for ref in request.images)
        return super().submit(requests)

    def score(self, samples: Sequence[Sample], temperature: float) -> list[list[FloatArray]]:
        """By a request of one token for each token: vLLM 0.32 has the log-probs of a prompt's tokens before temperature
        and logits processors alone."""
        assert not self._pending, "requests are left"
        self._images.announce(ref for sample in samples for ref in sample.all_images)
        found = [np.zeros(len(sample.token_ids), np.float32) for sample in samples]
        places = dict[str, tuple[int, int]]()
        for index, sample in enumerate(samples):
            for place, request in one_token_requests(sample, temperature):
                request_id = str(next(self._request_ids))
                self._add(request_id, request, logprobs=None, logprob_token_ids=[int(sample.token_ids[place])])
                self._pending[request_id], places[request_id] = (index, request), (index, place)
        while self._pending:
            for output in self._llm.llm_engine.step():
                if output.finished:
                    del self._pending[output.request_id]
                    index, place = places[output.request_id]
                    found[index][place] = asked_logprob(output.outputs[0].logprobs, samples[index].token_ids[place])
        self._images.forget()
        self.forget_prompts()
        return [found]

    def drop(self) -> None:
        super().drop()
        self._images.forget()
        for request_id in sorted(self._pending, key=lambda name: self._pending[name][0]):
            self._llm.llm_engine.abort_request([request_id])  # alone: vLLM makes a set of them, whose order is chance
        self._pending.clear()
        self._unfinished.clear()

    def _begin(self, ticket: int, request: SamplingRequest) -> None:
        request_id = str(next(self._request_ids))
        self._add(request_id, request)
        self._pending[request_id] = ticket, request

    def _advance(self) -> tuple[Sequence[tuple[int, RolloutGroup]], bool]:
        found = list[tuple[int, RolloutGroup]]()
        for output in self._llm.llm_engine.step():
            if output.finished:
                ticket, request = self._pending.pop(output.request_id)
                self._unfinished.pop(ticket, None)
                found.append((ticket, self._group(request, output)))
            else:
                ticket, _ = self._pending[output.request_id]
                (self._unfinished[ticket],) = output.outputs
        return found, True

    def _so_far(self, ticket: int) -> Segment | None:
        completion = self._unfinished.get(ticket)
        return None if completion is None else replace(self._segment(completion), weight_version=self.weight_version)

    def _add(self, request_id: str, request: SamplingRequest, **parameters: Any) -> None:
        """Enqueue a request; its images are read only if vLLM lacks the preprocessed form of one, by hash.

        Args:
            parameters: Further ones of vLLM's ``SamplingParams``.
        """
        add, refs = self._llm.llm_engine.add_request, request.images
        if refs and self.arguments["mm_processor_cache_gb"]:
            try:
                add(request_id, self._prompt(request, [None] * len(refs)), self._params(request, **parameters))
                return
            except ValueError:  # one is missing, which vLLM does not tell before
                pass
        images = [self._images(ref) for ref in refs]
        add(request_id, self._prompt(request, images), self._params(request, **parameters))

    def _prompt(self, request: SamplingRequest, images: Sequence[Any]) -> Any:
        refs = request.images
        inputs: dict[str, Any] = {"prompt_token_ids": unexpanded(request.token_ids, refs, self._folder)}
        if refs:
            inputs["multi_modal_data"] = {"image": images}
            inputs["multi_modal_uuids"] = {"image": [ref.hash for ref in refs]}
        return inputs

    def _params(self, request: SamplingRequest, **parameters: Any) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            n=request.num_samples,
            temperature=request.temperature,
            max_tokens=request.max_new_tokens,
            seed=request.seed if request.temperature > 0 else None,
            stop_token_ids=list(self._folder.vocabulary.eos),
            flat_logprobs=True,  # three numbers a token in lists, and no dictionary
            detokenize=False,
            # The tokens of a request that is aborted are in no later output. Cumulative ones share vLLM's own lists.
            output_kind=RequestOutputKind.CUMULATIVE if request.may_be_cut else RequestOutputKind.FINAL_ONLY,
            **({"logprobs": 0} | parameters),
        )

    def _group(self, request: SamplingRequest, output: RequestOutput) -> RolloutGroup:
        sent = request.token_ids
        if not np.array_equal(output.prompt_token_ids, sent):
            raise NumericsError(
                f"sampler and learner read the {'episode' if request.segments else 'prompt'} as different tokens "
                f"({len(output.prompt_token_ids or ())} and {len(sent)})",
                where=request.prompt.id,
                remedy="report this with the model's name: its image processor is not followed exactly",
            )
        rollouts = tuple(self._rollout(request, completion) for completion in output.outputs)
        return RolloutGroup(request.prompt, rollouts)

    def _segment(self, completion: CompletionOutput) -> Segment:
        ids = np.array(completion.token_ids, np.int32)
        return Segment(ids, True, sampled_logprobs(completion.logprobs, ids))

    def _rollout(self, request: SamplingRequest, completion: CompletionOutput) -> Rollout:
        segment, known = self._segment(completion), completion.routed_experts
        finish: FinishReason = "length" if completion.finish_reason == "length" else "stop"
        return continued(
            request,
            completion.index,
            segment,
            text=self._folder.tokenizer.decode(turn_ids(request, segment.token_ids), skip_special_tokens=True),
            finish_reason=finish,
            weight_version=self.weight_version,
            experts=None if known is None else known[:, self._mixed_layers],  # vLLM has entries for dense layers too
        )


def engine_arguments(
    folder: ModelFolder,
    config: SamplerConfig,
    kind: device.DeviceKind,
    *,
    dtype: str,
    max_images: int,
    max_tokens: int,
    num_sequences: int,
    seed: int,
    returns_experts: bool = False,
    counts_steps: bool = False,
) -> dict[str, Any]:
    """Arguments of vLLM's ``LLM``, the config's own in ``sampler.engine`` last.

    Args:
        max_images: Most images in one prompt, or in one episode with its prompt.
        max_tokens: Longest prompt and completion, or episode, together.
        num_sequences: Completions that a rank samples in a step.
        returns_experts: True if rollouts know their experts.
        counts_steps: True if turns are answered, or requests cut, at counted steps.

    Raises:
        ConfigError: ``sampler.engine`` holds a key that mmrl owns, or that vLLM does not know.
    """
    from vllm import EngineArgs

    check_engine_keys(config.engine, {field.name for field in fields(EngineArgs)})
    arguments = {
        "model": folder.path,
        "load_format": "safetensors",
        "dtype": dtype,
        "max_model_len": max_tokens,
        "seed": seed % 2**32,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "distributed_executor_backend": "external_launcher",
        # The log-probs of the distribution that was sampled from: temperature and banned ids applied.
        "logprobs_mode": "processed_logprobs",
        # The folder's own sampling defaults (repetition penalty, top-k) would change that distribution.
        "generation_config": "vllm",
        "disable_log_stats": True,
        "trust_remote_code": folder.trust_remote_code,
        "use_tqdm_on_load": False,
        **device.sampler_arguments(
            kind,
            config.gpu_memory_utilization,
            max_tokens,
            num_sequences,
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
        ),
    }
    if model_shape(folder.config).linear is not None and not arguments.get("enable_chunked_prefill", True):
        arguments["enable_prefix_caching"] = False  # vLLM caches states at the ends of chunks
    if config.engine.get("enable_chunked_prefill") is False:  # a prompt must then fit into one step
        arguments["max_num_batched_tokens"] = max(arguments["max_num_batched_tokens"], max_tokens)
    if counts_steps:
        arguments["async_scheduling"] = False  # a step would return the tokens of the one before it
    if returns_experts:
        arguments["enable_return_routed_experts"] = True
    if folder.family.vision:
        arguments["limit_mm_per_prompt"] = {"image": max_images, "video": 0}
        if getattr(folder.config, "audio_config", None) is not None:
            arguments["limit_mm_per_prompt"]["audio"] = 0
        arguments["mm_processor_cache_gb"] = IMAGE_CACHE_GIB
    return device.merged(arguments, {**config.engine, **device.overruled(kind, config.engine)})


def as_in_files(weights: Iterable[tuple[str, torch.Tensor]], family: Family) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights as vLLM reads them from a folder of the hub."""
    for name, weight in weights:
        yield name, weight.transpose(1, 2) if family.turned_in_files(name) else weight


def pack_experts(model: torch.nn.Module) -> None:
    """Bring experts that were loaded again into the layout of vLLM's kernels.

    vLLM 0.32 does this at the first load alone. Its CPU kernels would read the new weights in a wrong order, which
    moves log-probs by 0.2 nats.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)


def sampled_logprobs(logprobs: Any, ids: IntArray) -> FloatArray:
    """(T,) float32 log-probs of the sampled tokens, from vLLM's ``FlatLogprobs``."""
    places = logprobs.start_indices  # the sampled token is the first of its position
    sampled: FloatArray = np.array(logprobs.logprobs, np.float32)[places]
    assert np.array_equal(np.array(logprobs.token_ids)[places], ids)
    return sampled


def asked_logprob(logprobs: Any, token: int) -> float:
    """The log-prob of a token that a request of one token has asked for, from vLLM's ``FlatLogprobs``."""
    place = logprobs.token_ids.index(token)  # after the one that was sampled, which may be the same
    return float(logprobs.logprobs[place])


def banned_ids_processor(banned: Sequence[int], model_runner: Literal[1, 2]) -> type:
    """A logits processor for vLLM's first or second model runner. It gives the banned ids probability zero, in greedy
    sampling too."""
    return _first_runners(banned) if model_runner == 1 else _second_runners(banned)


def _first_runners(banned: Sequence[int]) -> type:
    from vllm.v1.sample.logits_processor import LogitsProcessor

    class BannedIds(LogitsProcessor):
        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            self._banned = torch.tensor(banned, dtype=torch.int64, device=device)

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits.index_fill_(-1, self._banned, float("-inf"))

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            """Every request has the same vocabulary."""

    return BannedIds


def _second_runners(banned: Sequence[int]) -> type:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

    class BannedIds(LogitsProcessor):
        def __init__(self, vllm_config: Any, req_states: Any) -> None:
            self._banned = torch.tensor(banned, dtype=torch.int64, device=req_states.device)

        def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
            return logits.index_fill_(-1, self._banned, float("-inf"))

    return BannedIds
