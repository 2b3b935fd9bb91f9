"""Episodes without weights: scripted replies through the real environment, as the model would read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.commands.check.scripts import Script, ScriptedSampler, scripts
from mmrl.commands.check.spelling import written
from mmrl.commands.printing import POLICY
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine_api import SamplingRequest
from mmrl.rollout.episodes.episode import Limits
from mmrl.rollout.episodes.player import EpisodePlayer
from mmrl.rollout.episodes.process import EnvironmentFacts
from mmrl.rollout.records.episodes import episode_fields
from mmrl.system.clock import Clock
from mmrl.types import EncodedPrompt, ImageRef, IntArray, Prompt, Rollout, policy_turns

SHOWN_CHARACTERS = 2000
"""Most characters of one stretch of a conversation that are shown."""


@dataclass(frozen=True, slots=True)
class Walk:
    """One scripted episode.

    Attributes:
        stretches: Author and text of the prompt, of each turn, and of what was inserted between turns.
        failure: The reason why the environment failed; empty if it did not.
    """

    script: Script
    rollout: Rollout
    stretches: Sequence[tuple[str, str]]
    failure: str

    def data(self) -> dict[str, Any]:
        """For a program."""
        rollout = self.rollout
        return {
            "script": self.script.kind,
            "finish_reason": rollout.finish_reason,
            "failure": self.failure,
            **self.counts(),
            "components": dict(rollout.components),
            "episode": episode_fields(rollout).get("episode", []),
            "conversation": [{"author": author, "text": text} for author, text in self.stretches],
        }

    def counts(self) -> dict[str, int]:
        """Turns, calls, tokens and images."""
        rollout, calls = self.rollout, [call for played in self.rollout.episode for call in played.turn.calls]
        return {
            "turns": len(rollout.episode),
            "calls": len(calls),
            "invalid_calls": sum(bool(call.error) for call in calls),
            "prompt_tokens": len(rollout.prompt.token_ids),
            "policy_tokens": int(rollout.mask.sum()),
            "inserted_tokens": int((~rollout.mask).sum()),
            "images": len(rollout.all_images) - len(rollout.prompt.images),
        }

    def lines(self, player: EpisodePlayer, *, with_prompt: bool) -> Iterator[str]:
        """For a person."""
        counts, limits, rollout = self.counts(), player.limits, self.rollout
        tokens = counts["policy_tokens"] + counts["inserted_tokens"]
        yield f"{self.script.kind}: ends with {rollout.finish_reason}" + (f", {self.failure}" if self.failure else "")
        yield (
            f"  turns {counts['turns']} of {limits.turns}; policy's tokens {counts['policy_tokens']} of "
            f"{limits.policy_tokens}; after the prompt {tokens} of {limits.tokens}; images {counts['images']} of "
            f"{limits.images}"
        )
        scored = ", ".join(f"{name} {'-' if v is None else f'{v:g}'}" for name, v in rollout.components.items())
        yield f"  calls {counts['calls']}, invalid {counts['invalid_calls']}; {scored}"
        for author, text in self.stretches[0 if with_prompt else 1 :]:
            yield from (f"  {author:>6} | {line}" for line in _shortened(text).split("\n"))


def walk(
    player: EpisodePlayer,
    facts: EnvironmentFacts,
    folder: ModelFolder,
    end: int,
    prompt: EncodedPrompt,
    seed: int,
) -> list[Walk]:
    """Play a prompt with each script.

    Args:
        end: The id that ends a turn.
        prompt: With its raw images.

    Raises:
        EpisodeError: The environment cannot be made, or fails too often.
    """
    chosen = scripts(facts.tools, facts.example, _answer(prompt.prompt), player.encoder)
    request = SamplingRequest(prompt, 1, 1.0, player.limits.policy_tokens, seed=0)
    requests, seeds = [request] * len(chosen), [seed] * len(chosen)
    sampler = ScriptedSampler(folder, end, chosen)
    groups = dict(player.play(sampler, requests, seeds, player.tally(), Clock(), lambda kind, **fields: None))
    found = []
    for index, script in enumerate(chosen):
        (rollout,) = groups[index].rollouts
        found.append(Walk(script, rollout, list(stretches(rollout, folder)), rollout.failure))
    return found


def observed_roles(walks: Sequence[Walk], proven: Mapping[str, str]) -> dict[str, str]:
    """The roles of the messages in which observations with text, and with images, are read.

    Args:
        proven: Proofs of observations of role ``tool``, for a kind that none of the walks has met; it is left out where
            they have met others only.
    """
    met = dict[str, list[str]]()
    for segment in (segment for each in walks for segment in each.rollout.segments if not segment.by_policy):
        met.setdefault("images" if segment.images else "text", []).append(segment.role)
    roles = {kind: " and ".join(sorted(set(found))) for kind, found in met.items()}
    is_tools = all(role == proven.get(kind) for kind, role in roles.items())
    return {kind: roles.get(kind, role) for kind, role in proven.items() if is_tools or kind in roles}


def cut_turns(walks: Sequence[Walk], limits: Limits) -> list[str]:
    """A warning for each script of a right turn that was cut: the policy could not write it either."""
    own = limits.turn_tokens < limits.policy_tokens
    key, most = (
        ("environment.max_turn_tokens", limits.turn_tokens) if own else ("sampler.max_new_tokens", limits.policy_tokens)
    )
    shared = "" if own else ", which all turns of an episode share"
    found = []
    for each in walks:
        cut = [place for place, played in enumerate(each.rollout.episode) if played.turn.finish_reason == "length"]
        if cut and each.script.kind.startswith("right"):
            turns = policy_turns(each.rollout.segments)
            tokens = [sum(len(segment.token_ids) for segment in turn) for turn in turns]
            where = f"is cut after {tokens[cut[0]]} tokens, in turn {cut[0] + 1}"
            found.append(f"environment: a {each.script.kind} {where}; raise {key} = {most}{shared}")
    return found


def stretches(rollout: Rollout, folder: ModelFolder) -> Iterator[tuple[str, str]]:
    """Author and text of each part of a sequence, as the model reads it; images by their hashes."""
    yield "prompt", decoded(rollout.prompt.token_ids, rollout.prompt.images, folder)
    for segment in rollout.segments:
        author = POLICY if segment.by_policy else segment.role
        yield author, decoded(segment.token_ids, segment.images, folder)


def decoded(token_ids: IntArray, images: Sequence[ImageRef], folder: ModelFolder) -> str:
    """The text of tokens, special ones included, one mark for all tokens of an image; both sizes of a resized one."""
    ids, texts, at = token_ids.tolist(), list[str](), 0
    for image in images:
        count = folder.images.expansion(image.width, image.height).count(folder.image_token_id)
        begin = ids.index(folder.image_token_id, at)
        size, file = f"{image.width}x{image.height}", image.file_size
        if file is not None and file != (image.width, image.height):
            size += f" of {file[0]}x{file[1]}"
        mark = f"[image {image.hash[:8]} {size}, {count} tokens]"
        texts += [folder.tokenizer.decode(ids[at:begin], skip_special_tokens=False), mark]
        at = begin + count
    return "".join([*texts, folder.tokenizer.decode(ids[at:], skip_special_tokens=False)])


def _answer(row: Prompt) -> str:
    return row.demonstration or f"The answer is \\boxed{{{written(row.answer)[0]}}}."


def _shortened(text: str) -> str:
    half = SHOWN_CHARACTERS // 2
    return (
        text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]}\n... {len(text) - 2 * half} more ...\n{text[-half:]}"
    )
