"""The real sampler and learner on one policy: they agree, before and after updates, on text and images."""

from __future__ import annotations

import gc
import hashlib
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.config.sections import SamplerConfig
from mmrl.data import images as media
from mmrl.engine import device
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.sampler.admissions import Admissions
from mmrl.engine.sampler.sampler_memory import weights_in_vllm
from mmrl.engine.sampler.sleep_backend import install
from mmrl.engine.sampler.vllm_sampler import (
    VLLMSampler,
    banned_ids_processor,
    engine_arguments,
    sampled_logprobs,
)
from mmrl.engine_api import Polled, SamplingRequest
from mmrl.errors import NumericsError
from mmrl.interfaces import Aggregation
from mmrl.ops.objective import training_rows
from mmrl.ops.parity import Gap
from mmrl.ops.pinned import pinned_bytes
from mmrl.system.read_ahead import ReadAhead
from mmrl.types import NO_VERSION, Message, Prompt, RawImage, Rollout
from tests.engine import episodes

TEMPERATURE = 0.8


@pytest.fixture
def request_for(vision) -> Callable[..., SamplingRequest]:
    """A sampling request for one of the bench's prompts."""

    def build(
        index: int, *, num_samples: int = 4, temperature: float = TEMPERATURE, max_new_tokens: int = 24, seed: int = 1
    ) -> SamplingRequest:
        prompt = vision.prompts[index]
        return SamplingRequest(prompt, num_samples, temperature, max_new_tokens, (seed * 3 + index) << 16)

    return build


@pytest.fixture
def sample(engine) -> Callable[[Sequence[SamplingRequest]], list[list[Rollout]]]:
    """The rollouts of each request."""

    def generate(requests: Sequence[SamplingRequest]) -> list[list[Rollout]]:
        with engine.sampling() as sampler:
            groups = dict(sampler.generate(requests))
        return [list(groups[index].rollouts) for index in range(len(requests))]

    return generate


@pytest.fixture
def update(engine) -> Callable[[Sequence[Rollout]], None]:
    """One optimizer step on the rollouts with random advantages."""

    def step(rollouts: Sequence[Rollout]) -> None:
        rng = np.random.default_rng(0)
        masks = [rollout.mask for rollout in rollouts]
        advantages = [rng.normal(size=len(mask)) for mask in masks]
        indices = range(len(rollouts))
        rows = training_rows(
            rollouts, masks, {"advantages": advantages}, np.arange(len(masks)), Aggregation("token-mean"), indices
        )
        with engine.learning() as learner:
            learner.network("policy").update(list(rows.values()))

    return step


@pytest.fixture
def tampered(engine) -> Iterator[Callable[[Callable[[str, torch.Tensor], None]], None]]:
    """Gives the sampler other weights than the learner's, until the test ends."""

    def tamper(change: Callable[[str, torch.Tensor], None]) -> None:
        with engine.learning() as learner:
            weights = {name: weight.clone() for name, weight in learner.policy.named_weights(torch.float32)}
        for name, weight in weights.items():
            change(name, weight)
        with engine.sampling() as sampler:
            sampler.load(weights.items(), sampler.weight_version)

    yield tamper
    with engine.sampling() as sampler:
        sampler.weight_version = -2  # stale: the next entry brings the learner's back


def flat(groups: Sequence[Sequence[Rollout]]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group]


def tokens(rollouts: Sequence[Rollout]) -> list[list[int]]:
    return [rollout.token_ids.tolist() for rollout in rollouts]


def learner_gap(engine: Any, rollouts: Sequence[Rollout]) -> Gap:
    with engine.learning() as learner:
        return Gap.between([r.sampler_logprobs for r in rollouts], learner.network("policy").score(rollouts))


@pytest.mark.proves("vllm", family="qwen2_5_vl")
def test_sampler_and_learner_agree_before_and_after_optimizer_steps(engine, sample, update, request_for):
    requests = [request_for(index) for index in (0, 1, 2, 1)]
    first = flat(sample(requests))
    assert learner_gap(engine, first).abs_max < 1e-4
    for _ in range(2):
        update(first)
        stale = learner_gap(engine, first)
        assert stale.abs_max > 1e-2  # the weights have moved, and the test would notice
        fresh = flat(sample(requests))
        assert learner_gap(engine, fresh).abs_max < 1e-4
        assert fresh[0].weight_version == first[0].weight_version + 1
        first = fresh


