"""Lines about the models of a run, and about a prompt as they read it."""

from __future__ import annotations

from pathlib import Path

from mmrl.engine.network.folder import ModelFolder
from mmrl.runs.setup import RunSetup
from mmrl.runs.summary import template_lines
from mmrl.types import EncodedPrompt

_SHOWN_CHARACTERS = 4000


def model_lines(setup: RunSetup) -> list[str]:
    """Lines about the policy and its chat template.

    Raises:
        ConfigError: It cannot be trained as the config says.
    """
    folder = setup.folder
    line = f"{folder.family.model_type}, {folder.vocabulary.size} token ids"
    if (adapters := setup.num_adapter_weights) is not None:
        line += f", adapters of {adapters} parameters"
    if quantize := setup.config.model.quantize:
        line += f"; the learner keeps the language model's linear layers in 4 bits ({quantize})"
    return [line, *template_lines(setup)]


def prompt_lines(prompt: EncodedPrompt, patches: list[int]) -> list[str]:
    """A prompt's id, length and text.

    Args:
        patches: Tokens of each of its images.
    """
    rendered = prompt.text if len(prompt.text) <= _SHOWN_CHARACTERS else prompt.text[:_SHOWN_CHARACTERS] + "..."
    note = f"; its image tokens stand for {', '.join(map(str, patches))} tokens" if patches else ""
    first = f"{prompt.id}, {len(prompt.token_ids)} tokens{note}"
    return [first, *(f"| {line}" for line in rendered.splitlines())]


def critic_lines(setup: RunSetup) -> list[str]:
    """Lines about the critic; none if there is none.

    Raises:
        ConfigError: It cannot be opened, or does not agree with the policy.
    """
    critic, folder = setup.config.critic, setup.critic
    if critic is None:
        return []
    if folder is None:
        named, head = "the policy's model", True
    else:
        from mmrl.engine.network.reward_model import is_reward_model

        named, head = folder.name, folder.commit is None and not is_reward_model(Path(folder.path))
    begins = {"zero": "a head of zeros", "normal": "a head that is drawn"}[critic.head] if head else "the folder's head"
    adapts = setup.config.model.lora is not None
    shared = critic.shares_base(adapts, setup.config.learner.zero_stage)
    base = "the policy's weights" if shared else "a copy of the weights"
    return [f"begins from {named} with {begins}" + (f"; adapters of its own on {base} in memory" if adapts else "")]


def teacher_lines(setup: RunSetup) -> list[str]:
    """A line for each teacher; none if the reference is the initial policy.

    Raises:
        ConfigError: One cannot be opened, or does not agree with the policy.
    """
    pairs = zip(setup.config.reference.models, setup.teachers, strict=True)
    return [
        f"{folder.name} ({folder.family.model_type}): the policy's token ids"
        + _images_of(folder, setup.folder)
        + ("" if teacher.sources is None else f"; for rows of {', '.join(teacher.sources)}")
        for teacher, folder in pairs
    ]


def _images_of(teacher: ModelFolder, policy: ModelFolder) -> str:
    """How a teacher reads images; empty if neither does."""
    if teacher.family.vision:
        return " and image tokens"
    return "; it reads text alone" if policy.family.vision else ""
