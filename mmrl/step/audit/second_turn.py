"""A second turn of a probe's episode, for runs with an environment: sampled after a turn and an answer to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mmrl.config.sections import Config
from mmrl.engine_api import PromptEncoder, SamplingRequest
from mmrl.errors import ConfigError, DataError
from mmrl.step.audit.probe_prompts import ProbePrompt
from mmrl.types import Sample

NAME = "a second turn"
FINDS = "earlier turns that one side reads otherwise, positions after an answer, images of a tool"
SEEN = "It shows 7."


def second_turns(
    encoder: PromptEncoder, config: Config, firsts: Sequence[tuple[ProbePrompt, Sample]], new_tokens: int
) -> Iterator[tuple[ProbePrompt, SamplingRequest]]:
    """A prompt and a request that goes on after a first turn: of the first prompt, and of the first one with an image,
    which the answer shows again. None without an environment, or where the run has no room for it.

    Args:
        firsts: Prompts, each with a completion that is taken for a turn.
    """
    environment = config.environment
    if environment is None:
        return
    chosen = [*firsts[:1], *[each for each in firsts if each[0].has_images][: bool(environment.max_images)]]
    for prompt, sample in chosen:
        images = prompt.encoded.images[:1]
        turn, *_ = sample.segments
        try:
            answer = encoder.insertion(turn, (SEEN, *images), "tool")
        except (ConfigError, DataError):  # the template carries no such answer
            continue
        request = SamplingRequest(
            prompt.encoded, 1, config.sampler.temperature, new_tokens, seed=1, segments=(turn, answer)
        )
        if len(request.token_ids) + new_tokens <= config.data.max_prompt_tokens + config.max_sampled_tokens:
            yield replace(prompt, name=f"{NAME} with images" if images else NAME, finds=FINDS), request
