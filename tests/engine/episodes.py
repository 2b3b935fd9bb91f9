"""Episodes that tests play: texts and images inserted by hand, and log-probs of the whole by plain transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from mmrl.engine_api import Finished, Sampler, SamplingRequest
from mmrl.types import EncodedPrompt, RawImage, Rollout, Segment

TEMPERATURE = 0.8
LATENCY = 3
TURNS = 3
Timing = Literal["early", "late", "random"]


@dataclass(frozen=True)
class Played:
    """A finished episode, or a group.

    Attributes:
        steps: (began, finished) of each turn.
    """

    rollout: Rollout
    steps: tuple[tuple[int, int], ...]


def inserted(setting: Any, words: str, image: RawImage | None = None) -> Segment:
    """An observation in a user turn, with the marks around it."""
    folder = setting.folder
    refs = () if image is None else (setting.media.add(image),)
    shown = "<|vision_start|><|image_pad|><|vision_end|>" * len(refs)
    text = f"\n<|im_start|>user\n{shown}{words}<|im_end|>\n<|im_start|>assistant\n"
    ids: list[int] = []
    for token in folder.tokenizer(text, add_special_tokens=False)["input_ids"]:
        ids += folder.images.expansion(refs[0].width, refs[0].height) if token == folder.image_token_id else [token]
    return Segment(np.array(ids, np.int32), False, np.zeros(len(ids), np.float32), images=refs, role="user")


def first_turn(prompt: EncodedPrompt, seed: int, tokens: int = 5) -> SamplingRequest:
    return SamplingRequest(prompt, 1, TEMPERATURE, tokens, seed << 16, answered_after=LATENCY)


def next_turn(finished: Finished, observations: Sequence[Segment], tokens: int) -> SamplingRequest | None:
    """The continuation with the next observation; None after the last turn."""
    (rollout,) = finished.group.rollouts
    turn = sum(segment.by_policy for segment in rollout.segments)
    if turn == TURNS:
        return None
    segments = (*rollout.segments, observations[turn - 1])
    request = first_turn(rollout.prompt, 0, tokens + turn)
    return replace(request, segments=segments, seed=len(rollout.token_ids) * 7919 + turn)


def play(
    sampler: Sampler,
    prompts: Sequence[EncodedPrompt],
    observations: Sequence[Segment],
    beside: Sequence[SamplingRequest] = (),
    timing: Timing = "early",
    tokens: int = 5,
) -> Mapping[int, Played]:
    """An episode of each prompt, beside requests that nobody answers; all that is finished by its ticket.

    Args:
        timing: ``early`` answers at once, ``late`` when the sampler waits, ``random`` at any time.
    """
    rng = np.random.default_rng(0)
    requests = [first_turn(prompt, i, tokens + 2 * i) for i, prompt in enumerate(prompts)]
    running = len(sampler.submit([*requests, *beside]))
    found: dict[int, Played] = {}
    owed: dict[int, Finished] = {}
    while running:
        news = sampler.poll()
        assert news.finished or news.waits
        for each in news.finished:
            before = found[each.ticket].steps if each.ticket in found else ()
            found[each.ticket] = Played(each.group.rollouts[0], (*before, (each.began, each.step)))
            if each.ticket < len(prompts):
                owed[each.ticket] = each
            else:
                running -= 1
        for ticket in sorted(owed, reverse=True):
            if timing == "early" or (ticket in news.waits if timing == "late" else rng.random() < 0.3):
                answer = next_turn(owed.pop(ticket), observations, tokens)
                sampler.answer(ticket, answer)
                running -= answer is None
    return found


def whole_logprobs(reference: Any, rollout: Rollout, media: Any) -> np.ndarray[Any, Any]:
    """(T,) log-probs of all that follows the prompt, of one forward of a ``tests.conftest.Plain`` over all tokens."""
    import torch

    prompt = rollout.prompt
    ids = torch.from_numpy(np.concatenate([prompt.token_ids, rollout.token_ids]).astype(np.int64))[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if rollout.all_images:
        processor = reference.processor
        pictures = [media.load(ref) for ref in rollout.all_images]
        inputs |= dict(processor.image_processor(images=pictures, return_tensors="pt"))
        image_token = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        inputs["mm_token_type_ids"] = (ids == image_token).int()
    with torch.no_grad():
        logits = reference.model(**inputs).logits[0, len(prompt.token_ids) - 1 : -1].float() / TEMPERATURE
    table = logits.index_fill(1, torch.tensor(reference.banned), float("-inf")).log_softmax(-1)
    return table.gather(1, torch.from_numpy(rollout.token_ids.astype(np.int64))[:, None])[:, 0].numpy()


def assert_exact(played: Mapping[int, Played], reference: Any, media: Any) -> None:
    """Every turn's log-probs are those of plain transformers, to 1e-4."""
    for each in played.values():
        own = each.rollout.mask
        expected = whole_logprobs(reference, each.rollout, media)
        assert np.abs(each.rollout.sampler_logprobs - expected)[own].max() < 1e-4
        assert not each.rollout.sampler_logprobs[~own].any()


def assert_same(found: Mapping[int, Played], expected: Mapping[int, Played]) -> None:
    """The same tokens, log-probs to the bit, and steps."""
    assert found.keys() == expected.keys()
    for ticket, each in found.items():
        other = expected[ticket]
        assert each.steps == other.steps
        assert each.rollout.token_ids.tolist() == other.rollout.token_ids.tolist()
        assert np.array_equal(each.rollout.sampler_logprobs, other.rollout.sampler_logprobs)
        assert each.rollout.text == other.rollout.text and each.rollout.all_images == other.rollout.all_images
