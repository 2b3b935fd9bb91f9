"""The parts of an engine in one record, from the run's setup to the rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmrl.config.sections import Config
from mmrl.data.images import MediaStore
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine_api import NetworkFiles
from mmrl.interfaces import Algorithm, roles_of
from mmrl.token_columns import POLICY, REFERENCE


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The parts of an engine.

    Attributes:
        algorithm: None for evaluation only: no learner is built, and the sampler keeps the folder's weights.
        max_images: Most images in one prompt.
        with_sampler: False if nothing will be sampled.
        checkpoint: A folder for the learner to go on from, as ``Learner.save`` writes it;
            the reference is the model folder's, or a teacher, even then, unless it was reset.
        trains: False for a learner that computes log-probs alone, without an optimizer.
        initial: The folder of its reference then; None if it has none.
        teachers: The folders of ``reference.teachers`` of the config, with the policy's token ids; see ``as_teacher``.
        critic: The critic's folder, if ``critic.path`` names one; likewise.
    """

    config: Config
    folder: ModelFolder
    media: MediaStore
    algorithm: Algorithm | None
    max_images: int
    with_sampler: bool
    checkpoint: Path | None = None
    trains: bool = True
    initial: ModelFolder | None = None
    teachers: tuple[ModelFolder, ...] = ()
    critic: ModelFolder | None = None

    @property
    def critic_config(self) -> Config:
        """The config with the critic's settings in place of the policy's."""
        critic = self.config.critic
        assert critic is not None, "the run has no critic"
        own = {"lr": critic.lr, "weight_decay": critic.weight_decay}
        learner = self.config.learner.model_copy(update=own)
        model = self.config.model.model_copy(update={"freeze": critic.freeze})
        return self.config.model_copy(update={"learner": learner, "model": model})

    @property
    def shares_base(self) -> bool:
        """As ``CriticConfig.shares_base``."""
        config = self.config
        return config.critic is not None and config.critic.shares_base(
            config.model.lora is not None, config.learner.zero_stage
        )

    @property
    def frozen_folders(self) -> tuple[ModelFolder, ...]:
        """The folders of the models that the learner has beside the policy: the teachers', or the policy's own again.

        A policy with adapters is the initial one without them.
        """
        if REFERENCE not in self.roles:
            return ()
        return self.teachers or ((self.folder,) if self.config.model.lora is None else ())

    @property
    def reset_reference(self) -> Path | None:
        """The checkpoint's folder of a reference that was reset; None if the reference is what it was at the start."""
        folder = None if self.checkpoint is None else self.checkpoint / NetworkFiles.of(REFERENCE).model
        return folder if folder is not None and folder.is_dir() else None

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the learner's networks; none without a learner."""
        return () if self.algorithm is None else roles_of(self.algorithm)

    @property
    def trained_role(self) -> str:
        """The role of the network that is trained, or that a learner without updates has for it."""
        return self.roles[0] if self.roles else POLICY

    @property
    def max_sequence_images(self) -> int:
        """Most images in one prompt and an episode's observations; vLLM reserves memory for them."""
        environment = self.config.environment
        observed = 0 if environment is None or not self.folder.family.vision else environment.max_images
        return self.max_images + observed
