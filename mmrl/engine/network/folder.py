"""A model's Hugging Face folder: its config, tokenizer and processor, loaded once and without weights."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmrl.data.grid import ImageGrid, ImageSizes
from mmrl.data.hub import HubRepo
from mmrl.engine.network.family import Family, family_of
from mmrl.engine.network.image_form import ImageForm
from mmrl.engine.network.image_needs import check_processor, check_takes_image_features
from mmrl.engine.network.optional_imports import without_unused
from mmrl.engine.network.template import TemplateChoice, options_of
from mmrl.engine.network.vocabulary import Vocabulary, ids_of, template_end
from mmrl.errors import ConfigError, MMRLError, first_line
from mmrl.score_head import VALUE_HEADS, as_reward_model

CONFIGURATION = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
"""The files of a model on the hub that are read before its weights."""
KEPT = (*CONFIGURATION, "additional_chat_templates/*.jinja", "LICENSE*", "NOTICE*")
"""The files that a model written anew has from its source, config and index of the weights aside."""
_OWN = ("config.json", "mmrl.json", "adapter_config.json")
"""Names that ``KEPT`` finds and that are about the weights beside them."""
INDEX = "model.safetensors.index.json"
TEXT_IMAGE_FACTOR = 28
"""The image grid of a model that reads no images; no image ever meets it."""
PACKED_LAYERS = {"full_attention", "sliding_attention", "linear_attention"}
"""Types of layers that packed rows can go through."""
_SHOWN_MODELS = 3
"""Most folders within a wrongly named one that a message lists."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The facts of a model that a run needs before its weights are loaded.

    Attributes:
        name: The config's name for it: a folder, or a hub id.
        path: The folder on this machine; a hub model's has all weights once it is ``fetched``.
        commit: Commit of a hub model; None for a folder.
        config: The transformers config.
        tokenizer: The tokenizer.
        processor: The multimodal processor; None for a text model.
        trust_remote_code: True if Python code of the folder may run.
        template: The chat template that is asked for, with its options; by default the folder's own, without any.
        key: The key of the config whose ``path`` names the folder.
    """

    name: str
    path: str
    commit: str | None
    family: Family
    config: Any
    generation_config: Any
    tokenizer: Any
    processor: Any
    vocabulary: Vocabulary
    trust_remote_code: bool = False
    template: TemplateChoice = field(default_factory=TemplateChoice)
    key: str = "model"

    @classmethod
    def open(
        cls,
        name: str,
        revision: str | None = None,
        *,
        trust_remote_code: bool = False,
        with_weights: bool = True,
        template: TemplateChoice | None = None,
        key: str = "model",
    ) -> ModelFolder:
        """Read a model's configuration files.

        Args:
            revision: Branch, tag or commit of a hub model; None for its default branch.
            with_weights: True if a folder must hold them; a hub model's are never fetched here.
            template: None for the folder's own chat template, without options.
            key: The key of the config whose ``path`` is the name, for messages.

        Raises:
            ConfigError: The folder is missing, incomplete or damaged, the family is not supported, or the chat template
                reads no option of a name that is given.
            HubError: The name is a hub id, and the hub does not give it.
            ResourceError: transformers is too old for a model that reads images.
        """
        repo = HubRepo("model", name, revision).pinned() if _is_hub_id(name) else None
        here = _local(name, revision, key, with_weights) if repo is None else _configuration(repo)
        where = f"{key}.path: {name}" if repo is None else str(repo)
        with without_unused():
            from transformers import (
                MODEL_MAPPING,
                AutoConfig,
                AutoProcessor,
                AutoTokenizer,
                GenerationConfig,
                PreTrainedConfig,
            )

        options = {"trust_remote_code": trust_remote_code}
        try:
            # First without transformers, whose message on an unknown type says less.
            written, _ = PreTrainedConfig.get_config_dict(here)
            family = family_of(written.get("model_type"), f"{key}.path: {name}")
            if family.vision:
                check_processor(here, family, where)
            config = AutoConfig.from_pretrained(here, **options)
            loader = AutoProcessor if family.vision else AutoTokenizer
            processor = loader.from_pretrained(here, **options)
        except MMRLError:
            raise
        except Exception as error:  # files of somebody else's: transformers raises whatever it stumbles over
            raise ConfigError(
                f"the model cannot be opened: {first_line(error)}",
                where=where,
                remedy="name a complete folder, or a hub id of one",
            ) from error
        # Code of the folder's own is looked at once it is loaded.
        if family.vision and (body := MODEL_MAPPING.get(type(config), None)):
            check_takes_image_features(body, where)
        try:
            generation = GenerationConfig.from_pretrained(here)
        except OSError:
            generation = GenerationConfig.from_model_config(config)
        tokenizer = processor.tokenizer if family.vision else processor
        template = template or TemplateChoice()
        template.put_into(processor, tokenizer)
        end = template_end(processor, tokenizer, template.options, in_parts=family.vision)
        vocabulary = Vocabulary.of(family, config, generation, tokenizer, end)
        language = config.get_text_config().model_type
        if family.languages and language not in family.languages:
            raise ConfigError(
                f"models of type {family.model_type!r} whose language model is {language!r} are not supported",
                where=where,
                possible=f"language models of type {', '.join(family.languages)}",
                remedy="choose another model of this family",
            )
        for missing, remedy in _missing(family, config, processor, tokenizer, vocabulary):
            raise ConfigError(missing, where=where, remedy=remedy)
        template.check_options(processor, tokenizer, where)
        if repo is None and with_weights:
            _check_weights(here)
        processor = processor if family.vision else None
        commit = repo.revision if repo else None
        facts = (name, str(here), commit, family, config, generation, tokenizer, processor, vocabulary)
        return cls(*facts, trust_remote_code, template, key)

    def fetched(self) -> ModelFolder:
        """The same with ``path`` a folder on this machine that has the weights; call it once per machine.

        Files of the commit that are in the machine's cache are not fetched again. Weights in formats that are not read
        are not fetched.

        Raises:
            ConfigError: The weights are no safetensors.
            HubError: The hub does not give them.
            ResourceError: The cache cannot be written.
        """
        if self.commit is None:
            return self
        repo = HubRepo("model", self.name, self.commit)
        here = _configuration(repo)
        weights = _weights(here)
        repo.download(weights)
        if absent := [name for name in weights if not (here / name).is_file()]:
            raise repo.lacks(absent[0])
        _check_weights(here)
        return replace(self, path=str(here))

    def files(self) -> list[str]:
        """Names of all files that make up the model, weights included."""
        here = Path(self.path)
        configuration = {file.name for pattern in CONFIGURATION for file in here.glob(pattern)}
        weights = (*_weights(here), VALUE_HEADS[0])
        return sorted(configuration | {name for name in weights if (here / name).is_file()})

    @property
    def quantized_by(self) -> str | None:
        """The method that has quantised the folder's weights, such as ``awq``; None if they are not quantised."""
        for config in (self.config, self.config.get_text_config()):
            found = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
            if found:
                facts = found if isinstance(found, dict) else vars(found)
                return str(facts.get("quant_method") or "by an unnamed method")
        return None

    @property
    def max_tokens(self) -> int:
        """Longest sequence that the model was made for."""
        return int(self.config.get_text_config().max_position_embeddings)

    @property
    def images(self) -> ImageForm:
        """How the model reads images; only for a family with ``vision``."""
        assert self.family.images is not None, f"{self.family.model_type} reads no images"
        return self.family.images(self.config, self.processor)

    @property
    def image_token_id(self) -> int:
        """The id of an image token; -1 for a text model."""
        return self.images.token_id if self.family.vision else -1

    def image_sizes(self, min_pixels: int, max_pixels: int) -> ImageSizes:
        """The sizes to which images are normalised; of ``TEXT_IMAGE_FACTOR`` for a text model."""
        if self.family.vision:
            return self.images.sizes(min_pixels, max_pixels)
        return ImageGrid(TEXT_IMAGE_FACTOR, min_pixels, max_pixels)

    def image_tokens(self, width: int, height: int) -> int:
        """Image tokens of a stored image."""
        return self.images.tokens(width, height)

    def fill_template(self, messages: Sequence[Mapping[str, Any]], **further: Any) -> str:
        """A conversation as the chat template writes it, with the run's options; its exceptions are its own.

        Args:
            further: Arguments of ``apply_chat_template``, such as ``tools``.
        """
        renderer = self.processor or self.tokenizer
        options = dict(self.template.options)
        return str(renderer.apply_chat_template(list(messages), tokenize=False, **options, **further))

    @property
    def template_source(self) -> str:
        """The chat template itself; all of them if there are several by name."""
        return str(getattr(self.processor, "chat_template", None) or self.tokenizer.chat_template)

    @property
    def template_options(self) -> list[str]:
        """Names of the options that the chat template reads."""
        return options_of(self.processor or self.tokenizer, self.tokenizer)

    def save_files(self, folder: Path) -> None:
        """Write tokenizer, processor, chat template and generation config beside saved weights: the source's own files.

        So a reader of the source reads the result. ``save_pretrained`` would write the layout of the installed
        transformers: transformers 4 then misses ``preprocessor_config.json``, and 4.51 stops at a
        ``processor_config.json`` of transformers 5 even beside it. Generation settings that do not end at the
        template's end of turn are given it. A run's own chat template replaces the source's. Code that this run may not
        run is not handed on.
        """
        names = [name for name in kept_files(Path(self.path)) if self.trust_remote_code or not name.endswith(".py")]
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(Path(self.path, name), folder / name)
        if not names:  # the source was removed meanwhile
            (self.processor or self.tokenizer).save_pretrained(folder)
        if "generation_config.json" not in names:
            # Not ``save_pretrained``, which refuses settings that many folders have.
            self.generation_config.to_json_file(folder / "generation_config.json")
        self.template.write(folder)
        self._save_end(folder / "generation_config.json")

    def _save_end(self, file: Path) -> None:
        """Add the template's end of turn to saved generation settings, so that servers stop where the run has."""
        end = self.vocabulary.end_of_turn
        if end is None or end in ids_of(self.generation_config.eos_token_id):
            return
        settings = json.loads(file.read_text(encoding="utf-8")) | {"eos_token_id": list(self.vocabulary.eos)}
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def save_config(self, folder: Path, dtype: str, scored_by: str = "") -> None:
        """Write the source's config.json with the element type of saved weights, and nothing else changed.

        Args:
            scored_by: The class of a reward model, which the config then says it is.

        Raises:
            OSError: It cannot be written, or the source was removed meanwhile.
        """
        config = _typed(json.loads(Path(self.path, "config.json").read_text(encoding="utf-8")), dtype)
        if not {"dtype", "torch_dtype"} & config.keys():
            config["dtype"] = dtype
        config = as_reward_model(config, scored_by) if scored_by else config
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (folder / "config.json").write_text(f"{text}\n", encoding="utf-8")