def test_vllm_syncs_half_awake_and_samples_when_all_of_it_is_awake(engine, sample, update, request_for, monkeypatch):
    """vLLM's own bookkeeping, with memory that a CPU cannot give back: only the copies to and from it are missing."""
    with engine.sampling() as sampler:
        vllm = sampler._llm
    monkeypatch.setattr(sampler, "_sleep_level", device.sleep_level("cuda"))
    sampler.sleep()
    for _ in range(2):
        assert vllm.llm_engine.is_sleeping()
        rollouts = flat(sample([request_for(1)]))
        assert learner_gap(engine, rollouts).abs_max < 1e-4
        update(rollouts)
    sampler.wake("weights")
    assert vllm.llm_engine.is_sleeping()
    sampler.wake("weights")
    sampler.wake("kv_cache")
    assert not vllm.llm_engine.is_sleeping()


@pytest.fixture(scope="module")
def in_vllm(engine) -> Callable[[Path], torch.nn.Module]:
    """vLLM's model of a folder's shapes, in bfloat16 and without storage."""
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    def build(folder: Path) -> torch.nn.Module:
        arguments = EngineArgs(model=str(folder), dtype="bfloat16", max_model_len=64, runner="generate")
        config, before = arguments.create_engine_config(), torch.get_default_dtype()
        with set_current_vllm_config(config), torch.device("meta"):
            torch.set_default_dtype(torch.bfloat16)
            try:
                return initialize_model(config)
            finally:
                torch.set_default_dtype(before)

    return build


@pytest.mark.parametrize(
    "family",
    [
        "qwen2_5_vl",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen2", "qwen3", "qwen3_vl", "internvl")),
    ],
)  # vLLM looks at each class in a process of its own
def test_vllms_weights_have_the_sizes_that_a_plan_counts(family, in_vllm, models, vision):
    folder = models(family)
    found = [parameter.nbytes for parameter in in_vllm(folder).parameters()]
    counted = weights_in_vllm(vision.config(), ModelFolder.open(str(folder)), 2)
    assert sorted(found) == sorted(counted)
    assert pinned_bytes(found) == pinned_bytes(counted)


def test_a_running_vllm_takes_the_sleep_that_drops_weights(engine):
    """Its worker is GPUs' own, which makes the backend; only the memory is a GPU's alone."""
    with engine.sampling() as sampler:
        discarding = install(sampler._llm.collective_rpc)
        names = sampler._llm.apply_model(lambda model: [name for name, _ in model.named_parameters()])[0]
        backend = sampler._llm.collective_rpc(lambda worker: type(worker.sleep_mode_backend).__name__)[0]
    assert discarding is not None and [name for name, _ in discarding.parameters()] == names
    assert backend == "DiscardingBackend"


def test_a_sync_brings_every_weight_of_vllms_model(engine, sample, request_for):
    """As after a sleep that drops them: no log-prob, and no weight, is left without a number."""

    def forget(model: torch.nn.Module) -> int:
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        return sum(1 for _ in model.parameters())

    with engine.sampling() as sampler:
        assert sampler._llm.apply_model(forget)[0] > 20
        sampler.weight_version = NO_VERSION
    rollouts = flat(sample([request_for(0), request_for(1)]))
    assert learner_gap(engine, rollouts).abs_max < 1e-4
    with engine.sampling() as sampler:
        assert not sampler._llm.apply_model(lambda model: [n for n, p in model.named_parameters() if p.isnan().any()])[
            0
        ]


def test_no_attention_state_of_old_weights_is_used_for_a_prompt_of_several_blocks(
    engine, sample, update, request_for, vision
):
    prompt = vision.encoder.encode(Prompt("long", (Message("user", "7+8? " * 45),)))
    assert len(prompt.token_ids) > 128  # vLLM's block on a CPU
    request = replace(request_for(0), prompt=prompt)
    for _ in range(2):
        rollouts = flat(sample([request]))
        assert learner_gap(engine, rollouts).abs_max < 1e-4
        update(rollouts)


def test_the_sampled_distribution_is_plain_transformers(engine, sample, request_for, vision, plain, tmp_path):
    with engine.learning() as learner:
        learner.save(tmp_path)
    reference = plain(tmp_path / "model")
    for rollout in flat(sample([request_for(index, num_samples=2) for index in (0, 1, 2)])):
        expected = reference.logprobs(rollout, vision.media).detach()
        np.testing.assert_allclose(rollout.sampler_logprobs, expected, atol=1e-4)


