"""Many ranks as one sampler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any

from mmrl.cluster.calls import RankCalls
from mmrl.cluster.files import bare, send_images
from mmrl.cluster.shipping import PackedRequests
from mmrl.data.images import MediaStore
from mmrl.engine_api import SamplingRequest
from mmrl.ops.packing import balance
from mmrl.system.signals import defer_signals
from mmrl.types import RolloutGroup

AHEAD = 2
"""Groups that a sampler may finish before the driver has taken the last. A driver that gives up has to wait for every
call in the queue, so there are not more."""


@dataclass(frozen=True, slots=True)
class GroupSampler:
    """Implements ``engine_api.Sampler``: ranks that hold one copy of the weights sample a share of the requests."""

    calls: RankCalls
    media: MediaStore
    ranks_together: int

    def generate(self, requests: Sequence[SamplingRequest]) -> Iterator[tuple[int, RolloutGroup]]:
        size = self.ranks_together
        shares = balance([_cost(request) for request in requests], len(self.calls.nodes) // size)
        by_rank = [[requests[i] for i in share] for share in shares for _ in range(size)]
        images = [[ref for request in share for ref in request.prompt.images] for share in by_rank]
        send_images(self.calls.ask, self.media, self.calls.nodes, images)
        jobs = [PackedRequests(replace(each, prompt=bare(each.prompt)) for each in share) for share in by_rank]
        self.calls.all("submit", each=jobs)
        left = Counter({number: len(share) for number, share in enumerate(shares)})
        asked: dict[Future[Any], tuple[int, bool]] = {}

        def ask(number: int) -> None:
            """All ranks of the set run on, with the same requests in the same order; the first answers."""
            if left[number]:
                left[number] -= 1
                with defer_signals():
                    for member in range(size):
                        future = self.calls.call(number * size + member, "advance", member == 0)
                        asked[future] = (number, member == 0)

        for number in list(left) * AHEAD:
            ask(number)
        while asked:
            done, _ = wait(asked, return_when=FIRST_COMPLETED)
            self.calls.check(asked)
            for future in done:
                number, answers = asked.pop(future)
                if answers:
                    ask(number)
                    position, found = future.result()
                    index = shares[number][position]
                    prompt = requests[index].prompt
                    yield index, RolloutGroup(prompt, tuple(replace(r, prompt=prompt) for r in found.rollouts))


def _cost(request: SamplingRequest) -> int:
    return len(request.prompt.token_ids) + request.num_samples * request.max_new_tokens
