"""A model's Hugging Face folder: its config, tokenizer and processor, loaded once and without weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
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
        trust_remote_code: Whether Python code of the folder may run.
    """

    path: str
    family: Family
    config: Any
    generation_config: Any
    tokenizer: Any
    processor: Any
    vocabulary: Vocabulary
    trust_remote_code: bool = False

    @classmethod
    def open(cls, path: str, *, trust_remote_code: bool = False) -> ModelFolder:
        """Read a model's configuration files.

        Raises:
            ConfigError: The folder is missing or incomplete, or the family is not supported.
            HubError: The path is a hub id, and the hub does not give it.
        """
        path = str(Path(path).expanduser()) if path.startswith("~") else path
        owner, _, _ = path.partition("/")
        on_hub = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path) is not None and not Path(owner).exists()
        here = Path(path)
        if not on_hub and not ((here / "config.json").is_file() and any(here.glob("*.safetensors"))):
            raise ConfigError(
                f"no model folder at {path}",
                where="model.path",
                possible="a folder with config.json, tokenizer and safetensors, or a hub id such as org/name",
                remedy="check the path",
            )
        from transformers import AutoConfig, AutoProcessor, AutoTokenizer, GenerationConfig, PreTrainedConfig

        options = {"trust_remote_code": trust_remote_code}
        try:
            # Read by itself first: transformers has less to say of a type that it does not know.
            written, _ = PreTrainedConfig.get_config_dict(path)
            family = family_of(written.get("model_type"), path)
            config = AutoConfig.from_pretrained(path, **options)
            loader = AutoProcessor if family.vision else AutoTokenizer
            processor = loader.from_pretrained(path, **options)
        except (OSError, ValueError) as error:
            raise (HubError if on_hub else ConfigError)(
                f"{'no such folder here, and the hub' if on_hub else 'the model'} cannot be opened: "
                f"{str(error).splitlines()[0]}",
                where=f"model.path: {path}",
                remedy="name a complete folder, or a hub id that this machine can reach or has cached",
            ) from error
        try:
            generation = GenerationConfig.from_pretrained(path)
        except OSError:
            generation = GenerationConfig.from_model_config(config)
        tokenizer = processor.tokenizer if family.vision else processor
        vocabulary = Vocabulary.of(family, config, generation, tokenizer)
        for missing in _missing(config, processor, tokenizer, vocabulary):
            raise ConfigError(missing, where=f"model.path: {path}", remedy="choose an instruction-tuned model")
        processor = processor if family.vision else None
        return cls(path, family, config, generation, tokenizer, processor, vocabulary, trust_remote_code)

    @property
    def max_tokens(self) -> int:
        """Longest sequence that the model was made for."""
        return int(self.config.get_text_config().max_position_embeddings)

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
        # Not ``save_pretrained``, which refuses settings that many folders have.
        self.generation_config.to_json_file(folder / "generation_config.json")


def _missing(config: Any, processor: Any, tokenizer: Any, vocabulary: Vocabulary) -> Iterator[str]:
    """What keeps the model from being trained here."""
    if not vocabulary.eos:
        yield "the model has no end-of-sequence token"
    if not (getattr(processor, "chat_template", None) or tokenizer.chat_template):
        yield "the model has no chat template"
    if "sliding_attention" in (getattr(config.get_text_config(), "layer_types", None) or ()):
        yield "the model has layers with sliding-window attention, which cannot be packed"
