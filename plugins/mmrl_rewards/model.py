"""The score of a Hugging Face reward model for a prompt and its completion, with images where the model sees them.

The conversation, with the completion as the assistant's turn, goes through the reward model's own chat template, and
its images through its own processor. The score is the raw output (logit) ``output``. Special tokens that a dataset or
the policy spells out in text are broken up, so that none can end a turn or open an image. Rollouts longer than
``max_tokens`` are unscorable: a cut answer is another answer.

A folder is one of ``...ForSequenceClassification``. Where transformers lacks the class, as it does for most families
that read images, it is made as transformers makes its own (``mmrl.score_head``). Folders of ``Qwen2ForRewardModel``
have a head of two layers. A policy with its score in ``value_head.safetensors`` becomes such a folder by `mmrl export`.

A causal model's score is read at the last token of the text, as vLLM reads it. transformers reads it at the last token
that is not the padding token, which is another one where a text ends in that token. A checkpoint whose config.json has
the same token for padding and for the end of a text was trained like that, so its score is read as transformers does,
unless config.json has ``mmrl_score``; vLLM's answer for it may differ. Encoders pool by themselves.

Each process (``workers``, 1) holds the model and gets the rollouts of up to 16 groups at once. They are batched by
length, so that padding is small and a batch does not depend on their order. A rollout's scores in different batches
agree to float rounding. The model is loaded before the first call, outside ``timeout_s``.

Only safetensors are read, and code of the folder runs only with ``trust_remote_code``. A gated model is downloaded
first (``hf download``): workers run without HF_TOKEN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from mmrl.errors import ConfigError, first_line
from mmrl.interfaces import PluginConfig, Reward, RunFacts
from mmrl.score_head import score_place
from mmrl.types import Rollout, Score, Unscored
from mmrl_rewards.model_conversations import Conversation, Conversations, SeenImage
from mmrl_rewards.model_folder import ModelFolder

if TYPE_CHECKING:
    import torch


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
        """Longest prompt and completion, images included; longer ones are unscorable."""
        output: int | None = Field(default=None, ge=0)
        """Place of the score among the outputs; null for a model with one."""
        images: Literal["refuse", "drop"] = "refuse"
        """refuse: rollouts with images are an error if the model sees none. drop: their images are left out."""
        system_prompt: bool | str = True
        """true keeps a prompt's own, false leaves it out; a text, also an empty one, takes its place."""
        chat_template: str | None = None
        """A file with a Jinja template in place of the folder's own."""
        template_options: Mapping[str, Any] = Field(default_factory=dict)
        """Values of the template's variables, such as ``{enable_thinking: false}``."""
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
        if Path(self.config.path).expanduser().is_dir():
            _ = self._folder  # refuses one that is no reward model before anything starts
        return [f"the reward model {self.config.path} runs on {self._device}"] if self.config.device == "auto" else []

    def prepare(self) -> None:
        _ = self._conversations, self._model

    def score(self, rollouts: Sequence[Rollout]) -> list[Score | Unscored | None]:
        seen: dict[str, SeenImage] = {}
        written = [self._conversations.written(rollout, seen) for rollout in rollouts]
        scores: list[Score | Unscored | None] = [self._too_long(len(each.token_ids)) for each in written]
        order = sorted(range(len(written)), key=lambda place: (len(written[place].token_ids), written[place].token_ids))
        order = [place for place in order if scores[place] is None]
        for start in range(0, len(order), self.config.batch_size):
            places = order[start : start + self.config.batch_size]
            for place, score in zip(places, self._forward([written[place] for place in places]), strict=True):
                scores[place] = score
        return scores

    def _too_long(self, tokens: int) -> Unscored | None:
        most = self.config.max_tokens
        return Unscored(f"reads at most {most} tokens, and the conversation has {tokens}") if tokens > most else None

    def _forward(self, batch: Sequence[Conversation]) -> list[float]:
        """The scores of one batch, padded on the right."""
        import torch

        model, ids = self._model, [each.token_ids for each in batch]
        inputs = self._inputs(batch, padding=model.config.get_text_config().pad_token_id)
        with torch.inference_mode():
            outputs: torch.Tensor
            if self._reads_last_token:
                places = [score_place(sequence, self._folder.skipped) for sequence in ids]
                hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
                outputs = model.score(hidden[list(range(len(ids))), places].float())
            else:
                outputs = model(**inputs).logits
        scores: list[float] = outputs[:, self.config.output or 0].float().tolist()
        return scores

    def _inputs(self, batch: Sequence[Conversation], padding: int) -> dict[str, torch.Tensor]:
        """Keyword arguments of the model's body."""
        import torch

        model, longest = self._model, max(len(each.token_ids) for each in batch)

        def rows(values: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
            return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in values], device=model.device)

        ids = [each.token_ids for each in batch]
        inputs = {"input_ids": rows(ids, padding), "attention_mask": rows([[1] * len(row) for row in ids], 0)}
        images = [image for each in batch for image in each.images]
        if not images:
            return inputs
        for name in images[0].kinds:
            inputs[name] = rows([each.kinds.get(name, ()) for each in batch], 0)
        for name, value in images[0].pixels.items():
            joined = torch.cat([image.pixels[name] for image in images]).to(model.device)
            inputs[name] = joined.to(model.dtype) if value.is_floating_point() else joined
        return inputs

    @cached_property
    def _device(self) -> str:
        import torch

        if self.config.device != "auto":
            return str(self.config.device)
        return "cuda" if bool(torch.cuda.is_available()) else "cpu"

    @cached_property
    def _folder(self) -> ModelFolder:
        options = self.config
        return ModelFolder.open(options.path, options.revision, trust_remote_code=options.trust_remote_code)

    @cached_property
    def _conversations(self) -> Conversations:
        options = self.config
        return Conversations(
            self._folder.path,
            reads_images=self._folder.reads_images,
            drops_images=options.images == "drop",
            template=None if options.chat_template is None else _read_template(options.chat_template),
            options=options.template_options,
            system_prompt=options.system_prompt,
            trust_remote_code=options.trust_remote_code,
        )

    @property
    def _reads_last_token(self) -> bool:
        """True if the model is a decoder with a head on one position; encoders pool in ways of their own."""
        import torch

        on_one = isinstance(getattr(self._model, "score", None), torch.nn.Linear | torch.nn.Sequential)
        return on_one and not self._model.config.is_encoder_decoder

    @cached_property
    def _model(self) -> Any:
        import torch

        dtype = self.config.dtype
        if dtype == "auto" and self._device == "cpu":
            dtype = "float32"
        outputs = self._folder.config.num_labels
        if (self.config.output is None and outputs != 1) or (self.config.output or 0) >= outputs:
            raise self._folder.unfit(
                f"it has {outputs} outputs and output is {self.config.output}", f"output 0 to {outputs - 1}"
            )
        model = self._folder.load(dtype if dtype == "auto" else getattr(torch, dtype))
        text = model.config.get_text_config()
        if text.pad_token_id is None:
            text.pad_token_id = _padding(self._conversations.tokenizer)
        return model.to(self._device)


def _read_template(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the reward model's chat template cannot be read: {first_line(error)}",
            where=f"chat_template: {file}",
            possible="a file with a Jinja template, such as chat.jinja",
        ) from error


def _padding(tokenizer: Any) -> int:
    """A token for padding: the tokenizer's own, else the one that ends a text."""
    tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return int(next(token for token in tokens if token is not None))
