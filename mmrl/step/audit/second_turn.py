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
    encoder: PromptEncoder,
    config: Config,
    firsts: Sequence[tuple[ProbePrompt, Sample]],
    new_tokens: int,
    left_out: dict[str, str],
) -> Iterator[tuple[ProbePrompt, SamplingRequest]]:
    """A prompt and a request that goes on after a first turn: of the first prompt, and of the first one with an image,
    which the answer shows again. None without an environment.

    Args:
        firsts: Prompts, each with a completion that is taken for a turn.
        left_out: Takes why a turn is not asked, by its name.
    """
    environment = config.environment
    if environment is None:
        return
    most = config.data.max_prompt_tokens + config.max_sampled_tokens
    chosen = [*firsts[:1], *[each for each in firsts if each[0].has_images][: bool(environment.max_images)]]
    for prompt, sample in chosen:
        images = prompt.encoded.images[:1]
        name = f"{NAME} with images" if images else NAME
        turn, *_ = sample.segments
        try:
            answer = encoder.insertion(turn, (SEEN, *images), "tool")
        except (ConfigError, DataError) as error:  # the template carries no such answer
            left_out[name] = error.what
            continue
        request = SamplingRequest(
            prompt.encoded, 1, config.sampler.temperature, new_tokens, seed=1, segments=(turn, answer)
        )
        if len(request.token_ids) + new_tokens <= most:
            yield replace(prompt, name=name, finds=FINDS), request
        else:
            left_out[name] = f"longer than a sequence of the run, which has at most {most} tokens"
