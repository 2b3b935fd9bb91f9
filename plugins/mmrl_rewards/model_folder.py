"""A reward model's folder: which layout it has, its weights in transformers' class, and where its score is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.data.hub import HubRepo
from mmrl.errors import ConfigError, first_line
from mmrl.score_head import BEGIN_SCORE, CLASS, NO_SCORE, VALUE_HEADS, sequence_classification_class, skipped_token

if TYPE_CHECKING:
    import torch

TWO_LAYERS = "Qwen2ForRewardModel"
"""Qwen2 with a head of two layers. transformers lacks the class; folders bring its code, which is not needed here."""
_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")
_GENERATING = ("ForCausalLM", "ForConditionalGeneration")
_POSSIBLE = f"a model ...{CLASS} or {TWO_LAYERS}; others behind the reward http"


@dataclass(frozen=True)
class ModelFolder:
    """The folder of a trained reward model.

    Attributes:
        name: The config's name for it.
        path: The folder on this machine.
        trust_remote_code: True if Python code of the folder may run.
    """

    name: str
    path: Path
    trust_remote_code: bool = False

    @classmethod
    def open(cls, name: str, revision: str | None, *, trust_remote_code: bool) -> ModelFolder:
        """Find the folder, and fetch it if it is on the hub: first its config.json, which says whether it fits.

        Raises:
            ConfigError: It is no folder of a trained reward model in safetensors.
            HubError: The hub does not give it.
        """
        local = Path(name).expanduser()
        if local.is_dir() or name.startswith(("/", ".", "~")):
            found = cls(name, local, trust_remote_code)
            found.check()
            return found
        repo = HubRepo("model", name, revision).pinned()
        cls(name, repo.download(["config.json", *VALUE_HEADS]), trust_remote_code).check(complete=False)
        files = [pattern for pattern in _FILES if pattern != "*.py" or trust_remote_code]
        found = cls(name, repo.download(files), trust_remote_code)
        found.check()
        return found

    def check(self, *, complete: bool = True) -> None:
        """Check what the files say without reading weights.

        Args:
            complete: True if the weights must be there.

        Raises:
            ConfigError: It is no folder of a trained reward model in safetensors.
        """
        if not (self.path / "config.json").is_file() or (complete and not list(self.path.glob("*.safetensors"))):
            raise self.unfit("it has no config.json, or no *.safetensors", "a complete folder, or a hub id of one")
        if self._is_remote or self.architecture.endswith(CLASS) or self.architecture == TWO_LAYERS:
            return
        what = f"it is {self.architecture or 'of no stated architecture'}"
        if head := next((name for name in VALUE_HEADS if (self.path / name).is_file()), None):
            fetch = "" if Path(self.name).expanduser().is_dir() else f"hf download {self.name} --local-dir DIR, then "
            source = "DIR" if fetch else self.name
            remedy = f"write it as a reward model first: {fetch}mmrl export {source} OUT"
            raise self.unfit(f"{what} with its score in {head}", _POSSIBLE, remedy)
        if self.architecture.endswith(_GENERATING):
            raise self.unfit(f"{what}, which {NO_SCORE}", _POSSIBLE, BEGIN_SCORE)
        raise self.unfit(what, _POSSIBLE)

    @cached_property
    def written(self) -> Mapping[str, Any]:
        """The folder's config.json."""
        facts: dict[str, Any] = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        return facts

    @property
    def architecture(self) -> str:
        return str((self.written.get("architectures") or [""])[0])

    @property
    def _is_remote(self) -> bool:
        """True if the folder's own code makes the model."""
        return self.trust_remote_code and "AutoModelForSequenceClassification" in self.written.get("auto_map", {})

    @cached_property
    def config(self) -> Any:
        """The transformers config."""
        from transformers import AutoConfig, Qwen2Config

        try:
            if self.architecture == TWO_LAYERS:  # its own config class has nothing that Qwen2's lacks
                return Qwen2Config.from_pretrained(self.path)
            return AutoConfig.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)
        except Exception as error:  # files of somebody else's: transformers raises whatever it stumbles over
            raise self.unfit(f"its config.json cannot be read: {first_line(error)}", _POSSIBLE) from error

    @property
    def reads_images(self) -> bool:
        """True if the model sees images."""
        from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        return type(self.config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    @cached_property
    def skipped(self) -> int | None:
        """The token behind which the score is read; see ``score_head.skipped_token``."""
        return None if self.architecture == TWO_LAYERS else skipped_token(self.config)

    def load(self, dtype: torch.dtype | str) -> Any:
        """The model, its head in float32.

        Raises:
            ConfigError: Weights are missing, have other shapes, or cannot be read.
        """
        _ = self.skipped  # before a token for padding is chosen where the config has none
        maker = self._class()
        options = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
        if self._is_remote:
            options["trust_remote_code"] = True
        else:
            options["config"] = self.config
        try:
            model, found = maker.from_pretrained(self.path, **options)
        except Exception as error:  # files of somebody else's: transformers raises whatever it stumbles over
            what = self._of_another_shape() or f"its weights cannot be read: {first_line(error)}"
            raise self.unfit(what, "a trained reward model, its head included") from error
        if missing := sorted(found["missing_keys"]):
            count = f"{len(missing)} of {len(model.state_dict())} weights: {', '.join(missing[:3])}"
            raise self.unfit(f"its files lack {count}", "a trained reward model, its head included")
        score = getattr(model, "score", None)
        if score is not None:
            score.float()
        return model.eval()

    def _class(self) -> Any:
        from transformers import AutoModelForSequenceClassification

        if self._is_remote:
            return AutoModelForSequenceClassification
        return _with_two_layers() if self.architecture == TWO_LAYERS else sequence_classification_class(self.config)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights in the files."""
        from safetensors import SafetensorError, safe_open

        shapes = dict[str, tuple[int, ...]]()
        for file in self.path.glob("*.safetensors"):
            with suppress(SafetensorError), safe_open(file, "pt") as weights:
                shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        return shapes

    def _of_another_shape(self) -> str:
        """A clause on a head whose shape is not the one that config.json means; empty if it is."""
        shape = self._shapes().get("score.weight")
        wanted = (self.config.num_labels, self.config.get_text_config().hidden_size)
        if shape is None or shape == wanted:
            return ""
        return f"its score.weight is {shape[0]} x {shape[1]}, and config.json means {wanted[0]} x {wanted[1]}"

    def unfit(self, what: str, possible: str, remedy: str = "") -> ConfigError:
        """An error of this folder."""
        return ConfigError(
            f"The reward model cannot be used: {what}", where=self.name, possible=possible, remedy=remedy
        )


def _with_two_layers() -> Any:
    """The class of ``TWO_LAYERS``: Linear, ReLU and Linear on the last hidden state."""
    from torch import nn
    from transformers import Qwen2ForSequenceClassification

    def build(model: Any, config: Any) -> None:
        Qwen2ForSequenceClassification.__init__(model, config)
        width = config.hidden_size
        model.score = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, config.num_labels))
        model.post_init()

    namespace: dict[str, Callable[..., None] | str]
    namespace = {"__init__": build, "__module__": Qwen2ForSequenceClassification.__module__}
    return type(TWO_LAYERS, (Qwen2ForSequenceClassification,), namespace)
