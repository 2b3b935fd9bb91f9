"""What travels between driver and ranks arrives as it was, in a few buffers."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmrl.cluster.shipping import PackedArrays, PackedCuts, PackedGroup, PackedRequests, PackedRows, PackedSamples
from mmrl.engine_api import EAGER, Cut, SamplingRequest
from mmrl.types import EncodedPrompt, ImageRef, Prompt, Rollout, RolloutGroup, Sample, Segment, TrainingRow


def sent(value: Any) -> tuple[Any, list[pickle.PickleBuffer]]:
    """The value at the other end, and the buffers that it travelled in."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, 5, buffer_callback=buffers.append)
    return pickle.loads(pickled, buffers=[bytes(each.raw()) for each in buffers]), buffers


def prompt(name: str, length: int, images: int = 0) -> EncodedPrompt:
    refs = tuple(ImageRef(f"{name}{number}", 28, 56, f"/media/{name}{number}.png") for number in range(images))
    ids = np.arange(length, dtype=np.int32) + 151_000
    return EncodedPrompt(prompt=Prompt(name, ()), text=f"ask {name}", token_ids=ids, images=refs, epoch=3)


def segment(length: int, *, by_policy: bool = True, version: int | None = None) -> Segment:
    rng = np.random.default_rng(length)
    ids = rng.integers(0, 151_936, length, np.int32)
    return Segment(
        ids, by_policy, -rng.random(length, np.float32) if by_policy else np.zeros(length, np.float32), version
    )


def samples() -> list[Sample]:
    """Two of one prompt, one of them with a tool's result; an empty completion; one without any segment."""
    first, second = prompt("a", 5, images=2), prompt("b", 2)
    turns = (segment(3, version=7), segment(4, by_policy=False), segment(2, version=8))
    return [Sample(first, (segment(6),)), Sample(second, (segment(0),)), Sample(first, turns), Sample(second, ())]


def assert_same(found: Any, expected: Any) -> None:
    """Equal to the bit, types of arrays included."""
    assert type(found) is type(expected)
    match expected:
        case np.ndarray():
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
        case list() | tuple():
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                assert_same(one, other)
        case dict():
            assert found.keys() == expected.keys()
            assert_same(list(found.values()), list(expected.values()))
        case _ if hasattr(expected, "__dataclass_fields__"):
            for name in expected.__dataclass_fields__:
                assert_same(getattr(found, name), getattr(expected, name))
        case _:
            assert found == expected


def rows(*, old: bool, reference: bool) -> list[TrainingRow]:
    """Advantages of their own for each token, masks with holes, and the step's constants."""
    constants, made = {"kl_coef": 0.25}, list[TrainingRow]()
    for number, sample in enumerate(samples()):
        length = len(sample.token_ids)
        values = np.linspace(-1, 1, length, dtype=np.float32)
        mask = sample.mask & (np.arange(length) != 1)
        columns = {"advantages": values}
        columns |= {"old_logprobs": values * 2} if old else {}
        columns |= {"reference_logprobs": values - 1} if reference else {}
        made.append(TrainingRow(sample, number / 3, mask, columns, constants, given=number == 1))
    return made


@pytest.mark.parametrize(("old", "reference"), [(False, False), (True, False), (False, True), (True, True)])
def test_rows_arrive_to_the_bit(old, reference):
    expected = rows(old=old, reference=reference)
    found, _ = sent(PackedRows(expected))
    assert_same(found, expected)
    assert found[0].sample.prompt is found[2].sample.prompt


def test_advantages_arrive_as_the_float32_that_the_loss_makes_of_them():
    row = rows(old=False, reference=False)[0]
    exact = np.full(len(row.mask), 1 / 3)
    (found,), _ = sent(PackedRows([replace(row, columns={"advantages": exact})]))
    assert_same(found.advantages, exact.astype(np.float32))


def test_samples_arrive_to_the_bit_and_rollouts_as_samples():
    expected = samples()
    rollouts = [Rollout(each.prompt, each.segments, 0, "text", "stop", 1) for each in expected]
    assert_same(sent(PackedSamples(expected))[0], expected)
    assert_same(sent(PackedSamples(rollouts))[0], expected)
    assert_same(sent(PackedSamples())[0], [])


def test_a_prompt_travels_once_and_nothing_is_copied_when_it_arrives():
    asked, count = prompt("a", 1000), 64
    many = [Sample(asked, (segment(10),)) for _ in range(count)]
    found, buffers = sent(PackedSamples(many))
    assert len(buffers) == 3  # the prompt's ids, the completions' ids, their log-probs
    assert sum(each.raw().nbytes for each in buffers) == 4 * (1000 + 2 * 10 * count)
    ids = found[3].segments[0].token_ids
    assert not ids.flags.owndata and found[3].token_ids is ids
    buffers_of_rows = sent(PackedRows(rows(old=True, reference=True)))[1]
    assert len(buffers_of_rows) == 3 + 4


