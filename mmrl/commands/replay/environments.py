"""Plays recorded turns again in the environment, and tells which observation differs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from mmrl.commands.replay.comparison import Difference, Part, close
from mmrl.commands.replay.rerun import name_of
from mmrl.config.sections import Config
from mmrl.data.order import request_seed
from mmrl.data.prompts import PromptSource
from mmrl.engine_api import SamplingRequest
from mmrl.errors import MMRLError, plural
from mmrl.rollout.episodes.player import EpisodePlayer
from mmrl.rollout.episodes.stand_in import StandInSampler
from mmrl.rollout.records import RecordedStep
from mmrl.runs.episodes import playing
from mmrl.runs.setup import RunSetup
from mmrl.system.clock import Clock
from mmrl.system.redaction import Redactor
from mmrl.types import Content, Prompt, Rollout, Segment, policy_turns

_NAME, _UNIT = "environment", "turns"
_WIDTH = 60


class ReplayedEnvironment:
    """A context in which steps are played again; its workers start with the first one.

    Args:
        config: The run's.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stack = ExitStack()
        self._setup: RunSetup | None = None
        self._player: EpisodePlayer | None = None
        self._rows: dict[str, Prompt] = {}

    def __enter__(self) -> ReplayedEnvironment:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def part(self, record: RecordedStep) -> Part:
        """The comparison of a step's episodes with what the environment answers now.

        Episodes that failed are left out. What differs for want of the environment, or of a row, is in the note.
        """
        rollouts = [rollout for rollout in _rollouts(record) if rollout.episode and not rollout.failure]
        try:
            setup, player = self._begin()
            known, lost = self._find(setup.prompts, rollouts)
            again = _played(player, setup, known, [self._rows[rollout.prompt.id] for rollout in known])
        except MMRLError as error:
            return Part(_NAME, _UNIT, 0, [], f"not played again: {error.what}")
        pairs = list(zip(known, again, strict=True))
        redact = Redactor()
        found = [difference for was, now in pairs for difference in differences(was, now, redact)]
        note = f"{plural(lost, 'episode')} left out, whose rows data.train has no more" if lost else ""
        return Part(_NAME, _UNIT, sum(len(was.episode) for was in known), found, note)

    def _begin(self) -> tuple[RunSetup, EpisodePlayer]:
        if self._setup is None or self._player is None:
            media = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            self._setup = RunSetup(self._config, media)
            self._player = self._stack.enter_context(playing(self._setup))
        assert self._player is not None, "the run has an environment"
        return self._setup, self._player

    def _find(self, source: PromptSource, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], int]:
        """The rollouts whose rows are there, and the number of the others."""
        missing = {rollout.prompt.id for rollout in rollouts} - self._rows.keys()
        for index in range(len(source)):
            if not missing:
                break
            row = source[index]
            if row.id in missing:
                missing.remove(row.id)
                self._rows[row.id] = row
        known = [rollout for rollout in rollouts if rollout.prompt.id in self._rows]
        return known, len(rollouts) - len(known)


def differences(was: Rollout, now: Rollout, redact: Redactor) -> Iterator[Difference]:
    """Differences of an episode that was played again; texts as records have them."""
    for what, before, after in _pairs(was, now, redact):
        if before != after:
            yield Difference(what, *_shown(before, after), name_of(was), was.greedy)