def test_greedy_tokens_are_the_argmax_of_plain_transformers(engine, sample, request_for, vision, plain, tmp_path):
    requests = [request_for(index, num_samples=1, temperature=0.0, max_new_tokens=8) for index in (0, 1, 2)]
    first = flat(sample(requests))
    assert tokens(first) == tokens(flat(sample(requests)))
    with engine.learning() as learner:
        learner.save(tmp_path)
    reference = plain(tmp_path / "model")
    for rollout in first:
        images = [vision.media.load(ref) for ref in rollout.images]
        table = reference.distribution(rollout.prompt.text, images, rollout.token_ids.tolist())
        # No repetition penalty, though the folder's generation defaults have one.
        assert table[:-1].argmax(1).tolist() == rollout.token_ids.tolist()


def test_entering_with_unchanged_weights_does_not_sync(engine, sample, update, request_for, monkeypatch):
    loads = []
    load = VLLMSampler.load
    monkeypatch.setattr(VLLMSampler, "load", lambda self, *args: loads.append(args[1]) or load(self, *args))
    rollouts = flat(sample([request_for(0)]))
    loads.clear()
    sample([request_for(1)])
    assert loads == []
    update(rollouts)
    sample([request_for(0)])
    sample([request_for(1)])
    assert loads == [rollouts[0].weight_version + 1]


def test_a_request_gives_the_same_tokens_whatever_else_is_in_the_batch(sample, request_for):
    alone = [tokens(sample([request_for(index)])[0]) for index in (0, 1, 2)]
    together = [tokens(group) for group in sample([request_for(index) for index in (2, 0, 1)])]
    assert together == [alone[2], alone[0], alone[1]]


def test_beside_a_gpu_a_step_is_made_before_all_requests_are_preprocessed_and_tokens_stay(
    engine, sample, request_for, vision, monkeypatch
):
    requests = [request_for(index % 3, num_samples=1, max_new_tokens=4, seed=index) for index in range(40)]
    alone = [tokens(group) for group in sample(requests)]
    with engine.sampling() as sampler:
        vllm = sampler._llm.llm_engine
    calls, loaded = list[str](), list[str]()
    step, add = vllm.step, vllm.add_request
    monkeypatch.setattr(vllm, "step", lambda: calls.append("step") or step())
    monkeypatch.setattr(vllm, "add_request", lambda *args: calls.append("add") or add(*args))
    monkeypatch.setattr(sampler, "_most", (device.ADMITTED_AT_ONCE["cuda"], None))
    monkeypatch.setattr(sampler, "admissions", Admissions(*sampler._most))
    read = lambda ref: loaded.append(threading.current_thread().name) or vision.media.load(ref)  # noqa: E731
    monkeypatch.setattr(sampler, "_images", ReadAhead(read, device.READING_THREADS["cuda"]))
    vllm.reset_mm_cache()  # as a sleep does
    assert [tokens(group) for group in sample(requests)] == alone
    assert calls.index("step") <= 2 * 32  # a request with images is tried without its pixels first
    assert calls[calls.index("step") :].count("add") >= 8
    assert any("read-ahead" in name for name in loaded)


def test_more_requests_and_prompt_tokens_than_one_step_takes_change_no_tokens(sample, request_for, vision):
    """On a CPU vLLM is given room for 256 sequences and 4,096 prompt tokens at a time."""
    few = [request_for(index, num_samples=2, max_new_tokens=3) for index in (0, 1, 2)]
    texts = ["count " * 100 + str(number) for number in range(32)]
    prompts = [vision.encoder.encode(Prompt(text, (Message("user", text),))) for text in texts]
    assert sum(len(prompt.token_ids) for prompt in prompts) > 4096
    many = [SamplingRequest(prompt, 9, TEMPERATURE, 3, (99 + i) << 16) for i, prompt in enumerate(prompts)]
    assert sum(request.num_samples for request in many) > 256
    alone = [tokens(group) for group in sample([*few, many[0], many[-1]])]
    together = [tokens(group) for group in sample([*many, *few])]
    assert [*together[-3:], together[0], together[31]] == alone
    assert [len(group) for group in together] == [9] * 32 + [2] * 3


