"""The self-test's tiny model, prompts with drawn images, and the plainest algorithm."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.commands.doctor.versions import Installed
from mmrl.config.load import from_mapping
from mmrl.config.sections import Config
from mmrl.engine.device import DeviceKind, sleep_level
from mmrl.engine_api import Learner, SamplingRequest
from mmrl.interfaces import Aggregation, Algorithm
from mmrl.step.learn import LearnSettings, finished, learn
from mmrl.types import (
    Batch,
    Credit,
    EncodedPrompt,
    Message,
    PackedTokens,
    Prompt,
    RawImage,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    TokenLoss,
)

if TYPE_CHECKING:
    from mmrl.engine.rank import RankEngine

GROUP_SIZE = 8
NEW_TOKENS = 24
TEMPERATURE = 0.8
MEMORY_FRACTION = 0.1
"""The share of the GPU that vLLM wants to find free when it starts."""
KV_CACHE_BYTES = 2**29
"""vLLM's KV cache: much more than the tiny model needs, so that sleeping shows, and few enough of its small blocks. The
share above would be millions of them on a large GPU, each an object of Python."""
QUESTIONS = (
    ("what is 3+4?", ()),
    ("<image>What digit is this?", ((56, 56),)),
    ("<image> and <image>, what is the sum?", ((56, 84), (140, 112))),
)


class PolicyGradient(Algorithm):
    """Makes completions with a positive advantage likelier and the others less likely."""

    @property
    def aggregation(self) -> Aggregation:
        return Aggregation("token-mean")

    def credit(self, batch: Batch) -> Credit:
        return Credit(batch.rewards)

    def loss(self, tokens: PackedTokens) -> TokenLoss:
        return TokenLoss(-tokens.advantages_T * tokens.logprobs_T)


@dataclass(frozen=True, slots=True)
class TinyRun:
    """An engine and its prompts, one of them text, the last with two images.

    Attributes:
        sleeps: True if the sampler gives its memory to the learner.
    """

    engine: RankEngine
    prompts: tuple[EncodedPrompt, ...]
    sleeps: bool

    @classmethod
    def start(
        cls,
        folder: Path,
        kind: DeviceKind,
        precision: str,
        *,
        family: str | None = None,
        sampler: str | None = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> TinyRun:
        """Write the model and build both engines, as a run does.

        Args:
            folder: For the model and the images.
            family: The model's family; one without vision gets only the prompts without images. By default one with
                vision, where transformers can train it.
            sampler: ``vllm`` or ``hf``; by default vLLM, where the one for this kind of device is installed.
            settings: Values of the run's config, beside this one's own, by section.
        """
        from mmrl.cluster.local import start_engine
        from mmrl.data.images import MediaStore
        from mmrl.engine.aids.tiny_model import write_model
        from mmrl.engine.network.folder import ModelFolder
        from mmrl.engine.network.image_needs import trains_on_images
        from mmrl.engine.spec import EngineSpec
        from mmrl.engine.text.encoding import Encoder

        family = family or ("qwen2_5_vl" if trains_on_images() else "qwen2")
        model = ModelFolder.open(str(write_model(folder / f"model-{family}", family)))
        media = MediaStore(folder / "media", model.image_sizes(3136, 50176))
        encoder = Encoder(model, media)
        prompts = tuple(encoder.encode(prompt) for prompt in _prompts() if model.family.vision or not prompt.images)
        algorithm = PolicyGradient(PolicyGradient.Config())
        config = _config(model.path, kind, precision, sampler, settings or {})
        engine = start_engine(EngineSpec(config, model, media, algorithm, max_images=2, with_sampler=True))
        return cls(engine, prompts, sleeps=config.sampler.name == "vllm" and sleep_level(kind) is not None)

    def requests(self, temperature: float, num_samples: int, seed: int) -> list[SamplingRequest]:
        """A request for each prompt."""
        return [
            SamplingRequest(prompt, num_samples, temperature, NEW_TOKENS, (seed * len(self.prompts) + index) << 16)
            for index, prompt in enumerate(self.prompts)
        ]


def take_step(rollouts: Sequence[Rollout], learner: Learner) -> Mapping[str, float]:
    """Metrics of a step on whole groups, in which each completion's advantage is 1 or -1."""
    groups = []
    for begin in range(0, len(rollouts), GROUP_SIZE):
        own = tuple(rollouts[begin : begin + GROUP_SIZE])
        signs = np.where(np.arange(begin, begin + len(own)) % 2, 1.0, -1.0)
        groups.append(ScoredGroup(RolloutGroup(own[0].prompt, own), signs, np.ones(len(own), bool), {}))
    algorithm = PolicyGradient(PolicyGradient.Config())
    return finished(learn(groups, algorithm, learner, LearnSettings())).metrics


def _config(
    model: str, kind: DeviceKind, precision: str, sampler: str | None, settings: Mapping[str, Mapping[str, Any]]
) -> Config:
    if sampler is None:
        installed = Installed.here()
        sampler = "vllm" if installed.vllm and installed.vllm_is_for_cpu == (kind == "cpu") else "hf"
    on_vllm = {"gpu_memory_utilization": MEMORY_FRACTION, "engine": {"kv_cache_memory_bytes": KV_CACHE_BYTES}}
    own: dict[str, dict[str, Any]] = {
        "model": {"path": model, "dtype": precision},
        "data": {"train": {"name": "drawn"}, "max_prompt_tokens": 256},
        "algorithm": {"name": "policy-gradient"},
        "sampler": {
            "name": sampler,
            "group_size": GROUP_SIZE,
            "max_new_tokens": NEW_TOKENS,
            "temperature": TEMPERATURE,
            **(on_vllm if sampler == "vllm" else {}),
        },
        "learner": {"lr": 1e-2},
        "trainer": {"steps": 2},
    }
    return from_mapping(own | {name: {**own.get(name, {}), **section} for name, section in settings.items()})


def _prompts() -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [
        Prompt(f"prompt {index}", (Message("user", text),), tuple(_draw(rng, *size) for size in sizes))
        for index, (text, sizes) in enumerate(QUESTIONS)
    ]


def _draw(rng: np.random.Generator, width: int, height: int) -> RawImage:
    """An image of noise."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(buffer, "PNG")
    return RawImage(buffer.getvalue(), f"drawn {width}x{height}")
