"""The networks that a run trains, as a plan of memory and time needs them: the policy, and a critic beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mmrl.config.sections import Config
from mmrl.engine.learner.counting import training_of
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.shape import model_shape
from mmrl.engine.network.sizes import part_sizes, quantized_sizes, weight_bytes
from mmrl.interfaces import Algorithm
from mmrl.ops.cost import ModelShape, Training, Work
from mmrl.token_columns import CRITIC, POLICY, REWARD

Sizes = Mapping[str, tuple[int, int]]
"""Trained and frozen parameters of each part of a model."""


@dataclass(frozen=True, slots=True)
class TrainedSize:
    """A network that is trained.

    Attributes:
        role: Its role.
        shape: Its model's.
        training: The parts that are trained.
        trained: Parameters with a gradient.
        frozen: Parameters without one.
        quantized: Frozen parameters that are kept in 4 bits.
        weight_bytes: Bytes of each of its weights.
        scores: True if it has a score in place of a head: a reward model, and a critic.
        is_own: True if it begins as a folder of its own.
    """

    role: str
    shape: ModelShape
    training: Training
    trained: int
    frozen: int
    quantized: int
    weight_bytes: Sequence[int]
    scores: bool
    is_own: bool = False

    @classmethod
    def of(
        cls, role: str, folder: ModelFolder, sizes: Sizes, config: Config, width: int, *, is_own: bool = False
    ) -> TrainedSize:
        """The size of a network with ``width`` bytes a number; ``sizes`` are its parts'."""
        scores = role != POLICY
        quantized = 0 if config.model.quantize is None else quantized_sizes(folder)[0]
        return cls(
            role,
            model_shape(folder.config),
            training_of({part: n for part, (n, _) in sizes.items()}, adapted=config.model.lora is not None),
            sum(trained for trained, _ in sizes.values()),
            sum(frozen for _, frozen in sizes.values()),
            quantized,
            weight_bytes(folder, width, quantize=quantized > 0, scores=scores),
            scores,
            is_own,
        )

    def on_base(self, config: Config) -> bool:
        """True if its frozen weights are the policy's own: those of a critic with adapters, below ZeRO 3."""
        critic, stage = config.critic, config.learner.zero_stage
        return self.role == CRITIC and critic is not None and critic.shares_base(config.model.lora is not None, stage)

    def work(self, row: Work) -> Work:
        """Its work on a row of the policy's: a score's product is nothing."""
        return row if not self.scores else row.without_head()

    def update_flops(self, row: Work) -> int:
        """Operations of its forward and backward pass."""
        return self.shape.update_flops(self.work(row), self.training)


def trained_sizes(
    config: Config,
    folder: ModelFolder,
    sizes: Sizes,
    algorithm: Algorithm,
    width: int,
    critic: ModelFolder | None = None,
) -> tuple[TrainedSize, ...]:
    """The networks that are trained, the policy or a reward model first.

    Args:
        sizes: The first one's.
        width: Bytes of a number.
        critic: The critic's folder, if it does not begin as the policy.
    """
    first = TrainedSize.of(REWARD if algorithm.network == REWARD else POLICY, folder, sizes, config, width)
    if not algorithm.needs().values:
        return (first,)
    found = critic_sizes(config, critic or folder)
    return first, TrainedSize.of(CRITIC, critic or folder, found, config, width, is_own=critic is not None)


def critic_sizes(config: Config, folder: ModelFolder) -> Sizes:
    """Trained and frozen parameters of each part of a critic that begins as a folder."""
    freeze = () if config.critic is None else config.critic.freeze
    return part_sizes(folder, freeze, config.model.lora, scores=True)


def saved_of_critic(config: Config, folder: ModelFolder) -> int:
    """Parameters of a critic that a checkpoint holds: all, or with adapters what is trained."""
    is_whole = config.model.lora is None
    return sum(trained + is_whole * frozen for trained, frozen in critic_sizes(config, folder).values())


def update_flops(networks: Iterable[TrainedSize], row: Work) -> int:
    """Operations of an update of every network on one row."""
    return sum(each.update_flops(row) for each in networks)
