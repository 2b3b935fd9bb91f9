"""A model's Hugging Face folder: its config, tokenizer and processor, loaded once and without weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.engine.family import Family, family_of
from mmrl.engine.vocabulary import Vocabulary
from mmrl.errors import ConfigError, HubError


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What a run needs to know of a model before its weights are loaded.

    Attributes:
        path: As the config names it: a folder, or a hub id.
        config: The transformers config.
        tokenizer: The tokenizer.
        processor: The multimodal processor; None for a text model.
    """

    path: str
    family: Family
    config: Any
    generation_config: Any
    tokenizer: Any
    processor: Any
    vocabulary: Vocabulary

    @classmethod
    def open(cls, path: str, *, trust_remote_code: bool = False) -> ModelFolder:
        """Read a model's configuration files.

        Raises:
            ConfigError: The folder is missing or incomplete, or the family is not supported.
            HubError: The path is a hub id, and the hub does not give it.
        """
        on_hub = not Path(path).exists() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) is not None
        if not on_hub and not (Path(path) / "config.json").is_file():
            raise ConfigError(
                f"no model folder at {path}",
                where="model.path",
                possible="a folder with config.json, tokenizer and safetensors, or a hub id such as org/name",
                remedy="check the path",
            )
        from transformers import AutoConfig, AutoProcessor, AutoTokenizer, GenerationConfig

        options = {"trust_remote_code": trust_remote_code}
        try:
            config = AutoConfig.from_pretrained(path, **options)
            family = family_of(config, path)
            loader = AutoProcessor if family.vision else AutoTokenizer
            processor = loader.from_pretrained(path, **options)
        except (OSError, ValueError) as error:
            raise (HubError if on_hub else ConfigError)(
                f"the model cannot be opened: {str(error).splitlines()[0]}",
                where=f"model.path: {path}",
                remedy="name a complete folder, or a hub id that this machine can reach or has cached",
            ) from error
        try:
            generation = GenerationConfig.from_pretrained(path)
        except OSError:
            generation = GenerationConfig.from_model_config(config)
        tokenizer = processor.tokenizer if family.vision else processor
        vocabulary = Vocabulary.of(family, config, generation, tokenizer)
        return cls(path, family, config, generation, tokenizer, processor if family.vision else None, vocabulary)

    @property
    def image_factor(self) -> int:
        """Both sides of a normalised image are multiples of this many pixels."""
        vision = self.config.vision_config
        return int(vision.patch_size * vision.spatial_merge_size)

    @property
    def image_token_id(self) -> int:
        """The id that stands for one merged image patch; -1 for a text model."""
        return int(self.config.image_token_id) if self.family.vision else -1

    def save_files(self, folder: Path) -> None:
        """Write tokenizer, processor and generation config beside saved weights."""
        (self.processor or self.tokenizer).save_pretrained(folder)
        self.generation_config.save_pretrained(folder)