def kept_files(source: Path) -> Iterator[str]:
    """Names of the files that a model written anew takes unchanged from its source's folder."""
    for path in sorted({path for pattern in KEPT for path in source.glob(pattern)}):
        if path.is_file() and path.name not in _OWN and not path.name.endswith(".index.json"):
            yield str(path.relative_to(source))


def _typed(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A config with this element type wherever it names one; a part that leaves its own open goes on doing so."""
    found = dict(config)
    for key, value in config.items():
        if isinstance(value, Mapping):
            open_ = {name: None for name in ("dtype", "torch_dtype") if name in value and value[name] is None}
            found[key] = _typed(value, dtype) | open_
        elif key in ("dtype", "torch_dtype"):
            found[key] = dtype
    return found


def _is_hub_id(name: str) -> bool:
    """True if a name is a hub's, and not a folder's, whether or not the folder exists."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None and not Path(name).parent.exists()


def _local(name: str, revision: str | None, key: str, with_weights: bool) -> Path:
    """The folder of that name."""
    here = Path(name).expanduser()
    if (here / "adapter_config.json").is_file() and not (here / "config.json").is_file():
        raise ConfigError(
            f"{name} holds an adapter, and no whole model",
            where=f"{key}.path",
            possible="the folder of a whole model; a run goes on from an adapter with --resume PATH",
            remedy="merge it into its model: `mmrl export`",
        )
    if not ((here / "config.json").is_file() and (any(here.glob("*.safetensors")) or not with_weights)):
        raise _no_model(name, here, key)
    if revision is not None:
        raise ConfigError(
            "a folder has no revisions",
            where=f"{key}.revision: {revision}",
            possible="a revision of a model on the hub",
            remedy=f"remove it, or name the model on the hub instead of {name}",
        )
    return here


def _no_model(name: str, here: Path, key: str) -> ConfigError:
    """The error for a path that is no model's folder, with what it lacks."""
    what, remedy = f"no model folder at {name}", "check the path"
    if here.is_dir():
        lacks = "no config.json" if not (here / "config.json").is_file() else "a config.json and no *.safetensors"
        what, models = f"{what}: the folder is there, and has {lacks}", _models_below(here)
        if others := sorted(each.name for each in here.iterdir() if each.suffix in (".bin", ".pt", ".pth", ".gguf")):
            remedy = f"convert {others[0]} to safetensors: other formats are not read"
        elif models:
            remedy = f"name the model in it: {', '.join(map(str, models))}"
        elif not any(here.iterdir()):
            remedy = "check the path: the folder is empty"
    elif here.exists():
        what = f"{what}: that is a file"
    possible = "a folder with config.json, tokenizer and safetensors, or a hub id such as org/name"
    return ConfigError(what, where=f"{key}.path", possible=possible, remedy=remedy)


def _models_below(here: Path) -> list[Path]:
    """Some model folders within a folder, the newest checkpoint of a run first."""
    levels = ("*/config.json", "*/*/config.json", "checkpoints/*/model/config.json")
    found = dict.fromkeys(file.parent for pattern in levels for file in here.glob(pattern))
    return sorted(found, reverse=True)[:_SHOWN_MODELS]


def _configuration(repo: HubRepo) -> Path:
    """The folder here with a hub model's configuration files."""
    here = repo.download(CONFIGURATION)
    if not (here / "config.json").is_file():
        raise repo.lacks("config.json")
    return here


def _weights(here: Path) -> list[str]:
    """Names of the files that hold a folder's weights."""
    if not (here / INDEX).is_file():
        return ["model.safetensors"]
    try:
        names = sorted(set(json.loads((here / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("the index of the model's weights cannot be read", where=str(here / INDEX)) from error
    for name in names:
        if not re.fullmatch(r"[\w.-]+\.safetensors", str(name)):
            raise ConfigError(
                f"the index of the model's weights names {name!r:.200}",
                where=str(here / INDEX),
                possible="*.safetensors in the same folder; formats that hold Python objects are not read",
                remedy="convert the weights to safetensors",
            )
    return names


def _check_weights(here: Path) -> None:
    """Read the headers of a folder's weights."""
    from safetensors import SafetensorError, safe_open

    for name in _weights(here):
        try:
            with safe_open(here / name, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"the model's weights cannot be read: {error}",
                where=str(here / name),
                possible="safetensors",
                remedy="fetch the file again, or convert the weights to safetensors",
            ) from error


def _missing(
    family: Family, config: Any, processor: Any, tokenizer: Any, vocabulary: Vocabulary
) -> Iterator[tuple[str, str]]:
    """Reasons why the model cannot be trained here, each with what to do."""
    tuned = "choose an instruction-tuned model"
    if not vocabulary.eos:
        yield "the model has no end-of-sequence token", tuned
    if not (getattr(processor, "chat_template", None) or tokenizer.chat_template):
        yield "the model has no chat template", f"{tuned}, or name a template for it (model.chat_template: FILE)"
    text = config.get_text_config()
    if others := {*(getattr(text, "layer_types", None) or ())} - PACKED_LAYERS:
        yield f"the model has layers of type {', '.join(sorted(others))}, which cannot be packed", tuned
    if getattr(text, "use_bidirectional_attention", None) == "all":
        yield "all tokens of the model see each other, so that it writes no text", tuned
    if getattr(text, "enable_moe_block", False) and not family.mixture:
        yield (
            "the model's layers have mixtures of experts, which this family has not here",
            "choose a dense model of it",
        )
