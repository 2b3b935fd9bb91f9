"""A plain transformers model that holds the policy's weights, and log-probs that it gives in a wider type."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from mmrl.engine import device
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.policy import Policy, empty_model
from mmrl.engine.network.sizes import meta_model
from mmrl.engine.network.vision import ImageInputs
from mmrl.engine.network.widening import Widening
from mmrl.ops.logprobs import token_logprobs
from mmrl.ops.parity import WIDER
from mmrl.types import FloatArray, ImageRef, Sample

MEMORY_SHARE = 0.7
"""Most of the device's free memory that a copy of the weights may take; a forward pass has the rest."""


class WidePass:
    """Log-probs as transformers alone computes them in a wider type: one sample at a time, no packing of ours.

    The model is built for a call and dropped after it. It holds the policy's own weights, and widens each where it
    computes with it. Only what the policy does not hold whole (it is partitioned, has adapters or is kept in 4 bits) is
    copied, in the run's type.

    Args:
        dtype: The run's type.
    """

    def __init__(self, folder: ModelFolder, images: ImageInputs, kind: device.DeviceKind, dtype: str) -> None:
        self._folder, self._images, self._kind = folder, images, kind
        self._own, self._wider = getattr(torch, dtype), getattr(torch, WIDER[dtype])

    @torch.no_grad()
    def logprobs(self, policy: Policy, samples: Sequence[Sample]) -> list[FloatArray]:
        """(T_i,) float64 log-probs, 0 where the policy did not write the token; collective.

        One rank has all samples. The others take part in gathering the weights, and keep none. Empty if the device has
        no room for it, or a kernel none for the type.
        """
        where = device.torch_device(self._kind)
        model = self._empty() if samples and (policy.is_whole or self._fits()) else None
        has_room = torch.tensor(int(not samples or model is not None), device=where)
        torch.distributed.all_reduce(has_room, torch.distributed.ReduceOp.MIN)
        if not has_room:
            return []
        weights = policy.named_weights(self._own)
        if model is None:
            for _ in weights:
                pass
            return []
        take_weights(model, weights, where)
        try:
            with Widening(self._own, self._wider):
                return [self._of_one(model, policy, sample) for sample in samples]
        except Exception:  # whatever a kernel raises: a run can do without this measure
            logging.getLogger(__name__).warning("no log-probs in %s", self._wider, exc_info=True)
            return []

    def _empty(self) -> Any:
        """A model of the wider type whose weights are memory that nothing touches; None if there is none."""
        # The other implementations of experts have no kernel for float64.
        kernels = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
        options = {"dtype": self._wider, "trust_remote_code": self._folder.trust_remote_code, **kernels}
        try:
            with torch.random.fork_rng(devices=[]):  # some layers draw numbers when they are made
                return empty_model(self._folder, options)
        except RuntimeError as error:
            if device.is_out_of_memory(error):
                return None
            raise

    def _fits(self) -> bool:
        """True if the device has room for a copy of the weights in the run's type, beside all that is there."""
        needed = self._own.itemsize * sum(each.numel() for each in meta_model(self._folder).parameters())
        return bool(needed <= MEMORY_SHARE * device.spare_memory_bytes(self._kind))

    def _of_one(self, model: Any, policy: Policy, sample: Sample) -> FloatArray:
        targets_T = torch.from_numpy(sample.token_ids.astype(np.int64)).to(model.device)
        prompt_P = torch.from_numpy(np.asarray(sample.prompt.token_ids, np.int64)).to(model.device)
        ids_1S = torch.cat([prompt_P, targets_T])[None]
        inputs = plain_inputs(self._folder, self._images, model, sample.all_images, ids_1S) | self._types(ids_1S)
        logits_TV = model(**inputs, use_cache=False, logits_to_keep=len(targets_T) + 1).logits[0, :-1]
        written_T = torch.from_numpy(sample.mask).to(model.device)
        found_W, _ = token_logprobs(
            logits_TV[written_T], targets_T[written_T], policy.banned_V, policy.temperature, entropy=False
        )
        values = np.zeros(len(targets_T))
        values[sample.mask] = found_W.cpu().numpy()
        return values

    def _types(self, ids_1S: torch.Tensor) -> dict[str, torch.Tensor]:
        """Which tokens are an image's, by the model's own processor; nothing for a model that does not ask.

        transformers computes positions from it. So this pass is right where our other ones all get it wrong.
        """
        processor, name = self._folder.processor, "mm_token_type_ids"
        if processor is None or name not in processor.model_input_names:
            return {}
        return {name: torch.tensor(processor.create_mm_token_type_ids(ids_1S.tolist()), device=ids_1S.device)}


def plain_inputs(
    folder: ModelFolder, images: ImageInputs, model: Any, refs: Sequence[ImageRef], ids_1S: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Keyword arguments of a model of transformers for one sequence and its images."""
    inputs = {"input_ids": ids_1S, "attention_mask": torch.ones_like(ids_1S)}
    if folder.family.vision and (folder.images.multimodal_positions or folder.images.looks_ahead):
        inputs["mm_token_type_ids"] = (ids_1S == folder.image_token_id).int()
    if refs:
        pixels, grids = zip(*[images(ref) for ref in refs], strict=True)
        joined = torch.cat(pixels).to(model.device, model.dtype)
        inputs |= folder.images.generate_inputs(joined, torch.stack(grids).to(model.device))
    return inputs


@torch.no_grad()
def copy_weights(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy all weights in, by their state-dict names."""
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, weight in weights:
        own.pop(name).copy_(weight)
    assert not own, f"not sent: {sorted(own)}"


def take_weights(model: Any, weights: Iterable[tuple[str, torch.Tensor]], where: str) -> None:
    """Put all weights in the place of the model's own, by their state-dict names, and its buffers on the device."""
    awaited = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, weight in weights:
        awaited.remove(name)
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, torch.nn.Parameter(weight.to(where), requires_grad=False))
    assert not awaited, f"not sent: {sorted(awaited)}"
    model.to(where)