def test_members_of_a_group_and_other_seeds_differ(sample, request_for):
    # The folder's generation defaults (top_k 1, temperature 0.1) would make the members equal.
    members = tokens(sample([request_for(1, num_samples=6)])[0])
    other = tokens(sample([request_for(1, num_samples=6, seed=2)])[0])
    assert len({tuple(ids) for ids in members + other}) == 12


def test_members_come_in_order_with_their_text(sample, request_for, vision):
    rollouts = sample([request_for(2)])[0]
    assert [rollout.index for rollout in rollouts] == [0, 1, 2, 3]
    tokenizer = vision.folder.tokenizer
    assert all(r.text == tokenizer.decode(r.token_ids, skip_special_tokens=True) for r in rollouts)
    assert {rollout.prompt.id for rollout in rollouts} == {"two"}


def test_every_eos_ends_a_completion_and_is_kept(sample, request_for, vision):
    rollouts = flat(sample([request_for(index, num_samples=96, max_new_tokens=16) for index in (0, 1)]))
    eos = set(vision.folder.vocabulary.eos)
    ends = set()
    for rollout in rollouts:
        *before, last = rollout.token_ids.tolist()
        assert not eos & set(before)
        if rollout.finish_reason == "stop":
            ends.add(last)
        else:
            assert last not in eos and len(rollout.token_ids) == 16
    assert len(eos) == 2
    assert ends == eos


def test_banned_ids_are_never_sampled_even_when_the_weights_favour_them(sample, request_for, vision, tampered):
    banned = list(vision.folder.vocabulary.banned)
    rows = {}

    def favour(name: str, weight: torch.Tensor) -> None:
        if name in ("lm_head.weight", "model.language_model.embed_tokens.weight"):
            direction = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(0))
            weight[banned[0]], weight[banned[1]] = 100 * direction, -100 * direction  # whatever the hidden state
            rows[name] = weight

    before = flat(sample([request_for(0)]))
    tampered(favour)
    assert len(rows) == 2
    for temperature in (TEMPERATURE, 0.0):
        num_samples = 8 if temperature else 1
        requests = [request_for(index, num_samples=num_samples, temperature=temperature) for index in (0, 1, 2)]
        rollouts = flat(sample(requests))
        assert not set(banned) & {token for rollout in rollouts for token in rollout.token_ids.tolist()}
    assert tokens(before) == tokens(flat(sample([request_for(0)])))  # renormalised: as if nothing had happened


def test_the_sampler_notices_new_weights_of_the_vision_tower(sample, request_for, tampered):
    before = sample([request_for(index) for index in (0, 1)])

    def blind(name: str, weight: torch.Tensor) -> None:
        if "visual.merger" in name:
            weight.zero_()

    tampered(blind)
    after = sample([request_for(index) for index in (0, 1)])
    assert tokens(before[0]) == tokens(after[0])
    assert tokens(before[1]) != tokens(after[1])


def painted(colour, mode="RGB", format="PNG", turned=False, **options):
    """An encoded image whose left third is white, or dark green with a palette."""
    image = Image.new(mode, (84, 56), colour)
    image.paste({"RGBA": (255,) * 4, "I;16": 65535, "CMYK": (0,) * 4, "P": 1}.get(mode, (255,) * 3), (0, 0, 28, 56))
    if mode == "P":
        image.putpalette([200, 0, 0, 0, 50, 0])
    if turned:
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = 6  # a viewer turns it clockwise: the left goes up
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return RawImage(buffer.getvalue(), f"{mode} {format}")


def shown(rgb, left=(255, 255, 255), turned=False):
    """(H, W, 3) of a painted image."""
    pixels = np.full((56, 84, 3), left, np.uint8)
    pixels[:, 28:] = rgb
    return np.rot90(pixels, -1) if turned else pixels


IMAGES = {
    "transparent": (painted((0, 0, 0, 0), "RGBA"), shown((255, 255, 255))),
    "half transparent": (painted((255, 0, 0, 128), "RGBA"), shown((255, 127, 127))),
    "palette": (painted(0, "P"), shown((200, 0, 0), left=(0, 50, 0))),
    "transparent palette": (painted(0, "P", "GIF", transparency=0), shown((255, 255, 255), left=(0, 50, 0))),
    "16-bit": (painted(257 * 100, "I;16"), shown((100, 100, 100))),
    "CMYK": (painted((0, 255, 255, 0), "CMYK", "TIFF"), shown((255, 0, 0))),
    "rotated": (painted((9, 99, 199), turned=True), shown((9, 99, 199), turned=True)),
    "animated": (
        painted((0, 0, 0), "RGB", "GIF", save_all=True, append_images=[Image.new("RGB", (84, 56), "blue")]),
        shown((0, 0, 0)),
    ),
}


