"""Probes of the audit that are about tokens: prompts, ends, turns in a row, and a turn after a turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from mmrl.engine_api import SamplingRequest
from mmrl.errors import ConfigError
from mmrl.step.audit.probe_row import ProbeRow
from mmrl.step.audit.second_turn import SEEN
from mmrl.step.audit.start_audit import cheap_rows
from mmrl.types import Content, EncodedPrompt, RolloutGroup, Sample, Segment
from tests.proofs import families

HF = {"name": "hf", "temperature": 1.0, "max_new_tokens": 8}
PLAYED = {"name": "tools", "tools": ["math:sqrt"], "max_turns": 2}
Encoded = Callable[[EncodedPrompt], EncodedPrompt]


@dataclass
class Written:
    """An encoder around a sound one, that writes something else.

    Attributes:
        prompt: Changes an encoded prompt.
        ends: False to leave the ends of demonstrations out.
        separates: False to leave the last token but two out of what is inserted.
    """

    encoder: Any
    prompt: Encoded = lambda prompt: prompt
    ends: bool = True
    separates: bool = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)

    def encode(self, prompt: Any) -> EncodedPrompt:
        return self.prompt(self.encoder.encode(prompt))

    def demonstrate(self, prompt: EncodedPrompt) -> Sample:
        sample = self.encoder.demonstrate(prompt)
        (shown,) = sample.segments
        end = None if self.ends else -1
        return replace(sample, segments=(replace(shown, token_ids=shown.token_ids[:end]),))

    def exchange(self, content: Any, role: str) -> Any:
        appended, whole = self.encoder.exchange(content, role)
        return (appended if self.separates else np.delete(appended, -3)), whole


@dataclass
class Forgetful:
    """An engine whose sampler reads the second half of each earlier turn alone."""

    engine: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    @contextmanager
    def sampling(self, version: int | None = None) -> Iterator[Forgetful]:
        with self.engine.sampling() as self.sampler:
            yield self

    def forget_prompts(self) -> None:
        self.sampler.forget_prompts()

    def generate(self, requests: Sequence[SamplingRequest]) -> Iterator[tuple[int, RolloutGroup]]:
        read = [replace(each, segments=tuple(map(_half, each.segments))) for each in requests]
        for index, group in self.sampler.generate(read):
            whole = [
                replace(rollout, segments=(*requests[index].segments, rollout.segments[-1]))
                for rollout in group.rollouts
            ]
            yield index, RolloutGroup(group.prompt, tuple(whole))


def _half(segment: Segment) -> Segment:
    kept = slice(len(segment.token_ids) // 2 if segment.by_policy else 0, None)
    return replace(segment, token_ids=segment.token_ids[kept], sampler_logprobs=segment.sampler_logprobs[kept])


@pytest.fixture(scope="module")
def seeing(start: Callable[..., Any]) -> Any:
    return start(with_sampler=True, sampler=HF)


def rows(engine: Any, bench: Any, encoder: Any = None, **sections: Any) -> dict[str, ProbeRow]:
    config = bench.config(**{"sampler": HF, **sections})
    return {row.probe: row for row in cheap_rows(engine, encoder or bench.encoder, config)}


def bad(found: dict[str, ProbeRow]) -> list[str]:
    return [name for name, row in found.items() if row.verdict == "bad"]


def test_a_sound_run_with_an_environment_has_rows_of_turns_and_passes(seeing, vision):
    found = rows(seeing, vision, environment=PLAYED)
    assert not bad(found)
    assert {"tokens of prompts", "turns with text", "turns with images", "sampler = learner, a second turn",
            "sampler = learner, a second turn with images"} <= found.keys()  # fmt: skip
    assert "turns with images" not in rows(seeing, vision, environment={**PLAYED, "max_images": 0})
    assert not any("turn" in name for name in rows(seeing, vision))


def test_prompts_that_are_not_the_templates_are_found(seeing, vision):
    def doubled(prompt: EncodedPrompt) -> EncodedPrompt:
        return replace(prompt, token_ids=np.concatenate([prompt.token_ids[:1], prompt.token_ids]))

    found = rows(seeing, vision, Written(vision.encoder, doubled))
    assert bad(found) == ["tokens of prompts"] and found["tokens of prompts"].number > 8


def test_a_separator_that_is_left_out_between_turns_is_found(seeing, vision):
    found = rows(seeing, vision, Written(vision.encoder, separates=False), environment=PLAYED)
    assert bad(found) == ["turns with text", "turns with images"]


def test_a_history_that_the_sampler_reads_otherwise_is_found_in_the_second_turn(seeing, vision):
    found = bad(rows(Forgetful(seeing), vision, environment=PLAYED))
    assert set(found) == {"sampler = learner, a second turn", "sampler = learner, a second turn with images"}


def test_a_second_turn_that_a_run_cannot_take_is_told_with_the_reason(seeing, vision, monkeypatch):
    insertion = vision.encoder.insertion

    def refuse(turn: Segment, content: Content, role: str) -> Segment:
        if content[0] == SEEN and len(content) > 1:
            raise ConfigError("the template carries no images of a tool")
        return insertion(turn, content, role)

    monkeypatch.setattr(vision.encoder, "insertion", refuse)
    found = rows(seeing, vision, environment=PLAYED)
    assert "sampler = learner, a second turn" in found
    assert found["prompts left out"].found == (
        "1 prompt left out: a second turn with images (the template carries no images of a tool)"
    )
    short: dict[str, Any] = {"train": {"name": "table"}, "max_prompt_tokens": 28}
    found = rows(seeing, vision, environment={**PLAYED, "max_observation_tokens": 1}, data=short)
    why = "longer than a sequence of the run, which has at most"
    assert "a second turn (" + why in found["prompts left out"].found
    assert not any(name.startswith("sampler = learner, a second turn") for name in found)


def test_demonstrations_without_an_end_are_found(start, vision):
    engine = start()
    sections: dict[str, Any] = {"algorithm": {"name": "sft"}}
    assert not bad(rows(engine, vision, **sections))
    found = rows(engine, vision, Written(vision.encoder, ends=False), **sections)
    assert bad(found) == ["ends of turns"] and found["ends of turns"].number > 1


@pytest.mark.parametrize("family", families("vision_once"))
def test_prompts_are_the_templates_own_in_every_family_that_sees(family, bench):
    setting = bench(family, True)
    for prompt in setting.prompts:
        np.testing.assert_array_equal(setting.encoder.by_template(prompt), prompt.token_ids)
