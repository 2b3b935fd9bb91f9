"""Many ranks as one engine: the driver's side, which shares out work in whole groups and puts answers together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from mmrl.cluster.calls import RankCalls
from mmrl.cluster.files import send_images
from mmrl.cluster.group_learner import GroupLearner
from mmrl.cluster.group_sampler import GroupSampler
from mmrl.cluster.jobs import RankJob
from mmrl.cluster.ranks import Ranks
from mmrl.data.images import MediaStore
from mmrl.engine_api import Learner, Sampler
from mmrl.ops.packing import Unit
from mmrl.system.signals import Stopped, defer_signals
from mmrl.types import EncodedPrompt, Inspection, Sample, worst


def build(calls: RankCalls, jobs: Mapping[int, RankJob], turns: Sequence[Iterable[int]]) -> list[Mapping[str, Any]]:
    """Build the engines of ranks; returns their descriptions, in the order of the jobs.

    Args:
        jobs: By rank.
        turns: Ranks that start at the same time; each turn waits for the one before it.
    """
    calls.some("forget_shared_memory", dict.fromkeys(jobs, ()))
    found = dict[int, Mapping[str, Any]]()
    for turn in map(list, turns):
        found |= zip(turn, calls.some("start", {rank: (jobs[rank],) for rank in turn}), strict=True)
        calls.some("forget_shared_memory", dict.fromkeys(jobs, ()))
    return [found[rank] for rank in jobs]


class RankGroup(RankCalls):
    """Implements ``engine_api.Engine`` over many ranks.

    Args:
        cost: The learner's cost of a prompt's samples; ranks are balanced by it.
        roles: The roles of the networks that each rank's learner has.
        shares_prefix: True if they share the prompt when they are packed.
        ranks_together: Neighbouring ranks that sample together.
        ranks_of_a_row: Neighbouring ranks that hold packed rows together when they learn.
        facts: Entries of the description that the driver knows better than the ranks.

    Attributes:
        descriptions: Each rank's own.
    """

    def __init__(
        self,
        ranks: Ranks,
        media: MediaStore,
        cost: Callable[[Unit, Sequence[Sample]], float],
        *,
        ranks_together: int,
        roles: Sequence[str] = ("policy",),
        shares_prefix: bool = True,
        ranks_of_a_row: int = 1,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(ranks)
        self._facts = facts or {}
        self.media, self.cost, self.ranks_together = media, cost, ranks_together
        self.roles, self.shares_prefix, self.ranks_of_a_row = roles, shares_prefix, ranks_of_a_row
        self.descriptions: Sequence[Mapping[str, Any]] = []
        self._entered: Sequence[Future[Any]] = ()  # of the owner that has not left
        self._memory_bytes_max = 0

    def start(self, jobs: Sequence[RankJob]) -> None:
        """Build the ranks' engines, together."""
        self.descriptions = build(self, dict(enumerate(jobs)), [range(len(jobs))])

    @property
    def precision(self) -> str:
        return str(self.descriptions[0]["precision"])

    samples_apart = False

    def publish(self) -> int:
        return int(self.ask(0, "publish"))

    @contextmanager
    def sampling(self, version: int | None = None) -> Iterator[Sampler]:
        assert version is None, "the same ranks sample and learn, with the newest weights"
        with self._owning("sampling"):
            sampler = GroupSampler(self, self.media, self.ranks_together)
            try:
                yield sampler
            finally:
                sampler.forget()  # ranks drop what is left when they leave
        sampler.check()

    @contextmanager
    def learning(self) -> Iterator[Learner]:
        with self._owning("learning"):
            yield GroupLearner(
                self,
                self.media,
                self.cost,
                roles=self.roles,
                shares_prefix=self.shares_prefix,
                ranks_of_a_row=self.ranks_of_a_row,
            )

    def inspect(self, prompts: Sequence[EncodedPrompt]) -> Inspection:
        own = [[ref for prompt in prompts for ref in prompt.images]] * len(self.nodes)
        send_images(self.ask, self.media, self.nodes, own)
        return worst(self.all("inspect", prompts))

    def describe(self) -> Mapping[str, Any]:
        """Rank 0's description, and each rank's location."""
        places = [
            {"node": node.id, "shares_files": node.shares_files, **description["process"]}
            for node, description in zip(self.nodes, self.descriptions, strict=True)
        ]
        return {**self.descriptions[0], **self._facts, "ranks": places}

    def start_trace(self) -> None:
        self.ask(0, "start_trace")

    def stop_trace(self, path: Path | None) -> None:
        node = self.nodes[0]
        if path is None or node.shares_files:
            self.ask(0, "stop_trace", "" if path is None else str(path.absolute()))
            return
        folder = node.path("profile")
        try:
            self.ask(0, "stop_trace", f"{folder}/{path.name}")
            node.fetch(self.ask, folder, path.parent)
        finally:
            self.ask(node.leader, "remove_folder", folder)

    def span(self, name: str) -> AbstractContextManager[object]:
        """Ranks mark their verbs themselves."""
        return nullcontext()

    def memory_bytes_max(self) -> int:
        """The most that a rank has used; the last known value once the group has failed."""
        if not self.failed:
            self._memory_bytes_max = int(max(self.all("memory_bytes_max")))
        return self._memory_bytes_max

    def close(self) -> None:
        """End all ranks, busy or not, and remove the files that were put on their nodes."""
        folders = {node.id: node.folder for node in self.nodes if node.folder}
        self._ranks.close(folders, wait=not self.failed)

    @contextmanager
    def _owning(self, verb: str) -> Iterator[None]:
        self._leave()  # a signal may have kept the last owner from it
        try:
            with defer_signals():
                self._entered = [self.call(rank, "enter", verb) for rank in range(len(self.nodes))]
            self.answers(self._entered)
            yield
        except (KeyboardInterrupt, SystemExit):
            self.failed = True  # nobody waits for the ranks' answers now
            raise
        except Stopped:
            try:
                self._leave()
            except Exception:  # the same signal may have ended ranks
                self.failed = True
            raise
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._entered and not self.failed:
            self.answers(self._entered)
            with defer_signals():
                self._entered = ()
                futures = [self.call(rank, "leave") for rank in range(len(self.nodes))]
            self.answers(futures)
