"""Views of a step's prompts: how they are made, and groups of which a part is sampled from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmrl.engine_api import SamplingRequest
from mmrl.errors import DataError, PluginError
from mmrl.interfaces import Needs, View
from mmrl.ops.image_views import blank, masked_patches
from mmrl.ops.metrics import view_metrics
from mmrl.rollout.batch import batch_of
from mmrl.rollout.view_sampling import sampled_groups
from mmrl.step.check import LogprobCheck
from mmrl.step.views import ViewMaker
from mmrl.types import CreditedGroup, EncodedPrompt, Prompt, Rollout, RolloutGroup, ScoredGroup, Segment


class Asks:
    """An algorithm with these views."""

    def __init__(self, *views: View) -> None:
        self._needs = Needs(views=views)

    def needs(self) -> Needs:
        return self._needs


def masked(image: Any, rng: Any, strength: float) -> Any:
    return masked_patches(image, rng, ratio=strength, patch=14)


def smaller(image: Any, rng: Any, strength: float) -> Any:
    return image[: image.shape[0] // 2, : image.shape[1] // 2]


MASKED = View("masked", masked, scored=True, strength=lambda step, steps: step / steps)


def maker(vision: Any, *views: View, **trainer: Any) -> ViewMaker:
    config = vision.config(trainer={"steps": 4, "prompts_per_step": 1, **trainer})
    return ViewMaker(config, Asks(*views), vision.encoder)  # type: ignore[arg-type]


def hashes(prompt: EncodedPrompt, name: str = "masked") -> list[str]:
    return [ref.hash for ref in prompt.views[name].images]


def test_a_view_has_the_prompts_tokens_and_other_pixels_of_the_same_size(vision):
    text, one, two = (maker(vision, MASKED)(prompt, 2) for prompt in vision.prompts)
    assert not text.views
    for prompt in (one, two):
        view = prompt.views["masked"]
        assert np.array_equal(view.token_ids, prompt.token_ids) and (view.id, view.epoch) == (prompt.id, prompt.epoch)
        for ref, seen in zip(prompt.images, view.images, strict=True):
            assert seen.hash != ref.hash and seen.file_size == ref.file_size
            before, after = (np.asarray(vision.media.load(each)) for each in (ref, seen))
            assert before.shape == after.shape and 0 < (after != before).any(2).mean() < 1
            assert ((after == before) | (after == 0)).all()
    assert len(set(hashes(two))) == 2


def test_a_view_follows_from_run_epoch_prompt_name_and_step_and_from_nothing_else(vision):
    prompt = vision.prompts[2]
    make = maker(vision, MASKED)
    found = hashes(make(prompt, 2))
    make(vision.prompts[1], 2)
    assert hashes(make(prompt, 2)) == found == hashes(maker(vision, MASKED)(prompt, 2))
    other = {
        "step": hashes(make(prompt, 3)),
        "seed": hashes(maker(vision, MASKED, seed=1)(prompt, 2)),
        "epoch": hashes(make(replace(prompt, epoch=1), 2)),
        "prompt": hashes(make(replace(prompt, prompt=replace(prompt.prompt, id="other")), 2)),
        "name": hashes(maker(vision, replace(MASKED, name="again"))(prompt, 2), "again"),
    }
    assert all(each != found for each in other.values()), [name for name, each in other.items() if each == found]
    assert make.metrics(3) == {"views/masked_strength": 0.75}


def test_a_scored_view_of_another_size_is_an_error_that_says_what_to_do(vision):
    make = maker(vision, View("small", smaller, scored=True))
    with pytest.raises(
        PluginError, match=r"views\['small'\] made an image of 28 x 28 .* from one of 56 x 56"
    ) as caught:
        make(vision.prompts[1], 1)
    assert "occluded" in caught.value.remedy and "scored=False" in caught.value.remedy


def test_a_view_to_sample_from_may_have_another_size_and_then_has_its_own_tokens(vision):
    prompt = vision.prompts[2]
    view = maker(vision, View("small", smaller, sampled=0.5))(prompt, 1).views["small"]
    image = vision.folder.image_token_id
    counts = [int((each.token_ids == image).sum()) for each in (prompt, view)]
    assert counts == [sum(vision.folder.image_tokens(r.width, r.height) for r in e.images) for e in (prompt, view)]
    assert counts[1] < counts[0]
    assert [i for i in view.token_ids if i != image] == [i for i in prompt.token_ids if i != image]

    def larger(image: Any, rng: Any, strength: float) -> Any:
        return np.asarray(Image.fromarray(image).resize((image.shape[1] * 2, image.shape[0] * 2)))

    config = vision.config(trainer={"steps": 4, "prompts_per_step": 1}, data={"max_prompt_tokens": 40})
    with pytest.raises(DataError, match="tokens with the images of view 'large'"):
        ViewMaker(config, Asks(View("large", larger, sampled=0.5)), vision.encoder)(prompt, 1)  # type: ignore[arg-type]


def rollout(prompt: EncodedPrompt, index: int, logprob: float = -1.0) -> Rollout:
    segment = Segment(np.full(3, index, np.int32), True, np.full(3, logprob, np.float32))
    return Rollout(prompt, (segment,), index, "", "stop", 0, experts=np.zeros((4, 1, 1), np.int64))


@dataclass
class Sampler:
    """Finishes requests last first."""

    asked: list[SamplingRequest] = field(default_factory=list)

    def generate(self, requests: Sequence[SamplingRequest]) -> Iterator[tuple[int, RolloutGroup]]:
        self.asked = list(requests)
        for index in reversed(range(len(requests))):
            own = requests[index]
            yield index, RolloutGroup(own.prompt, tuple(rollout(own.prompt, i) for i in range(own.num_samples)))


def pictured(name: str) -> EncodedPrompt:
    plain = EncodedPrompt(prompt=Prompt(name, ()), text="", token_ids=np.ones(2, np.int32), images=())
    return replace(plain, views={"noised": replace(plain, text="noised")})


def test_members_of_a_view_are_a_groups_last_and_are_the_prompts_own():
    text = EncodedPrompt(prompt=Prompt("text", ()), text="", token_ids=np.ones(2, np.int32), images=())
    prompts = [pictured("a"), text, pictured("b")]
    requests = [SamplingRequest(prompt, 5, 1.0, 8, seed=100 * i) for i, prompt in enumerate(prompts)]
    greedy = SamplingRequest(prompts[0], 1, 0.0, 8, seed=7)
    sampler = Sampler()
    found = dict(sampled_groups(sampler, [*requests, greedy], {"noised": 2}, 3))  # type: ignore[arg-type]
    asked = [(each.prompt.id, each.prompt.text, each.num_samples, each.seed) for each in sampler.asked]
    assert asked == [
        ("a", "", 3, 0),
        ("a", "noised", 2, 3),
        ("text", "", 5, 100),
        ("b", "", 3, 200),
        ("b", "noised", 2, 203),
        ("a", "", 1, 7),
    ]
    seeds = Counter(each.seed + i for each in sampler.asked[:-1] for i in range(each.num_samples))
    assert set(seeds.values()) == {1}
    for index, prompt in enumerate([*prompts, prompts[0]]):
        group = found[index]
        views = ["", "", "", "noised", "noised"] if prompt.views else [""] * 5
        assert [each.view for each in group.rollouts] == (views if index < 3 else [""])
        assert [each.index for each in group.rollouts] == list(range(len(group.rollouts)))
        assert group.prompt is prompt and all(each.prompt is prompt for each in group.rollouts)
        assert all((each.experts is None) == bool(each.view) for each in group.rollouts)


def scored(group: RolloutGroup, rewards: Sequence[float]) -> ScoredGroup:
    return ScoredGroup(group, np.array(rewards), np.ones(len(rewards), bool), {})


def mixed_group(noised: float) -> ScoredGroup:
    """Two rollouts of the prompt itself, and one of its view, of which the sampler says this."""
    prompt = pictured("a")
    rollouts = [rollout(prompt, 0), rollout(prompt, 1), replace(rollout(prompt, 2, noised), view="noised")]
    return scored(RolloutGroup(prompt, tuple(rollouts)), [1.0, 0.0, 1.0])


def test_what_was_sampled_from_a_view_is_no_mismatch_and_is_counted():
    group = mixed_group(noised=-9.0)
    learner = [np.full(3, -1.0, np.float32)] * 3
    check = LogprobCheck("float32", "stop", event=lambda kind, **fields: None)
    found = check.check_step(1, [CreditedGroup(group, learner, learner)])
    assert found["mismatch/logprob_abs_max"] == 0
    batch = batch_of([group], {})
    assert list(batch.sampled_from or ()) == ["", "", "noised"]
    assert view_metrics(batch, 0.5) == {
        "views/prompts_fraction": 0.5,
        "views/own_reward_mean": 0.5,
        "views/noised_reward_mean": 1.0,
    }


@pytest.mark.parametrize("is_right", [True, False])
def test_the_first_check_compares_it_given_the_view(is_right):
    """The learner then reads what the sampler has read, and a wrong number of either is found."""

    def score(samples: Sequence[Any], way: str = "packed") -> list[Any]:
        return [np.full(3, -9.0 if sample.prompt.text == "noised" else -1.0) for sample in samples] * (way != "wide")

    learner = SimpleNamespace(network=lambda role: SimpleNamespace(score=score))
    engine: Any = SimpleNamespace(learning=lambda: Entered(learner))
    events: list[str] = []
    check = LogprobCheck("float32", "warn", event=lambda kind, **fields: events.append(kind))
    check.check_first(mixed_group(noised=-9.0 if is_right else -1.0).rollouts, engine)
    assert ("mismatch" in events) != is_right


@dataclass
class Entered:
    value: Any

    def __enter__(self) -> Any:
        return self.value

    def __exit__(self, *_: object) -> None:
        return None


def test_a_view_says_what_it_is_for():
    for options in ({}, {"scored": True, "name": "No"}, {"sampled": 1.0}, {"sampled": -0.1}):
        with pytest.raises(ValueError, match="view"):
            View(**{"name": "seen", "change": lambda image, rng, strength: blank(image), **options})
    assert [View("seen", masked, sampled=0.5).members(size) for size in (2, 5, 8)] == [1, 3, 4]
