"""The sampler on transformers' ``generate``, for machines without vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from mmrl.engine.device import SamplerMemory
from mmrl.engine.network import experts
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.plain_model import copy_weights, plain_inputs
from mmrl.engine.network.vision import ImageInputs
from mmrl.engine.sampler.admissions import OneByOneSampler, continued
from mmrl.engine_api import SamplingRequest
from mmrl.ops.logprobs import token_logprobs
from mmrl.types import NO_VERSION, FloatArray, IntArray, Rollout, RolloutGroup, Sample, Segment

T = TypeVar("T")


class HFSampler(OneByOneSampler):
    """Implements ``engine_api.Sampler`` with a second copy of the weights, one request at a time.

    A prompt, or an episode so far, goes through the model once, alone; its completions continue from what it left in
    the cache.

    Args:
        records_experts: True if rollouts know their experts.
    """

    def __init__(
        self, folder: ModelFolder, images: ImageInputs, *, device: str, dtype: str, records_experts: bool = False
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

        super().__init__()
        loader = AutoModelForImageTextToText if folder.family.vision else AutoModelForCausalLM
        model = loader.from_pretrained(
            folder.path,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            trust_remote_code=folder.trust_remote_code,
            use_safetensors=True,
        )
        routers = experts.routed(model)  # as the learner's
        self._recorder = ExpertRecorder(routers) if records_experts else None
        self._model = model.to(device).eval()
        # ``generate`` fills what a request leaves open from here: the folder's defaults would change the distribution.
        self._model.generation_config = GenerationConfig()
        self._folder, self._images, self._device = folder, images, device
        self.weight_version = NO_VERSION

    def sleep(self) -> None:
        """Both copies of the weights stay on the device."""

    def wake(self, part: SamplerMemory) -> None:
        """Do nothing: nothing slept."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy all weights in."""
        copy_weights(self._model, weights)
        self.weight_version = version

    def with_model(self, function: Callable[[torch.nn.Module], T]) -> T:
        """A function's answer to the model."""
        return function(self._model)

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], temperature: float) -> list[list[FloatArray]]:
        """One forward pass for each completion, alone."""
        vocabulary = self._folder.vocabulary
        banned_V = torch.zeros(vocabulary.size, dtype=torch.bool, device=self._device)
        banned_V[list(vocabulary.banned)] = True
        found = [self._score_one(sample, banned_V, temperature) for sample in samples]
        if self._recorder:
            self._recorder.clear()
        return [found]

    def _score_one(self, sample: Sample, banned_V: torch.Tensor, temperature: float) -> FloatArray:
        values = np.zeros(len(sample.token_ids), np.float32)
        if not sample.mask.any():
            return values
        ids = np.concatenate([sample.prompt.token_ids, sample.token_ids]).astype(np.int64)
        ids_1S = torch.from_numpy(ids)[None].to(self._device)
        inputs = plain_inputs(self._folder, self._images, self._model, sample.all_images, ids_1S)
        keep = len(sample.token_ids) + 1
        logits_TV = self._model(**inputs, use_cache=False, logits_to_keep=keep).logits[0, :-1]
        written_T = torch.from_numpy(sample.mask).to(self._device)
        targets_W = ids_1S[0, 1 - keep :][written_T]
        found_W, _ = token_logprobs(logits_TV[written_T], targets_W, banned_V, temperature, entropy=False)
        values[sample.mask] = found_W.cpu().numpy()
        return values

    @torch.no_grad()
    def _group(self, request: SamplingRequest) -> RolloutGroup:
        ids_1P = torch.from_numpy(np.asarray(request.token_ids, np.int64))[None].to(self._device)
        num_prompt_tokens = ids_1P.shape[1]
        if self._recorder:
            self._recorder.clear()
        inputs = self._continued(request, ids_1P)
        cuda = [self._device] if self._device.startswith("cuda") else []
        # Seeded by request, so that a rollout does not depend on what was generated before it.
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(request.seed)
            output = self._model.generate(**inputs, generation_config=self._settings(request))
        ids_GT = output.sequences[:, num_prompt_tokens:]
        # Step by step: the scores of all steps together would be the largest tensors of the run.
        logprobs_GT = torch.stack(
            [
                scores_GV.float().log_softmax(-1).gather(1, ids_G[:, None])[:, 0]
                for scores_GV, ids_G in zip(output.scores, ids_GT.unbind(1), strict=True)
            ],
            1,
        )
        known = self._recorder.of_group(len(ids_GT), num_prompt_tokens) if self._recorder else [None] * len(ids_GT)
        rollouts = tuple(
            self._rollout(request, i, ids.cpu().numpy().astype(np.int32), logprobs.cpu().numpy(), known[i])
            for i, (ids, logprobs) in enumerate(zip(ids_GT, logprobs_GT, strict=True))
        )
        return RolloutGroup(request.prompt, rollouts)

    def _continued(self, request: SamplingRequest, ids_1P: torch.Tensor) -> dict[str, Any]:
        """Inputs from which ``generate`` goes on: the group's prompts, with all but their last token in the cache.

        ``num_return_sequences`` would send the prompt and its images through the model once for each member.
        """
        from transformers import GenerationConfig

        ids_GP = ids_1P.repeat(request.num_samples, 1)
        inputs: dict[str, Any] = {"input_ids": ids_GP, "attention_mask": torch.ones_like(ids_GP)}
        if ids_1P.shape[1] == 1:
            return inputs
        # Greedy: it draws no random number. Its token is not used, and not in the cache.
        settings = GenerationConfig(
            do_sample=False, max_new_tokens=1, pad_token_id=self._folder.vocabulary.pad, return_dict_in_generate=True
        )
        prompt = plain_inputs(self._folder, self._images, self._model, request.images, ids_1P[:, :-1])
        prefilled = self._model.generate(**prompt, generation_config=settings)
        cache = prefilled.past_key_values
        cache.reorder_cache(torch.zeros(request.num_samples, dtype=torch.int64, device=ids_1P.device))
        return {**inputs, "past_key_values": cache}

    def _settings(self, request: SamplingRequest) -> Any:
        from transformers import GenerationConfig

        vocabulary = self._folder.vocabulary
        sampling = {"temperature": request.temperature, "top_k": 0, "top_p": 1.0} if request.temperature > 0 else {}
        return GenerationConfig(
            do_sample=request.temperature > 0,
            max_new_tokens=request.max_new_tokens,
            eos_token_id=list(vocabulary.eos),
            pad_token_id=vocabulary.pad,
            suppress_tokens=list(vocabulary.banned) or None,
            repetition_penalty=1.0,
            return_dict_in_generate=True,
            output_scores=True,
            **sampling,
        )

    def _rollout(
        self, request: SamplingRequest, index: int, ids: IntArray, logprobs: FloatArray, known: IntArray | None
    ) -> Rollout:
        ends = np.flatnonzero(np.isin(ids, self._folder.vocabulary.eos))
        length = int(ends[0]) + 1 if len(ends) else len(ids)
        ids, logprobs = ids[:length], logprobs[:length].astype(np.float32)
        return continued(
            request,
            index,
            Segment(ids, True, logprobs),
            text=self._folder.tokenizer.decode(ids, skip_special_tokens=True),
            finish_reason="stop" if len(ends) else "length",
            weight_version=self.weight_version,
            experts=None if known is None else known[: len(request.token_ids) + length - 1],
        )


class ExpertRecorder:
    """Records the experts of a group of completions that are sampled from one prompt."""

    def __init__(self, routers: Sequence[experts.Router]) -> None:
        self._layers: list[list[IntArray]] = [[] for _ in routers]
        for router, calls in zip(routers, self._layers, strict=True):
            router.register_forward_hook(partial(_record, calls))

    def clear(self) -> None:
        """Begin a group."""
        for calls in self._layers:
            calls.clear()

    def of_group(self, size: int, prompt_tokens: int) -> list[IntArray]:
        """(tokens, L, K) experts of each member of the group.

        The prompt's tokens but the last have gone through the model in one call, alone; each later call had one token
        of each member.
        """
        alone = int(prompt_tokens > 1)
        layers = [(calls[:alone], np.stack(calls[alone:], 1)) for calls in self._layers]
        return [np.stack([np.concatenate([*first, later[i]]) for first, later in layers], 1) for i in range(size)]


def _record(calls: list[IntArray], router: torch.nn.Module, inputs: Any, outputs: Any) -> None:
    calls.append(outputs[2].cpu().numpy().astype(np.uint16))
