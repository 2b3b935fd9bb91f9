"""The score of a Hugging Face sequence-classification model for a prompt and its completion, text only.

The conversation, with the completion as the assistant's turn, goes through the model's own chat template; without one,
turns are joined by line breaks. The score is the raw output (logit) ``output``. Special tokens that a dataset or the
policy spells out in text are broken up, so that neither can end a turn. Rollouts longer than ``max_tokens`` are
unscorable: a cut answer is another answer. Rollouts with images are refused unless ``images: drop``; a reward model
that sees images, or one too large for this machine, is served elsewhere (see ``http`` in plugins/README.md).

A causal model's score is read at the last token of the text, as vLLM reads it. transformers reads it at the last token
that is not the padding token, which is another one where a text ends in that token. A checkpoint whose config.json has
the same token for padding and for the end of a text was trained like that, so its score is read as transformers does;
vLLM's answer for it may differ. Encoders pool by themselves.

One process (``workers`` 1) holds the model and gets the rollouts of up to 16 groups at once. They are batched by
length, so that padding is small and a batch does not depend on their order. A rollout's scores in different batches
agree to float rounding. The model is loaded before the first call, outside ``timeout_s``.

Only safetensors are read, and code of the folder runs only with ``trust_remote_code``. A gated model is downloaded
first (``hf download``): workers run without HF_TOKEN.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from mmrl.data.hub import HubRepo
from mmrl.errors import ConfigError, PluginError
from mmrl.interfaces import PluginConfig, Reward, RunFacts
from mmrl.types import IMAGE_PLACEHOLDER, Rollout, Score

if TYPE_CHECKING:
    import torch

_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")


class Model(Reward):
    """A reward model in a worker."""

    workers = 1
    groups_per_call = 16

    class Config(PluginConfig):
        path: str
        """A folder, or a hub id."""
        revision: str | None = None
        """Branch, tag or commit of a hub model."""
        device: str = "auto"
        """cpu, cuda, cuda:N, or auto: cuda where there is one. GPUs are counted as CUDA_VISIBLE_DEVICES says; a rank's
        own GPU must have memory left for it (``sampler.gpu_memory_utilization``)."""
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
        """auto: float32 on a CPU, the weights' element type on a GPU."""
        batch_size: int = Field(default=8, gt=0)
        """Rollouts in one forward pass."""
        max_tokens: int = Field(default=4096, gt=0)
        """Longest prompt and completion; longer ones are unscorable."""
        output: int | None = Field(default=None, ge=0)
        """Place of the score among the outputs; null for a model with one."""
        images: Literal["refuse", "drop"] = "refuse"
        """Treatment of rollouts with images, which the model does not see."""
        trust_remote_code: bool = False
        """True if Python code of the folder may run."""

        @field_validator("device")
        @classmethod
        def _is_device(cls, device: str) -> str:
            kind, _, number = device.partition(":")
            if device not in ("auto", "cpu", "cuda") and not (kind == "cuda" and number.isdecimal()):
                raise ValueError("auto, cpu, cuda or cuda:N")
            return device

    def check(self, run: RunFacts) -> list[str]:
        return [f"the reward model {self.config.path} runs on {self._device}"] if self.config.device == "auto" else []

    def prepare(self) -> None:
        _ = self._tokenizer, self._model

    def score(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        if not rollouts:
            return []
        ids = [self._ids(rollout) for rollout in rollouts]
        order = sorted(range(len(ids)), key=lambda place: (len(ids[place]), ids[place]))
        order = [place for place in order if len(ids[place]) <= self.config.max_tokens]
        scores: list[Score | None] = [None] * len(rollouts)
        for start in range(0, len(order), self.config.batch_size):
            places = order[start : start + self.config.batch_size]
            for place, score in zip(places, self._forward([ids[place] for place in places]), strict=True):
                scores[place] = score
        return scores

    def _forward(self, ids: Sequence[list[int]]) -> list[float]:
        """The scores of one batch, padded on the right."""
        import torch

        model = self._model
        longest, padding = max(map(len, ids)), model.config.get_text_config().pad_token_id
        padded = [sequence + [padding] * (longest - len(sequence)) for sequence in ids]
        mask = [[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in ids]
        inputs = {
            "input_ids": torch.tensor(padded, device=model.device),
            "attention_mask": torch.tensor(mask, device=model.device),
        }
        with torch.inference_mode():
            outputs: torch.Tensor
            if self._reads_last_token:
                rows, places = list(range(len(ids))), [self._last(sequence) for sequence in ids]
                outputs = model.score(model.base_model(**inputs).last_hidden_state[rows, places])
            else:
                outputs = model(**inputs).logits
        scores: list[float] = outputs[:, self.config.output or 0].float().tolist()
        return scores

    def _last(self, ids: Sequence[int]) -> int:
        """The place at which the score of a text is read."""
        places = (place for place in reversed(range(len(ids))) if ids[place] != self._skipped)
        return next(places, 0)

    def _ids(self, rollout: Rollout) -> list[int]:
        if rollout.images and self.config.images == "refuse":
            raise PluginError(
                "the reward model sees no images, and this prompt has some",
                where=f"prompt {rollout.prompt.id!r}",
                remedy="set images: drop, give the reward sources without images, or serve a model that sees them",
            )
        turns = [{"role": m.role, "content": self._text(m.content, rollout)} for m in rollout.messages]
        turns.append({"role": "assistant", "content": self._text(rollout.text)})
        if not self._tokenizer.chat_template:
            return list(self._tokenizer("\n".join(turn["content"] for turn in turns))["input_ids"])
        text = self._tokenizer.apply_chat_template(turns, tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text(self, text: str, rollout: Rollout | None = None) -> str:
        if rollout and rollout.images:
            text = text.replace(IMAGE_PLACEHOLDER, "").strip()
        for token in self._special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    @cached_property
    def _device(self) -> str:
        import torch

        if self.config.device != "auto":
            return str(self.config.device)
        return "cuda" if bool(torch.cuda.is_available()) else "cpu"

    @cached_property
    def _folder(self) -> Path:
        """The model's folder on this machine.

        Raises:
            ConfigError: It is no folder of a sequence-classification model in safetensors.
            HubError: The hub does not give it.
        """
        local = Path(self.config.path).expanduser()
        if local.is_dir() or self.config.path.startswith(("/", ".", "~")):
            folder = local
        else:
            repo = HubRepo("model", self.config.path, self.config.revision).pinned()
            files = [name for name in _FILES if name != "*.py" or self.config.trust_remote_code]
            folder = repo.download(files)
        if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
            raise self._unfit("it has no config.json, or no *.safetensors", "a complete folder, or a hub id of one")
        written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architectures = written.get("architectures") or []
        if not any(str(name).endswith("SequenceClassification") for name in architectures):
            what = f"it is {', '.join(map(str, architectures)) or 'of no stated architecture'}"
            raise self._unfit(what, "a model ...ForSequenceClassification; others behind the reward http")
        return folder

    @cached_property
    def _skipped(self) -> int | None:
        """The token behind which the checkpoint was trained to look; None if it has one of its own for padding."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self._folder, trust_remote_code=self.config.trust_remote_code)
        padding: int | None = config.get_text_config().pad_token_id
        ends = config.get_text_config().eos_token_id
        return padding if padding in (ends if isinstance(ends, list) else [ends]) else None

    @property
    def _reads_last_token(self) -> bool:
        """True if the model is a decoder with a linear layer on one position; encoders pool in ways of their own."""
        import torch

        is_linear = isinstance(getattr(self._model, "score", None), torch.nn.Linear)
        return is_linear and not self._model.config.is_encoder_decoder

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder, trust_remote_code=self.config.trust_remote_code)

    @cached_property
    def _special(self) -> list[str]:
        added = self._tokenizer.added_tokens_decoder.values()
        tokens = {str(token) for token in added if token.special} | set(self._tokenizer.all_special_tokens)
        return sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)

    @cached_property
    def _model(self) -> Any:
        import torch
        from transformers import AutoModelForSequenceClassification

        dtype = self.config.dtype
        if dtype == "auto" and self._device == "cpu":
            dtype = "float32"
        model, found = AutoModelForSequenceClassification.from_pretrained(
            self._folder,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=self.config.trust_remote_code,
            output_loading_info=True,
        )
        if missing := sorted(found["missing_keys"]):
            raise self._unfit(f"its weights lack {', '.join(missing[:3])}", "a trained reward model, its head included")
        outputs = model.config.num_labels
        if (self.config.output is None and outputs != 1) or (self.config.output or 0) >= outputs:
            raise self._unfit(
                f"it has {outputs} outputs and output is {self.config.output}", f"output 0 to {outputs - 1}"
            )
        text = model.config.get_text_config()
        if text.pad_token_id is None:
            text.pad_token_id = _padding(self._tokenizer)
        return model.eval().to(self._device)

    def _unfit(self, what: str, possible: str) -> ConfigError:
        return ConfigError(f"The reward model cannot be used: {what}", where=self.config.path, possible=possible)


def _padding(tokenizer: Any) -> int:
    """A token for padding: the tokenizer's own, else the one that ends a text."""
    tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return int(next(token for token in tokens if token is not None))
