"""A reference that is the policy as it was at some step: copies of its weights, or of its adapters alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch

from mmrl.config.sections import LoraConfig
from mmrl.engine.network import adapters
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.policy import Policy, gathered
from mmrl.engine.network.weights import Failures, save_adapter, save_model


class PolicyCopy(Protocol):
    """A copy of the policy; all ranks call it together."""

    @property
    def is_reset(self) -> bool:
        """True if it was taken since the run began, so that checkpoints must have it."""
        ...

    def take(self) -> None:
        """Copy the policy as it is now."""
        ...

    def save(self, target: Path, failures: Failures) -> None:
        """Write it as a Hugging Face folder, as the policy is written."""
        ...


class WholeCopy:
    """Implements ``PolicyCopy`` for a model of its own, wherever its weights are.

    Args:
        copy: The model that becomes the policy.
    """

    def __init__(self, policy: Policy, copy: Policy, folder: ModelFolder, *, is_reset: bool) -> None:
        self._policy, self._copy, self._folder, self._is_reset = policy, copy, folder, is_reset

    @property
    def is_reset(self) -> bool:
        return self._is_reset

    @torch.no_grad()
    def take(self) -> None:
        """Copy weight by weight: at ZeRO 3 a bucket of the policy and one weight of the copy are whole at a time."""
        own = dict(self._copy.model.named_parameters())
        for name, weight in self._policy.named_weights(self._policy.model.dtype, tied=False):
            with gathered(own[name], changes=True):
                own[name].data.copy_(weight)
        self._is_reset = True

    def save(self, target: Path, failures: Failures) -> None:
        save_model(self._copy, self._folder, target, failures)


class AdapterCopy:
    """Implements ``PolicyCopy`` for a policy with adapters: a second set of their matrices, which takes turns.

    Args:
        saved: The matrices of a checkpoint's; None if the reference is the policy without adapters.
    """

    def __init__(
        self, policy: Policy, folder: ModelFolder, lora: LoraConfig, saved: Sequence[torch.Tensor] | None
    ) -> None:
        self._policy, self._folder, self._lora = policy, folder, lora
        self._factors = list(adapters.file_names(policy.adapted).values())
        self._copies = None if saved is None else list(saved)

    @property
    def is_reset(self) -> bool:
        return self._copies is not None

    @torch.no_grad()
    def take(self) -> None:
        with gathered(*self._factors):
            self._copies = [factor.detach().clone() for factor in self._factors]

    def in_use(self) -> AbstractContextManager[None]:
        """A block in which the policy computes as the reference does."""
        return self._policy.without_adapters() if self._copies is None else self._switched(self._copies)

    def save(self, target: Path, failures: Failures) -> None:
        with self.in_use():
            save_adapter(self._lora, self._policy, self._folder, target, failures)

    @contextmanager
    def _switched(self, copies: Sequence[torch.Tensor]) -> Iterator[None]:
        own = self._written(copies)
        try:
            yield
        finally:
            self._written(own)

    @torch.no_grad()
    def _written(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The matrices as they were, before they get these values."""
        with gathered(*self._factors, changes=True):
            before = [factor.detach().clone() for factor in self._factors]
            for factor, each in zip(self._factors, values, strict=True):
                factor.data.copy_(each)
        return before