def pixel_hash(pixels):
    """sha256 of size and RGB pixels (H, W, 3), as ``ImageRef.hash`` is defined."""
    pixels = np.ascontiguousarray(pixels, np.uint8)
    return hashlib.sha256(f"{pixels.shape[1]}x{pixels.shape[0]}".encode() + pixels.tobytes()).hexdigest()


def unpatched(folder, patches_PC, grid):
    """(H, W, 3) pixels from what a vision tower takes of them."""
    processor = folder.processor.image_processor
    side, merge, frames = processor.patch_size, processor.merge_size, processor.temporal_patch_size
    _, rows, columns = (int(n) for n in grid)
    parts = patches_PC.float().numpy().reshape(rows // merge, columns // merge, merge, merge, 3, frames, side, side)
    assert np.array_equal(parts[..., 0, :, :], parts[..., -1, :, :])  # a still image: every frame shows the same
    pixels = parts[..., 0, :, :].transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * side, columns * side, 3)
    if patches_PC.is_floating_point():  # vLLM leaves the scaling to its model
        pixels = (pixels * np.array(processor.image_std) + np.array(processor.image_mean)) * 255
    assert np.abs(pixels - pixels.round()).max() < 1e-2
    return pixels.round().astype(np.uint8)


@pytest.fixture
def seen(engine, monkeypatch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Patches and grid of each image that vLLM's own engine is given from now on, by its id, if it is new to it."""
    with engine.sampling() as sampler:
        core = sampler._llm.llm_engine.engine_core
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    add_request = core.add_request

    def record(request: Any) -> None:
        for feature in request.mm_features or ():
            assert feature.data is not None, "an image that an earlier test has shown"
            data = feature.data.get_data()
            found[feature.identifier] = (data["pixel_values"], data["image_grid_thw"])
        add_request(request)

    monkeypatch.setattr(core, "add_request", record)
    return found


@pytest.mark.parametrize("kind", IMAGES)
def test_sampler_and_learner_are_given_the_pixels_that_an_image_shows(kind, engine, sample, request_for, vision, seen):
    raw, expected = IMAGES[kind]
    prompt = vision.encoder.encode(Prompt(kind, (Message("user", "<image>what?"),), (raw,)))
    (ref,) = prompt.images
    rollouts = flat(sample([replace(request_for(1), prompt=prompt)]))
    learner = engine._learner.trained._batches.inputs([rollouts[0]]).images
    assert ref.hash == pixel_hash(expected)
    assert pixel_hash(unpatched(vision.folder, learner.pixels, learner.grids_U3[0])) == ref.hash
    assert pixel_hash(unpatched(vision.folder, *seen[ref.hash])) == ref.hash
    assert learner_gap(engine, rollouts).abs_max < 1e-4


def test_an_image_is_decoded_once_and_preprocessed_once_by_each_engine(
    engine, sample, update, request_for, vision, picture, monkeypatch
):
    decoded, processed = [], []
    kind = type(vision.folder.processor.image_processor)
    normalise, preprocess = media.normalise, kind.preprocess

    def counted(self: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
        processed.extend(images if isinstance(images, list | tuple) else [images])
        return preprocess(self, images, *args, **kwargs)

    monkeypatch.setattr(media, "normalise", lambda raw, grid: decoded.append(raw.label) or normalise(raw, grid))
    monkeypatch.setattr(kind, "preprocess", counted)
    raws = [picture(84, 56, seed=77), picture(112, 84, seed=78)]
    rows = [Prompt("both", (Message("user", "<image><image>?"),), tuple(raws))]
    rows += [Prompt(f"one {i}", (Message("user", f"<image>{i}?"),), (raws[0],)) for i in range(2)]
    for _ in range(3):  # epochs, with new weights in between
        prompts = [vision.encoder.encode(row) for row in rows]
        rollouts = flat(sample([replace(request_for(1), prompt=prompt) for prompt in prompts]))
        update(rollouts)
    assert decoded == [raw.label for raw in raws]
    assert len(processed) == 2 * len(raws)
    monkeypatch.setattr(vision.media, "load", lambda ref: pytest.fail("vLLM has this image already"))
    again = flat(sample([replace(request_for(1), prompt=prompt) for prompt in prompts]))
    assert [rollout.prompt.id for rollout in again] == [rollout.prompt.id for rollout in rollouts]
    monkeypatch.undo()
    both = replace(prompts[0], images=(prompts[0].images[0], vision.media.add(picture(112, 84, seed=79))))
    assert len(sample([replace(request_for(1), prompt=both)])[0]) == 4  # one of two is new


def test_a_prompt_that_the_sampler_reads_differently_is_refused(engine, sample, request_for, vision):
    good = request_for(1)
    ref = good.prompt.images[0]
    wrong = replace(good.prompt, images=(replace(ref, width=2 * ref.width),))
    ids = good.prompt.token_ids
    doubled = np.repeat(ids, np.where(ids == vision.folder.image_token_id, 2, 1)).astype(np.int32)
    with pytest.raises(NumericsError, match="read the prompt as different tokens") as caught:
        sample([request_for(0), replace(good, prompt=replace(wrong, token_ids=doubled))])
    assert caught.value.where == "one"
    assert len(sample([good])[0]) == 4  # nothing is left behind in the engine


def test_generation_that_is_given_up_leaves_nothing_behind(engine, sample, request_for):
    requests = [request_for(index) for index in (0, 1, 2)]
    expected = [tokens(group) for group in sample(requests)]
    with engine.sampling() as sampler:
        groups = sampler.generate([request_for(index, seed=9) for index in (0, 1, 2)])
        next(groups)
        del groups
        gc.collect()
        again = dict(sampler.generate(requests))
    assert [tokens(again[index].rollouts) for index in range(3)] == expected


def test_turns_of_episodes_are_exact_and_the_same_whenever_they_are_answered(
    engine, vision, request_for, plain, picture, tmp_path, monkeypatch
):
    observations = [episodes.inserted(vision, "Look again."), episodes.inserted(vision, "So?", picture(90, 60))]
    beside = [request_for(1, num_samples=3, max_new_tokens=24)]
    sent: list[list[int]] = []

    def record(request: Any) -> None:
        sent.append(list(request.prompt_token_ids))
        add_request(request)

    found = []
    for timing in ("early", "late", "random"):
        with engine.sampling() as sampler:
            if not found:
                core = sampler._llm.llm_engine.engine_core
                add_request = core.add_request
                monkeypatch.setattr(core, "add_request", record)
            found.append(episodes.play(sampler, vision.prompts[:2], observations, beside, timing))
            assert sampler.poll() == Polled()
    for other in found[1:]:
        episodes.assert_same(other, found[0])
    with engine.learning() as learner:
        learner.save(tmp_path)
    episodes.assert_exact(found[0], plain(tmp_path / "model"), vision.media)
    # A step is a token: each turn is admitted three steps after the end of the one before.
    for ticket in (0, 1):
        each = found[0][ticket]
        ends = np.cumsum([0, *(len(segment.token_ids) + 2 for segment in each.rollout.segments[::2])])
        assert [began for began, _ in each.steps] == ends[:3].tolist()
        whole = [*each.rollout.prompt.token_ids.tolist(), *each.rollout.token_ids.tolist()]
        last = len(each.rollout.segments[-1].token_ids)
        assert whole[:-last] in sent and each.rollout.segments[0].finish_reason is not None
    assert len(found[0][1].rollout.all_images) == 2


def test_episodes_that_are_given_up_leave_nothing_behind(engine, sample, request_for, vision):
    expected = [tokens(group) for group in sample([request_for(0)])]
    with engine.sampling() as sampler:
        sampler.submit([episodes.first_turn(vision.prompts[1], 1), request_for(2, num_samples=6)])
        sampler.poll()
        sampler.drop()
        assert sampler.poll() == Polled()
        assert [tokens(group.rollouts) for _, group in sampler.generate([request_for(0)])] == expected
        sampler.submit([episodes.first_turn(vision.prompts[1], 1)])
    assert not engine._sampler._llm.llm_engine.has_unfinished_requests()


def test_an_exception_hands_the_engine_back(engine, sample, request_for):
    with pytest.raises(KeyError), engine.sampling():
        raise KeyError("reward")
    with pytest.raises(KeyError), engine.learning():
        raise KeyError("update")
    assert sample([request_for(0)])


def test_the_two_verbs_exclude_each_other(engine):
    with engine.learning(), pytest.raises(AssertionError, match="sampling inside learning"), engine.sampling():
        pass
    with engine.sampling(), pytest.raises(AssertionError, match="learning inside sampling"), engine.learning():
        pass


def second_runners_state(vocabulary: int) -> Any:
    """As much of vLLM's ``RequestState`` as it hands on to a logits processor."""
    names = ("all_token_ids", "prompt_len", "prefill_len", "total_len")
    sizes = {"max_num_reqs": 4, "vocab_size": vocabulary}
    return SimpleNamespace(device=torch.device("cpu"), **sizes, **dict.fromkeys(names))


@pytest.mark.parametrize("model_runner", [1, 2])
def test_banned_ids_have_no_probability_and_the_others_keep_their_logits(model_runner):
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors

    banned, vocabulary = [0, 3, 9], 10
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[:, 3] = 50.0  # greedy sampling would take it
    kind = banned_ids_processor(banned, model_runner)
    if model_runner == 1:
        processor = kind(None, torch.device("cpu"), False)
        assert not processor.is_argmax_invariant()
        answer = processor.apply(logits.clone())
    else:
        (processor,) = build_custom_logits_processors(None, second_runners_state(vocabulary), False, [kind])
        for row, temperature in enumerate((0.0, 0.0, 0.8, 1.0)):
            # vLLM leaves the logits alone if no request of the batch needs anything done to them.
            assert processor.add_request(row, SamplingParams(temperature=temperature))
        answer = processor.apply(logits.clone(), SimpleNamespace())
    allowed = [token for token in range(vocabulary) if token not in banned]
    assert torch.equal(answer[:, allowed], logits[:, allowed])
    assert (answer[:, banned] == float("-inf")).all()
    assert not set(answer.argmax(1).tolist()) & set(banned)
    plain = logits[:, allowed].log_softmax(1)
    torch.testing.assert_close(answer.log_softmax(1)[:, allowed], plain, atol=1e-6, rtol=0)


def test_each_model_runner_refuses_the_other_ones_logits_processor():
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import validate_logits_processors_parameters
    from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors

    first, second = (banned_ids_processor([1], model_runner) for model_runner in (1, 2))
    with pytest.raises(ValueError, match="not a subclass"):
        build_custom_logits_processors(None, second_runners_state(4), False, [first])
    with pytest.raises(ValueError, match="not a subclass"):
        validate_logits_processors_parameters([second], SamplingParams())


def test_the_log_probs_of_sampled_tokens_are_read():
    from vllm.logprobs import append_logprobs_for_next_position, create_sample_logprobs

    ids, rng = [5, 2, 2], np.random.default_rng(0)
    flat = create_sample_logprobs(True)
    expected = rng.normal(size=3).astype(np.float32)
    for token, logprob in zip(ids, expected.tolist(), strict=True):  # the sampled token, and two more likely ones
        append_logprobs_for_next_position(flat, [token, 7, 8], [logprob, -0.1, -0.2], [None] * 3, 3, 2)
    assert np.array_equal(sampled_logprobs(flat, np.array(ids, np.int32)), expected)


def test_the_engine_says_what_really_runs(engine):
    described = engine.describe()
    assert described["sampler"] == "VLLMSampler" and described["learner"] == "DeepSpeedLearner"
    assert described["precision"] == "float32" and described["device"] == "cpu"
    assert described["versions"].keys() >= {"torch", "transformers", "deepspeed"}


def test_vllm_on_a_gpu_is_asked_for_the_experts(bench):
    from vllm import EngineArgs

    folder = bench("qwen3_moe").folder
    sizes = {"max_images": 0, "max_tokens": 64, "num_sequences": 4, "seed": 0}
    asked, plain = (
        engine_arguments(folder, SamplerConfig(), "cuda", dtype="bfloat16", **sizes, returns_experts=returns)
        for returns in (True, False)
    )
    assert asked.items() - plain.items() == {("enable_return_routed_experts", True)}
    assert EngineArgs(**asked).aux_output_config.enable_return_routed_experts