def test_prompts_of_one_key_stay_apart():
    """A prompt and the same one with blank images share a key."""
    shown, blank = prompt("a", 5, images=1), prompt("a", 7, images=1)
    found, _ = sent(PackedSamples([Sample(each, (segment(2),)) for each in (shown, blank, shown)]))
    assert [len(each.prompt.token_ids) for each in found] == [5, 7, 5] and found[0].prompt is found[2].prompt


def test_requests_arrive_to_the_bit():
    shared = prompt("a", 5, images=1)
    expected = [
        SamplingRequest(shared, 8, 1.0, 99, seed=2**61),
        SamplingRequest(shared, 1, 0.0, 99, seed=3),  # its greedy one
        SamplingRequest(prompt("b", 2), 8, 0.7, 12, seed=4),
    ]
    found, buffers = sent(PackedRequests(expected))
    assert_same(found, expected)
    assert len(buffers) == 1 and found[0].prompt is found[1].prompt


def test_the_turns_of_episodes_arrive_to_the_bit_with_the_images_that_they_hold():
    asked = prompt("a", 5, images=1)
    shown = replace(segment(6, by_policy=False), images=prompt("b", 2, images=2).images, role="tool")
    wrote = replace(segment(3, version=7), finish_reason="length")
    requests = [
        SamplingRequest(asked, 1, 1.0, 99, seed=1, segments=(wrote, shown), answered_after=8),
        SamplingRequest(asked, 1, 1.0, 99, seed=2, answered_after=EAGER),
    ]
    found, buffers = sent(PackedRequests(requests))
    assert_same(found, requests)
    assert len(buffers) == 3
    whole = Sample(asked, (wrote, shown, segment(2)))
    assert_same(sent(PackedSamples([whole]))[0], [whole])
    found_row = sent(PackedRows([TrainingRow(whole, 1.0, whole.mask, {"advantages": whole.sampler_logprobs})]))[0][0]
    assert found_row.sample.all_images == asked.images + shown.images


def test_a_request_that_goes_on_with_a_cut_turn_arrives_to_the_bit():
    parts = (segment(3, version=7), replace(segment(2, version=8), continues=True))
    requests = [
        SamplingRequest(prompt("a", 4), 1, 1.0, 99, 1, parts, may_be_cut=True),
        SamplingRequest(prompt("b", 4), 1, 1.0, 99, 2),
    ]
    found, _ = sent(PackedRequests(requests))
    assert_same(found, requests)
    assert [each.goes_on for each in found] == [True, False]


def test_cut_requests_arrive_with_their_prompts_key_and_their_last_segments_alone():
    asked = prompt("a", 4, images=1)
    wrote, seen = segment(3, version=7), segment(4, by_policy=False)
    requests = [
        SamplingRequest(asked, 1, 0.5, 90, 1, (wrote, seen, segment(2, version=8)), 3, may_be_cut=True),
        SamplingRequest(asked, 1, 0.5, 40, 2, (wrote, replace(segment(2, version=8), continues=True)), may_be_cut=True),
        SamplingRequest(asked, 1, 0.5, 99, 3, may_be_cut=True),
    ]
    found, buffers = sent(PackedCuts([Cut(9 - i, request) for i, request in enumerate(requests)]))
    assert [each.ticket for each in found] == [9, 8, 7] and len(buffers) == 2
    for each, request in zip(found, requests, strict=True):
        assert each.request.prompt.key == asked.key and not len(each.request.prompt.token_ids)
        assert_same(each.request.segments, request.segments[-1:])
        assert each.request.max_new_tokens == request.max_new_tokens


def test_a_group_arrives_with_its_prompts_key_and_its_new_segments_alone():
    asked = prompt("a", 1000, images=1)
    new = replace(segment(1, version=5), finish_reason="stop")
    parts = [(segment(3, version=5),), (segment(0),), (segment(2), segment(2, by_policy=False), new)]
    members = tuple(
        Rollout(asked, own, place, "x" * place, "stop" if place else "length", 4, greedy=place == 2)
        for place, own in enumerate(parts)
    )
    found, buffers = sent(PackedGroup(asked, members))
    assert type(found) is RolloutGroup and found.prompt.key == asked.key and len(found.prompt.token_ids) == 0
    assert sum(each.raw().nbytes for each in buffers) == 4 * 2 * 4
    own = tuple(
        replace(each, prompt=asked, segments=whole[:-1] + each.segments)
        for each, whole in zip(found.rollouts, parts, strict=True)
    )
    assert_same(own, members)


@pytest.mark.parametrize("lengths", [(), (0,), (3, 0, 2)])
def test_arrays_of_answers_arrive_to_the_bit(lengths):
    expected = [np.random.default_rng(length).random(length, np.float32) for length in lengths]
    assert_same(sent(PackedArrays(expected))[0], expected)
