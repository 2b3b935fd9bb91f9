"""Critics for tests: an algorithm that needs one, its rows, and the same critic in nothing but transformers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mmrl.interfaces import Aggregation, Needs
from mmrl.ops.critic import clipped_value_loss
from mmrl.ops.objective import training_rows
from mmrl.score_head import sequence_classification_class
from mmrl.types import Batch, Credit, PackedTokens, Sample, TokenLoss, TrainingRow
from mmrl_algorithms.grpo import GRPO

CLIP = 0.2
LENGTHS = (4, 19, 7, 3, 11, 24, 6, 1)
OPTIONS = {"name": "import:tests.engine.critics:Valued"}


class Valued(GRPO):
    """A policy gradient whose baseline is a critic, which learns the reward alone; the clip of values is PPO's."""

    def needs(self) -> Needs:
        return Needs(values=True, last_state=True)

    def credit(self, batch: Batch) -> Credit:
        assert batch.values is not None and batch.final_values is not None
        returns = [np.full(len(mask), reward) for mask, reward in zip(batch.masks, batch.rewards, strict=True)]
        return Credit([own - known for own, known in zip(returns, batch.values, strict=True)], returns=returns)

    def value_loss(self, tokens: PackedTokens) -> TokenLoss:
        return clipped_value_loss(tokens, clip=CLIP)


def valued() -> Valued:
    return Valued(Valued.Config())


def samples_of(setting: Any) -> list[Any]:
    """Ragged completions; of a model that reads images also episodes that show some."""
    return [*setting.samples(LENGTHS), *(setting.episodes() if setting.folder.family.vision else [])]


def critic_rows(samples: Sequence[Sample], seed: int = 0) -> list[TrainingRow]:
    """Rows of a critic with old values and returns that are drawn; their loss is the mean over all tokens."""
    rng, masks = np.random.default_rng([7, seed]), [sample.mask for sample in samples]
    drawn = {name: [rng.normal(0, 1, len(mask)) for mask in masks] for name in ("values", "returns")}
    columns = {name: [each.astype(np.float32) for each in values] for name, values in drawn.items()}
    places = range(len(samples))
    return list(
        training_rows(samples, masks, columns, np.arange(len(samples)), Aggregation("token-mean"), places).values()
    )


def policy_rows(samples: Sequence[Sample], seed: int = 0) -> list[TrainingRow]:
    """Rows of a policy with advantages that are drawn."""
    rng, masks = np.random.default_rng([8, seed]), [sample.mask for sample in samples]
    columns = {"advantages": [np.full(len(mask), rng.normal()) for mask in masks]}
    places = range(len(samples))
    return list(
        training_rows(samples, masks, columns, np.arange(len(samples)), Aggregation("token-mean"), places).values()
    )


class PlainCritic:
    """A critic in nothing but transformers: one unpacked sample at a time.

    Args:
        plain: The folder's model that generates text, whose body is the critic's.
        score: (1, H) its head.

    Attributes:
        model: transformers' class of a body with a score.
    """

    def __init__(self, plain: Any, score: torch.Tensor) -> None:
        config = plain.model.config
        config.num_labels = 1
        self.model = sequence_classification_class(config)(config).eval()
        self.model.model.load_state_dict(plain.model.model.state_dict())
        self.model.score.weight.data.copy_(score)
        self._plain, self.model.config = plain, config
        plain.model = _Values(self.model)

    def __call__(self, sample: Sample, media: Any) -> torch.Tensor:
        """(T + 1,) values of the states before each token, and after the last one."""
        images = [media.load(ref) for ref in sample.all_images]
        count = len(sample.prompt.images)
        found = self._plain.logits(sample.prompt.text, images[:count], sample.token_ids.tolist(), images[count:])
        assert self._plain.prompt_ids == sample.prompt.token_ids.tolist()
        return found[:, 0]

    def loss(self, rows: Sequence[TrainingRow], media: Any) -> torch.Tensor:
        """The mean over all tokens of the rows."""
        total = sum(int(row.mask.sum()) for row in rows)
        return sum((self.loss_of(row, media) for row in rows), torch.zeros(())) / total

    def loss_of(self, row: TrainingRow, media: Any) -> torch.Tensor:
        """The sum over a row's tokens of ``0.5 max((V - G)^2, (clip(V) - G)^2)``."""
        mask = torch.from_numpy(row.mask)
        values = self(row.sample, media)[:-1][mask]
        old, returns = (torch.from_numpy(row.columns[name])[mask] for name in ("values", "returns"))
        clipped = torch.clamp(values, old - CLIP, old + CLIP)
        return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).sum()


class _Values(torch.nn.Module):
    """Answers values where a model that generates text answers logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, **inputs: Any) -> SimpleNamespace:
        hidden = self.model.base_model(**inputs).last_hidden_state
        return SimpleNamespace(logits=self.model.score(hidden))
