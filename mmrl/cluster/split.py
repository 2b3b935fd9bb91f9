"""Ranks that sample and ranks that learn as one engine: two groups, and weights that travel between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from mmrl.cluster.failures import DeadRankError, cause_of, errors_of
from mmrl.cluster.files import send_images
from mmrl.cluster.group import RankGroup
from mmrl.cluster.ranks import Ranks
from mmrl.engine.transfer.order import Meeting, Order
from mmrl.engine_api import Engine, Learner, Sampler
from mmrl.errors import MMRLError, RankLostError, ResourceError, SamplersRestarted, plural
from mmrl.system.signals import defer_signals
from mmrl.types import EncodedPrompt, Inspection, worst

TAKE_S = 900.0
"""Seconds in which every rank that samples has to have new weights."""
CAUSE_S = 5.0
"""Seconds in which a lost rank may be told of, after weights have not arrived."""
LEAVE_S = 60.0
"""Seconds in which ranks that sample have to give up what they do, when others of them are started again."""
OF_SAMPLER = ("sampler", "sampler_arguments", "sleep_level", "sleep_backs_up_weights")
"""Entries of a description that a rank which samples knows."""


class SplitEngine(Engine):
    """Implements ``engine_api.Engine`` over ranks that learn and others that sample.

    Each side is a group, with worlds of torch.distributed that have none of the other's ranks. Published weights stay
    with learner rank 0. The ranks that sample order a version and get it in a group of their own with that rank, while
    the learner goes on.

    A lost rank that samples is started again, with those that share its copy of the weights; a lost rank that learns
    ends the run's attempt.

    Args:
        ranks: Those of both sides.
        meetings: For each rank that samples, the place where it orders weights.
        start_again: Starts some of the ranks that sample again, by their numbers among these; returns their new group.
        restarts: Most times that this may be done.
        progress: Called with what begins.
    """

    samples_apart = True

    def __init__(
        self,
        ranks: Ranks,
        learners: RankGroup,
        samplers: RankGroup,
        meetings: Sequence[Meeting],
        start_again: Callable[[RankGroup, Sequence[int]], RankGroup],
        *,
        restarts: int,
        progress: Callable[[str], object],
    ) -> None:
        self._ranks, self._learners, self._samplers = ranks, learners, samplers
        self._meetings, self._start_again, self._progress = meetings, start_again, progress
        self._restarts_left = restarts
        self._orders = self._generation = 0
        self._held: int | None = None  # the version that every rank which samples has
        self._memory_bytes_max = 0  # of the ranks that sample

    @property
    def precision(self) -> str:
        return self._learners.precision

    def publish(self) -> int:
        versions = self._learners.all("publish")
        assert len(set(versions)) == 1, f"the ranks that learn have different versions: {versions}"
        return int(versions[0])

    @contextmanager
    def sampling(self, version: int | None = None) -> Iterator[Sampler]:
        version = self.publish() if version is None else version
        with self._replacing():
            self._bring(version)
            with self._samplers.sampling() as sampler:
                yield sampler
            self._memory_bytes_max = self._samplers.memory_bytes_max()

    def learning(self) -> AbstractContextManager[Learner]:
        return self._learners.learning()

    def inspect(self, prompts: Sequence[EncodedPrompt]) -> Inspection:
        shown = [prompt for prompt in prompts if prompt.images]
        for group in (self._learners, self._samplers):
            own = [[ref for prompt in shown for ref in prompt.images]] * len(group.nodes)
            send_images(group.ask, group.media, group.nodes, own)
        version, learned = self.publish(), self._learners.all("look", shown)
        with self._replacing():
            self._bring(version)
            found = self._samplers.all("inspect_sampler", shown, learned)
        copies = [held for held, _ in found[:: self._samplers.ranks_together]]
        compared = self._learners.all("compare_weights", each=[copies, *([] for _ in self._learners.nodes[1:])])
        sights = [reports[i : i + len(shown)] for _, reports in found for i in range(0, len(reports), len(shown) or 1)]
        return worst([Inspection((), weights) for weights in compared[0]], sights)

    def describe(self) -> Mapping[str, Any]:
        """The description of learner rank 0 with what a sampler knows, and the location of each rank of both sides."""
        learners, samplers = self._learners.describe(), self._samplers.describe()
        places = [{**place, "side": "sampler"} for place in samplers["ranks"]]
        places += [{**place, "side": "learner"} for place in learners["ranks"]]
        return {**learners, **{name: samplers[name] for name in OF_SAMPLER}, "ranks": places}

    def abandon(self, error: MMRLError) -> bool:
        """As ``RankCalls.abandon``, of both sides: the error names the ranks of the side that is late."""
        sides = self._learners, self._samplers
        if late := [text for side in sides for text in side.late()]:
            error.where = "; ".join(filter(None, [error.where, f"no answer from {', '.join(late)}"]))
        for side in sides:
            side.give_up(error)
        return True

    def start_trace(self) -> None:
        self._learners.start_trace()
        self._samplers.start_trace()

    def stop_trace(self, path: Path | None) -> None:
        """As the protocol has it; what the first rank that samples does is beside it, in a file of its own."""
        self._learners.stop_trace(path)
        beside = None if path is None else path.with_name(f"sampler-{path.name}")
        self._samplers.stop_trace(beside)

    def span(self, name: str) -> AbstractContextManager[object]:
        return self._learners.span(name)

    def memory_bytes_max(self) -> int:
        """The most that a rank has used; of those that sample, up to the last time that they did."""
        return max(self._learners.memory_bytes_max(), self._memory_bytes_max)

    def close(self) -> None:
        self._restarts_left = 0  # a thread that still samples must not take the end for a loss
        nodes = [*self._learners.nodes, *self._samplers.nodes]
        folders = {node.id: node.folder for node in nodes if node.folder}
        self._ranks.close(folders, wait=not (self._learners.failed or self._samplers.failed))

    def _bring(self, version: int) -> None:
        """Let the ranks that sample have a version.

        Raises:
            RankLostError: A rank of either side is lost, or it is not known which one.
        """
        if (loss := self._samplers.loss()) is not None:  # it ended while it had nothing to do
            raise loss
        if self._held == version:
            return
        order = Order(self._orders, self._generation, version)
        self._orders += 1
        self._held = None
        with defer_signals():  # else some ranks would wait for the others
            calls = [self._samplers.call(rank, "take_weights", own, order) for rank, own in enumerate(self._meetings)]
        ended, _ = wait(calls, timeout=TAKE_S, return_when=FIRST_EXCEPTION)
        if len(ended) < len(calls) or any(call.exception() for call in calls):
            raise self._cause(version, calls)
        self._held = version

    def _cause(self, version: int, calls: Sequence[Future[None]]) -> BaseException:
        """The reason why weights have not arrived: the loss of a rank, an error of one, or ranks that hang.

        A rank that hangs holds the others up until their patience ends; then it is the one that has not answered.
        """
        self._samplers.failed = True
        sides = self._samplers, self._learners
        ended = {call for call in calls if call.done()}
        if ended:
            wait([side.abandoned for side in sides], timeout=CAUSE_S, return_when=FIRST_COMPLETED)
        errors = errors_of(calls)
        if loss := next((loss for side in sides if (loss := side.loss())), None):
            return loss
        if others := [error for error in errors if not isinstance(error, RankLostError)]:
            return cause_of(others)
        ranks = [rank for rank, call in enumerate(calls) if not call.done()]
        if not ranks:
            return errors[0]
        late = LateRanksError(
            f"{', '.join(self._samplers.names[rank] for rank in ranks)} did not take version {version} of the weights",
            where=", ".join(dict.fromkeys(self._samplers.nodes[rank].host for rank in ranks)),
            ranks=ranks,
        )
        self._samplers.give_up(late)
        return late

    @contextmanager
    def _replacing(self) -> Iterator[None]:
        """Start ranks that sample again if the block fails as some of them are lost; it is to be done again then.

        Raises:
            SamplersRestarted: All of them are there again.
            RankLostError: None of them is lost, they may not be started again, or they cannot be.
        """
        try:
            yield
        except RankLostError as error:
            # A call may tell of the loss before the node's guard does.
            loss = None if self._learners.loss() else self._samplers.loss(CAUSE_S)
            if not isinstance(loss, (DeadRankError, LateRanksError)) or not self._restarts_left:
                raise
            self._restarts_left -= 1
            try:
                self._replace(loss)
            except ResourceError as failure:
                raise error from failure
            what = f"{loss.what}; what shares its weights was started again, and samples anew"
            raise SamplersRestarted(what, where=loss.where) from error

    def _replace(self, loss: DeadRankError | LateRanksError) -> None:
        """Start lost ranks that sample again; returns when all of them are there.

        Raises:
            ResourceError: They cannot be.
        """
        lost = loss.ranks if isinstance(loss, LateRanksError) else [loss.rank]
        left = plural(self._restarts_left, "restart")
        self._progress(f"{loss.what}: what shares its weights starts again, and the learner goes on ({left} left)")
        self._held = None
        self._generation += 1
        self._samplers = self._start_again(self._samplers, self._with_others(lost))

    def _with_others(self, lost: Sequence[int]) -> list[int]:
        """Lost ranks with those that share their copies of the weights, and others that do not give up their work."""
        group = self._samplers
        together = group.ranks_together
        sets = {rank // together for rank in lost}
        asked = {
            rank: group.directly(rank, "leave") for rank in range(len(group.nodes)) if rank // together not in sets
        }
        done, _ = wait(asked.values(), timeout=LEAVE_S)
        sets |= {rank // together for rank, call in asked.items() if call not in done or call.exception()}
        return [rank for rank in range(len(group.nodes)) if rank // together in sets]


class LateRanksError(RankLostError):
    """Ranks that sample hang.

    Args:
        ranks: Their numbers among those.
    """

    def __init__(self, what: str, *, where: str, ranks: Sequence[int]) -> None:
        super().__init__(what, where=where, remedy="look at what these ranks do, and at the network between the sides")
        self.ranks = ranks
