"""The probe of weight syncs: sound samplers pass under every version, and each fault of a sampler stops the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmrl.errors import NumericsError
from mmrl.interfaces import Aggregation
from mmrl.ops.metrics import probe_metrics
from mmrl.ops.objective import training_rows
from mmrl.step.audit.probe_prompts import MOVED, OTHER
from mmrl.step.audit.start_audit import cheap_rows
from mmrl.step.check import LogprobCheck
from mmrl.step.sync_probe import SAMPLES, TOKENS, SyncProbe
from mmrl.types import FloatArray, Sample

HF = {"name": "hf", "temperature": 1.0}
SPLIT = {"name": "ray", "sampler_ranks": 2, "learner_ranks": 1}


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any]) -> Any:
    return start(with_sampler=True, sampler=HF, learner={"lr": 2e-3})


class Asked:
    """A sampler of several ranks around one, each with a fault of its own.

    Args:
        faults: For each rank, the samples that it scores in place of those that it is asked for.
    """

    def __init__(self, sampler: Any, *faults: Callable[[Sample], Sample]) -> None:
        self._sampler, self._faults = sampler, faults

    def score(self, samples: Sequence[Sample], temperature: float) -> list[list[FloatArray]]:
        return [self._sampler.score(list(map(fault, samples)), temperature)[0] for fault in self._faults]


def as_asked(sample: Sample) -> Sample:
    return sample


def made(engine: Any, bench: Any) -> SyncProbe:
    probe = SyncProbe()
    probe.sample(engine, bench.encoder, bench.config(sampler=HF, cluster=SPLIT))
    return probe


def update(engine: Any, probe: SyncProbe) -> int:
    """An optimizer step on the probe's own tokens; returns the version that it makes."""
    samples = probe._samples
    masks = [sample.mask for sample in samples]
    advantages = [np.full(len(mask), (-1.0) ** place) for place, mask in enumerate(masks)]
    args = samples, masks, {"advantages": advantages}, np.arange(len(masks)), Aggregation("token-mean")
    with engine.learning() as learner:
        learner.network("policy").update(list(training_rows(*args, range(len(masks))).values()))
    return int(engine.publish())


def ask(engine: Any, probe: SyncProbe, version: int, *faults: Callable[[Sample], Sample]) -> None:
    with engine.learning() as learner:
        probe.ask_learner(learner, version)
    with engine.sampling() as sampler:
        probe.ask_sampler(Asked(sampler, *faults) if faults else sampler, version)


def checked(probe: SyncProbe, version: int, precision: str = "float32", on_mismatch: Any = "stop") -> dict[str, float]:
    check = LogprobCheck(precision, on_mismatch, event=lambda kind, **fields: None)
    found = probe.compared(version)
    assert found is not None
    check.check_probe(version + 2, found)
    return probe_metrics(found.gaps)


def test_a_probe_has_images_and_tokens_after_another_one_and_agrees_under_every_version(engine, vision):
    probe = made(engine, vision)
    samples = [each for each in probe._answered if not each.is_crossed]
    assert len(samples) >= SAMPLES and max(len(each.sample.token_ids) for each in samples) == TOKENS
    assert sum(bool(each.sample.prompt.images) for each in samples) >= 5
    assert [each.prompt.name for each in probe._answered if each.is_crossed] == ["one image", "one image"]
    first = engine.publish()
    ask(engine, probe, first)
    assert checked(probe, first)["mismatch/probe_abs_max"] < 1e-5
    for _ in range(2):
        version = update(engine, probe)
        ask(engine, probe, version)
        assert 0 < checked(probe, version)["mismatch/probe_abs_mean"] < 1e-5
    assert probe.compared(first) is None  # dropped since


def test_a_run_without_images_has_a_probe_of_texts(engine, vision):
    probe = made(replace_facts(engine, max_images=0), vision)
    assert len(probe._samples) >= SAMPLES and not any(sample.prompt.images for sample in probe._samples)


def replace_facts(engine: Any, **facts: Any) -> Any:
    """The engine with other facts in its description."""

    class Described:
        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def describe(self) -> Any:
            return {**engine.describe(), **facts}

    return Described()


def test_an_engine_that_describes_no_model_has_an_empty_probe(vision):
    class Plain:
        def describe(self) -> Any:
            return {}

    probe = made(Plain(), vision)
    probe.ask_learner(None, 0)  # type: ignore[arg-type]
    probe.ask_sampler(None, 0)  # type: ignore[arg-type]
    assert probe.compared(0) is None


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_sampler_that_kept_old_weights_is_found(precision, engine, vision, monkeypatch):
    probe = made(engine, vision)
    with engine.sampling() as sampler:  # it has the newest weights
        load = sampler.load
    monkeypatch.setattr(sampler, "load", lambda weights, version: setattr(sampler, "weight_version", version))
    for _ in range(8):
        version = update(engine, probe)
    ask(engine, probe, version)
    with pytest.raises(
        NumericsError, match=f"disagree on the probe of version {version} .* sampled step {version + 2}"
    ):
        checked(probe, version, precision)
    monkeypatch.setattr(sampler, "load", load)
    version = update(engine, probe)
    ask(engine, probe, version)
    checked(probe, version, precision)


