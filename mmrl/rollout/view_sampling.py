"""Groups a part of which is sampled from views of their prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mmrl.engine_api import Sampler, SamplingRequest
from mmrl.types import EncodedPrompt, Rollout, RolloutGroup


def sampled_groups(
    sampler: Sampler, requests: Sequence[SamplingRequest], members: Mapping[str, int], num_groups: int
) -> Iterator[tuple[int, RolloutGroup]]:
    """Whole groups as they finish, each with the index of its request.

    The members of a view are the group's last. All belong to the prompt itself; ``Rollout.view`` tells the view that
    one was sampled from.

    Args:
        members: Rollouts of a group by the view that they are sampled from. A prompt without images has none of these.
        num_groups: The first so many requests are groups that are sampled so; the others are as they are.
    """
    parts: list[tuple[int, str]] = []
    asked: list[SamplingRequest] = []
    for index, request in enumerate(requests):
        for name, part in _parts(request, members if index < num_groups else {}):
            parts.append((index, name))
            asked.append(part)
    count = Counter(index for index, _ in parts)
    found: dict[int, dict[str, RolloutGroup]] = {}
    for place, group in sampler.generate(asked):
        index, name = parts[place]
        found.setdefault(index, {})[name] = group
        if len(found[index]) == count[index]:
            yield index, _joined(requests[index].prompt, found.pop(index), members)


def _parts(request: SamplingRequest, members: Mapping[str, int]) -> Iterator[tuple[str, SamplingRequest]]:
    """The request of the prompt itself, under an empty name, and one of each view; members keep their seeds."""
    views = {name: count for name, count in members.items() if name in request.prompt.views}
    first = request.num_samples - sum(views.values())
    yield "", replace(request, num_samples=first)
    for name, count in views.items():
        yield name, replace(request, prompt=request.prompt.views[name], num_samples=count, seed=request.seed + first)
        first += count


def _joined(prompt: EncodedPrompt, parts: Mapping[str, RolloutGroup], members: Mapping[str, int]) -> RolloutGroup:
    rollouts: list[Rollout] = list(parts[""].rollouts)
    for name in members:
        if name in parts:  # the experts that saw the view are not those of the prompt itself
            first = len(rollouts)
            rollouts += [
                replace(each, prompt=prompt, index=first + place, view=name, experts=None)
                for place, each in enumerate(parts[name].rollouts)
            ]
    return RolloutGroup(prompt, tuple(rollouts))