def _pairs(was: Rollout, now: Rollout, redact: Redactor) -> Iterator[tuple[str, object, object]]:
    """Names of what is compared, as it was and is."""
    if now.failure:
        yield "the environment", "answered", now.failure
        return
    if not np.array_equal(was.prompt.token_ids, now.prompt.token_ids):
        yield "first observation", redact(was.prompt.text), redact(now.prompt.text)
    elif (before_images := _hashes(was)) != (after_images := _hashes(now)):
        yield "first observation", before_images, after_images
    for number, (before, after) in enumerate(zip(was.episode, now.episode, strict=False)):
        yield f"observation of turn {number}", _content(before.content, redact), _content(after.content, redact)
        yield f"role of the observation of turn {number}", before.role, after.role
        if not close(before.reward, after.reward):
            yield f"reward of turn {number}", before.reward, after.reward
        yield f"done of turn {number}", before.done, after.done
    if len(was.episode) != len(now.episode):
        yield "number of turns", len(was.episode), len(now.episode)
    yield "finish reason", was.finish_reason, now.finish_reason
    if len(was.token_ids) == len(now.token_ids):
        yield "inserted tokens", was.token_ids[~was.mask].tolist(), now.token_ids[~was.mask].tolist()
    for name in dict.fromkeys([*was.components, *now.components]):
        before_value, after_value = was.components.get(name), now.components.get(name)
        if not close(before_value, after_value):
            yield f"component {name}", before_value, after_value


class _Recorded(StandInSampler):
    """Gives the turns of recorded episodes; one that goes on for longer gets turns of nothing."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        super().__init__()
        self._rollouts = rollouts
        self._turns = [policy_turns(rollout.segments) for rollout in rollouts]

    def turn(self, ticket: int, request: SamplingRequest) -> tuple[Rollout, int, int]:
        rollout, number = self._rollouts[ticket], len(policy_turns(request.segments))
        if number >= len(rollout.episode):
            ids = np.zeros(request.max_new_tokens, np.int32)
            segment = Segment(ids, True, np.zeros(len(ids), np.float32))
            made = replace(rollout, segments=(*request.segments, segment), text="", finish_reason="length", episode=())
            return made, 0, 0
        played, turn = rollout.episode[number], self._turns[ticket][number]
        sampled = replace(
            rollout,
            segments=(*request.segments, *turn),
            text=played.turn.text,
            finish_reason=played.turn.finish_reason,
            episode=(),
        )
        return sampled, played.began, played.finished


def _played(
    player: EpisodePlayer, setup: RunSetup, rollouts: Sequence[Rollout], rows: Sequence[Prompt]
) -> list[Rollout]:
    """The episodes as they are now.

    Raises:
        EpisodeError: The environment cannot be made, or fails too often.
    """
    requests, seeds = list[SamplingRequest](), list[int]()
    config = setup.config
    for rollout, row in zip(rollouts, rows, strict=True):
        prompt = replace(setup.encoder.encode(row), epoch=rollout.prompt.epoch)
        requests.append(SamplingRequest(prompt, 1, config.sampler.temperature, config.sampler.max_new_tokens, seed=0))
        seeds.append(request_seed(config.trainer.seed, prompt.epoch, f"environment/{prompt.id}", 0))
    groups = player.play(
        _Recorded(rollouts), requests, seeds, player.tally(), Clock(), event=lambda kind, **fields: None
    )
    found = {index: group.rollouts[0] for index, group in groups}
    return [found[index] for index in range(len(rollouts))]


def _rollouts(record: RecordedStep) -> Iterator[Rollout]:
    for group in record.groups:
        yield from group.rollouts
        if group.credited.scored.greedy is not None:
            yield from group.credited.scored.greedy.rollouts


def _content(content: Content | None, redact: Redactor) -> list[str] | None:
    """An observation for a person; its images by hash."""
    if content is None:
        return None
    return [redact(part) if isinstance(part, str) else f"[image {part.hash}]" for part in content]


def _hashes(rollout: Rollout) -> list[str]:
    return [image.hash for image in rollout.prompt.images]


def _shown(was: object, now: object) -> tuple[object, object]:
    """Two values; of long texts the part where they begin to differ."""
    if not (isinstance(was, str | list) and isinstance(now, str | list)):
        return was, now
    one, other = (each if isinstance(each, str) else " ".join(map(str, each)) for each in (was, now))
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = max(same - _WIDTH // 4, 0)
    return tuple(  # type: ignore[return-value]
        ("..." if begin else "") + text[begin : begin + _WIDTH] + ("..." if len(text) > begin + _WIDTH else "")
        for text in (one, other)
    )