def test_a_sampler_that_got_another_version_is_found(engine, vision):
    probe = made(engine, vision)
    first = engine.publish()
    with engine.sampling() as sampler:
        probe.ask_sampler(sampler, first + 1)  # it says that it has the next version already
    assert update(engine, probe) == first + 1
    with engine.learning() as learner:
        probe.ask_learner(learner, first + 1)
    with pytest.raises(NumericsError, match="sampler and learner disagree on the probe"):
        checked(probe, first + 1)


def test_a_rank_whose_sampler_does_not_see_images_is_found_where_gaps_are_within_the_types_limits(engine, vision):
    probe, version = made(engine, vision), engine.publish()
    blanks: dict[Any, Any] = {}

    def blind(sample: Sample) -> Sample:
        blank = blanks.setdefault(sample.prompt, vision.encoder.blanked(sample.prompt))
        return replace(sample, prompt=blank)

    ask(engine, probe, version, as_asked, blind)
    found = probe.compared(version)
    assert found is not None and [len(found.gaps), len(found.sights)] == [2, 2]
    assert all(sight.sees for sight in found.sights[0]) and {sight.name for sight in found.sights[1]} == {OTHER, MOVED}
    assert not any(sight.sees for sight in found.sights[1])
    with pytest.raises(NumericsError, match=r"rank 1 of the sampler does not see images on the probe"):
        checked(probe, version, "bfloat16")
    assert checked(probe, version, "bfloat16", "warn")["mismatch/probe_abs_mean"] == found.gaps[1].abs_mean


def test_the_audit_of_a_split_run_asks_every_rank_and_shows_it_another_image(engine, vision, monkeypatch):
    blanks: dict[Any, Any] = {}

    def blind(sample: Sample) -> Sample:
        return replace(sample, prompt=blanks.setdefault(sample.prompt, vision.encoder.blanked(sample.prompt)))

    with engine.sampling() as sampler:
        score = sampler.score
    faults: list[Any] = [as_asked, as_asked]
    monkeypatch.setattr(
        sampler, "score", lambda samples, t: [score(list(map(fault, samples)), t)[0] for fault in faults]
    )
    split, plain = ({"sampler": HF, "cluster": cluster} for cluster in (SPLIT, {}))

    def of_ranks(sections: Any) -> dict[str, Any]:
        rows = cheap_rows(engine, vision.encoder, vision.config(**sections))
        return {row.probe: row for row in rows if "every rank" in row.probe}

    assert not of_ranks(plain)
    rows = of_ranks(split)
    assert list(rows) == [
        "sampler = learner, every rank",
        f"sight of every rank, {OTHER}",
        f"sight of every rank, {MOVED}",
    ]
    assert {row.verdict for row in rows.values()} == {"ok"}
    faults[1] = blind
    rows = of_ranks(split)
    assert {row.verdict for row in rows.values()} == {"bad"} and "rank 1" in rows["sampler = learner, every rank"].found


def test_both_sides_may_answer_in_any_order_and_a_missing_answer_is_no_comparison(engine, vision):
    probe, version = made(engine, vision), engine.publish()
    with engine.sampling() as sampler:
        probe.ask_sampler(sampler, version)
    assert probe.compared(version) is None
    with engine.learning() as learner:
        probe.ask_learner(learner, version)
    assert probe.compared(version) is not None
    with engine.learning() as learner:
        probe.ask_learner(learner, version + 1)
    with engine.sampling() as sampler:
        probe.ask_sampler(sampler, None)  # of the version that the learner was last asked under
    assert probe.compared(version + 1) is not None


def test_a_learner_that_is_versions_ahead_is_compared_by_the_version_that_the_sampler_has(engine, vision):
    probe = made(engine, vision)

    class Both:
        """A side whose log-probs are its version."""

        version = 0

        def network(self, role: str) -> Both:
            return self

        def score(self, samples: Sequence[Sample], temperature: float | None = None) -> Any:
            values = [np.full(len(sample.token_ids), -float(self.version)) for sample in samples]
            return values if temperature is None else [values]

    learner, sampler = Both(), Both()
    for learner.version in (0, 1, 2):
        probe.ask_learner(learner, learner.version)  # type: ignore[arg-type]
    for sampler.version in (0, 1, 2):
        probe.ask_sampler(sampler, sampler.version)  # type: ignore[arg-type]
        assert checked(probe, sampler.version)["mismatch/probe_abs_max"] == 0


def test_a_run_that_goes_on_has_the_probe_of_its_first_attempt_and_the_same_numbers(engine, vision):
    first, version = made(engine, vision), engine.publish()
    with engine.learning() as learner:
        first.ask_learner(learner, version)
    with engine.sampling() as sampler:
        told = first.ask_sampler(sampler, version)
    assert told.keys() == {"mismatch/probe_abs_mean", "mismatch/probe_abs_max"}
    for _ in range(4):
        version = update(engine, first)
    later = made(engine, vision)  # other weights write other tokens
    tokens = [[sample.token_ids.tolist() for sample in each._samples] for each in (first, later)]
    assert tokens[0] != tokens[1]
    later.restore(json.loads(json.dumps(first.state())))
    assert [sample.token_ids.tolist() for sample in later._samples] == tokens[0]
    found = []
    for probe in (first, later):
        with engine.learning() as learner:
            probe.ask_learner(learner, version)
        with engine.sampling() as sampler:
            found.append(probe.ask_sampler(sampler, version))
    assert found[0] == found[1]
    kept = later.state()
    later.restore([{"prompt": "one that does not fit any more", "member": 0, "token_ids": [1]}])
    assert later.state() == kept
