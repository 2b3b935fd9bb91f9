"""Episodes on two ranks: with a sampler that they share, and with one each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mmrl.cluster.launch import start_engine
from mmrl.engine.spec import EngineSpec
from mmrl.engine_api import Polled, SamplingRequest
from tests.cluster.process_ranks import ProcessRanks
from tests.engine import episodes

pytestmark = pytest.mark.full
SAMPLERS = {
    "tensor parallel": {"tensor_parallel_size": 2, "engine": {"kv_cache_memory_bytes": 2**26}},
    "one each": {"name": "hf"},
}


@pytest.fixture(params=SAMPLERS)
def group(request: Any, vision: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("mmrl.cluster.ray_ranks.RayRanks", ProcessRanks)
    cluster = {"name": "ray", "ranks": 2}
    config = vision.config(cluster=cluster, sampler=SAMPLERS[request.param])
    group = start_engine(EngineSpec(config, vision.folder, vision.media, None, 2, with_sampler=True))
    yield group
    group.close()


def test_turns_are_exact_and_the_same_whenever_they_are_answered(
    group: Any, vision: Any, plain: Callable[..., Any], picture: Callable[..., Any]
):
    observations = [episodes.inserted(vision, "Look again."), episodes.inserted(vision, "So?", picture(90, 60))]
    beside = [SamplingRequest(vision.prompts[0], 3, episodes.TEMPERATURE, 24, 9)]
    found = []
    for timing in ("early", "late", "random"):
        with group.sampling() as sampler:
            found.append(episodes.play(sampler, [*vision.prompts[:2]] * 2, observations, beside, timing))
            assert sampler.poll() == Polled()
    for other in found[1:]:
        episodes.assert_same(other, found[0])
    episodes.assert_exact(found[0], plain(vision.folder.path), vision.media)
    assert {len(each.steps) for each in found[0].values()} == {1, episodes.TURNS}
    assert len(found[0][1].rollout.all_images) == 2
