"""Many ranks as one engine: the driver's side, which shares out work in whole groups and puts answers together."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mmrl.cluster.files import PART_BYTES, Node
from mmrl.cluster.guard import Process
from mmrl.cluster.worker import RankJob
from mmrl.data.images import MediaStore
from mmrl.engine_api import Learner, Sampler, SamplingRequest, UpdateResult
from mmrl.errors import MMRLError, RankLostError
from mmrl.ops.packing import Item, Unit, balance, shares_of, units_of
from mmrl.system.signals import Stopped, defer_signals
from mmrl.types import EncodedPrompt, FloatArray, Prompt, RolloutGroup, Sample, TrainingRow

AHEAD = 2
"""Groups that a sampler may finish before the driver has taken the last. More calls in the queue would only have to be
waited for when the driver gives up."""
CAUSE_S = 3.0
"""Seconds in which the cause of a failure may show itself: a rank that dies lets others fail first."""

_COLLECTIVE = re.compile("gloo|nccl|torch.distributed", re.IGNORECASE)
_PEER_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|connect\w* .*(fail|refused)|remote process exit", re.IGNORECASE
)
"""How Gloo, NCCL and torch's store say that another process of a collective is gone."""

Row = TypeVar("Row")


LOOK = (
    "look at what it wrote last (Ray's logs, usually /tmp/ray/session_latest/logs), and whether its node ran out of "
    "memory"
)
LESS_MEMORY = (
    "give the ranks of a node less to hold: "
    "learner.zero_stage: 3 shares weights and optimizer out, and without GPUs a lower learner.tokens_per_microbatch or "
    "sampler.engine.kv_cache_memory_bytes, or fewer ranks on a node"
)
"""What to do when the memory of a node, not that of its devices, ran out."""


class DeadRankError(RankLostError):
    """A rank's process is gone.

    Args:
        doing: The call that it did not answer; empty for none.
    """

    def __init__(self, rank: int, host: str, doing: str, reason: str, remedy: str = LOOK) -> None:
        where = f"while it did `{doing}`" if doing else "while it had nothing to do"
        super().__init__(f"rank {rank} is gone: {reason}", where=f"{host}, {where}", remedy=remedy)
        self.rank = rank


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is.

    Attributes:
        node: The cluster's id of the node.
        host: What people call it.
        address: By which other nodes reach it.
    """

    node: str
    host: str
    address: str
    process: Process


class Ranks(Protocol):
    """The processes of a group, one ``RankWorker`` each."""

    places: Sequence[Place]
    """Where each rank is."""

    def call(self, rank: int, method: str, *args: Any) -> Future[Any]:
        """A call of the rank's worker; calls to one rank run in order.

        The future raises what the worker raised: MMRLError, RankLostError, or RuntimeError with the rank's traceback.
        """
        ...

    def watch(self, lost: Callable[[int], None]) -> None:
        """Call ``lost`` with the rank, from another thread, soon after a rank's process has ended."""
        ...

    def last_words(self, rank: int) -> str:
        """What the node of a rank that is gone knows of the memory that ran out; empty if it knows of nothing."""
        ...

    def close(self, folders: Mapping[str, str], *, wait: bool) -> None:
        """End all processes, with time to end by themselves if ``wait``; remove a folder of each of these nodes."""
        ...


class RankGroup:
    """Implements ``engine_api.Engine`` over many ranks.

    Args:
        cost: What the samples of a prompt cost the learner, by which ranks are balanced.
        shares_prefix: Whether they share it.
        tensor_parallel_size: Neighbouring ranks that sample together.
        facts: What the driver knows better than the ranks, for the description.

    Attributes:
        nodes: Of each rank, the node that it is on.
        failed: Whether ranks may wait for each other for ever; they are then ended without more ado.
    """

    def __init__(
        self,
        ranks: Ranks,
        media: MediaStore,
        cost: Callable[[Unit, EncodedPrompt], float],
        *,
        tensor_parallel_size: int,
        shares_prefix: bool = True,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self._ranks, self._facts = ranks, facts or {}
        self.media, self.cost, self.tensor_parallel_size = media, cost, tensor_parallel_size
        self.shares_prefix = shares_prefix
        ids = [place.node for place in ranks.places]
        nodes = {place.node: Node(place.node, place.host, ids.index(place.node)) for place in ranks.places}
        self.nodes = [nodes[name] for name in ids]
        self._descriptions: list[Mapping[str, Any]] = []
        self.failed = False
        self._lock = threading.Lock()
        self._calls: dict[Future[Any], tuple[int, str]] = {}  # those in progress, in order
        self._abandoned: Future[Any] = Future()  # raises what the group is abandoned with
        self._entered: Sequence[Future[Any]] = ()  # of the owner that has not left
        self._memory_bytes_max = 0
        ranks.watch(self._lose)

    def start(self, jobs: Sequence[RankJob]) -> None:
        """Build the ranks' engines, together."""
        self.all("forget_shared_memory")
        self._descriptions = self.all("start", each=jobs)
        self.all("forget_shared_memory")

    @property
    def precision(self) -> str:
        return str(self._descriptions[0]["precision"])

    @contextmanager
    def sampling(self) -> Iterator[Sampler]:
        with self._owning("sampling"):
            yield GroupSampler(self)

    @contextmanager
    def learning(self) -> Iterator[Learner]:
        with self._owning("learning"):
            yield GroupLearner(self)

    def describe(self) -> Mapping[str, Any]:
        """Rank 0's description, and where each rank is."""
        places = [
            {"node": node.id, "shares_files": node.shares_files, **description["process"]}
            for node, description in zip(self.nodes, self._descriptions, strict=True)
        ]
        return {**self._descriptions[0], **self._facts, "ranks": places}

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
        """Also of a group that has failed: what was known last."""
        if not self.failed:
            self._memory_bytes_max = int(max(self.all("memory_bytes_max")))
        return self._memory_bytes_max

    def close(self) -> None:
        """End all ranks, whatever they are doing, and remove what was put on their nodes."""
        folders = {node.id: node.folder for node in self.nodes if node.folder}
        self._ranks.close(folders, wait=not self.failed)

    def abandon(self, error: MMRLError) -> bool:
        """Make every call in progress, and every later one, raise ``error``; the ranks go on with what they do.

        The error then also says which ranks have not answered.
        """
        waiting = [f"rank {rank} on {self.nodes[rank].host} (`{verb}`)" for rank, verb in self.waiting().items()]
        if waiting:
            error.where = "; ".join(filter(None, [error.where, f"no answer from {', '.join(waiting)}"]))
        self._give_up(error)
        return True

    def waiting(self) -> dict[int, str]:
        """Of each rank that has not answered yet, what it does."""
        with self._lock:
            calls = list(self._calls.values())
        first = {rank: verb_of(method) for rank, method in reversed(calls)}
        return dict(sorted(first.items()))

    def call(self, rank: int, method: str, *args: Any) -> Future[Any]:
        """As ``Ranks.call``; the future also raises what the group is abandoned with."""
        answer: Future[Any] = Future()

        def pass_on(done: Future[Any]) -> None:
            with self._lock:
                if self._calls.pop(answer, None) is None:  # abandoned
                    return
            if error := done.exception():
                answer.set_exception(error)
            else:
                answer.set_result(done.result())

        with defer_signals():
            with self._lock:
                if self._abandoned.done():
                    return self._abandoned
                self._calls[answer] = rank, method
            self._ranks.call(rank, method, *args).add_done_callback(pass_on)
        return answer

    def ask(self, rank: int, method: str, *args: Any) -> Any:
        """A rank's answer to a call in which it waits for no other: the group survives what it raises."""
        future = self.call(rank, method, *args)
        wait([future])
        if isinstance(future.exception(), RankLostError):
            self.check([future])
        return future.result()

    def all(self, method: str, *args: Any, each: Sequence[Any] | None = None) -> list[Any]:
        """Call all ranks at once; their answers by rank.

        Args:
            each: A further first argument for each rank.
        """
        own = [()] * len(self.nodes) if each is None else [(argument,) for argument in each]
        with defer_signals():  # else some ranks would wait for the others for ever
            futures = [self.call(rank, method, *first, *args) for rank, first in enumerate(own)]
        return self._answers(futures)

    def _answers(self, futures: Sequence[Future[Any]]) -> list[Any]:
        wait(futures, return_when=FIRST_EXCEPTION)
        self.check(futures)
        return [future.result() for future in futures]

    def check(self, futures: Iterable[Future[Any]]) -> None:
        """Raise if any has failed: of several errors the one that explains the others."""
        futures = list(futures)
        errors = _errors(futures)
        if not errors:
            return
        self.failed = True  # the other ranks may wait for this one for ever
        if not any(isinstance(error, RankLostError) for error in errors):
            wait(futures, timeout=CAUSE_S)
            if any(map(_loss, _errors(futures))):
                # All ranks may have answered, and one be gone: then the guard of its node will say so.
                wait([self._abandoned], timeout=CAUSE_S)
            errors += [error for error in _errors([*futures, self._abandoned]) if error not in errors]
        losses = [loss for error in errors if (loss := _loss(error))]
        lost = [error for error in errors if isinstance(error, RankLostError)] or losses
        ours = [error for error in errors if isinstance(error, MMRLError)]
        cause = (lost or ours or errors)[0]
        if isinstance(cause, DeadRankError) and (words := self._ranks.last_words(cause.rank)):
            cause.what, cause.remedy = f"{cause.what.partition('; ')[0]}; {words}", LESS_MEMORY
        raise cause

    def _lose(self, rank: int) -> None:
        """A rank has ended: whatever the others do is in vain, though they may not have noticed."""
        if not self._abandoned.done():
            host = self.nodes[rank].host
            self._give_up(DeadRankError(rank, host, self.waiting().get(rank, ""), "its process has ended"))

    def _give_up(self, error: MMRLError) -> None:
        with self._lock:
            self.failed = True
            if not self._abandoned.done():
                self._abandoned.set_exception(error)
            calls, self._calls = self._calls, {}
        for answer in calls:
            answer.set_exception(error)

    def send_images(self, samples: Sequence[Iterable[EncodedPrompt]]) -> None:
        """Bring the images of each rank's prompts to its node, each once, unless the node shares the driver's files."""
        for node, prompts in zip(self.nodes, samples, strict=True):
            if not node.shares_files:
                names = dict.fromkeys(ref.hash for prompt in prompts for ref in prompt.images)
                for files in self._parcels([name for name in names if name not in node.images]):
                    self.ask(node.leader, "receive_images", files)
                    node.images.update(files)

    def _parcels(self, names: Iterable[str]) -> Iterator[dict[str, bytes]]:
        """Stored images by hash, in parcels of about ``PART_BYTES``."""
        parcel: dict[str, bytes] = {}
        size = 0
        for name in names:
            parcel[name] = self.media.read_file(name)
            size += len(parcel[name])
            if size >= PART_BYTES:
                yield parcel
                parcel, size = {}, 0
        if parcel:
            yield parcel

    @contextmanager
    def _owning(self, verb: str) -> Iterator[None]:
        self._leave()  # a signal may have kept the last owner from it
        try:
            with defer_signals():
                self._entered = [self.call(rank, "enter", verb) for rank in range(len(self.nodes))]
            self._answers(self._entered)
            yield
        except (KeyboardInterrupt, SystemExit):
            self.failed = True  # nobody waits now for what the ranks are doing
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
            self._answers(self._entered)
            with defer_signals():
                self._entered = ()
                futures = [self.call(rank, "leave") for rank in range(len(self.nodes))]
            self._answers(futures)


@dataclass(frozen=True, slots=True)
class GroupSampler:
    """Implements ``engine_api.Sampler``: each set of tensor-parallel ranks samples its share of the requests."""

    group: RankGroup

    def generate(self, requests: Sequence[SamplingRequest]) -> Iterator[tuple[int, RolloutGroup]]:
        size = self.group.tensor_parallel_size
        shares = balance([_cost(request) for request in requests], len(self.group.nodes) // size)
        by_rank = [[requests[i] for i in share] for share in shares for _ in range(size)]
        self.group.send_images([[request.prompt for request in share] for share in by_rank])
        bare = [[replace(request, prompt=_bare(request.prompt)) for request in share] for share in by_rank]
        self.group.all("submit", each=bare)
        left = Counter({number: len(share) for number, share in enumerate(shares)})
        asked: dict[Future[Any], tuple[int, bool]] = {}

        def ask(number: int) -> None:
            """All ranks of the set run on, with the same requests in the same order; the first answers."""
            if left[number]:
                left[number] -= 1
                with defer_signals():
                    for member in range(size):
                        future = self.group.call(number * size + member, "advance", member == 0)
                        asked[future] = (number, member == 0)

        for number in list(left) * AHEAD:
            ask(number)
        while asked:
            done, _ = wait(asked, return_when=FIRST_COMPLETED)
            self.group.check(asked)
            for future in done:
                number, answers = asked.pop(future)
                if answers:
                    ask(number)
                    position, found = future.result()
                    index = shares[number][position]
                    prompt = requests[index].prompt
                    yield index, RolloutGroup(prompt, tuple(replace(r, prompt=prompt) for r in found.rollouts))


@dataclass(frozen=True, slots=True)
class GroupLearner:
    """Implements ``engine_api.Learner``: samples that share a prompt stay on one rank, costs are balanced."""

    group: RankGroup

    def logprobs(self, samples: Sequence[Sample], *, packed: bool = True) -> list[FloatArray]:
        shares = self._share(samples)
        return _merged(shares, self._all("logprobs", shares, samples, _bare_sample, packed))

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        shares = self._share(samples)
        return _merged(shares, self._all("reference_logprobs", shares, samples, _bare_sample))

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        shares = self._share([row.sample for row in rows])
        results: list[UpdateResult] = self._all("update", shares, rows, _bare_row)
        logprobs, entropies = ([getattr(each, name) for each in results] for name in ("logprobs", "entropies"))
        peaks = [each.memory_bytes for each in results if each.memory_bytes is not None]
        return replace(
            results[0],
            logprobs=_merged(shares, logprobs),
            entropies=_merged(shares, entropies),
            flops=sum(each.flops for each in results),
            memory_bytes=max(peaks, default=None),
        )

    def save(self, folder: Path) -> None:
        node, target = self.group.nodes[0], str(folder.absolute())
        place = target if node.shares_files else node.path("saved")
        failures: list[MMRLError | None] = self.group.all("save", place)
        try:
            if failure := next(filter(None, failures), None):
                raise failure
            if not node.shares_files:
                node.fetch(self.group.ask, place, Path(target))
        finally:
            if not node.shares_files and not self.group.failed:
                self.group.ask(node.leader, "remove_folder", place)

    def _share(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Indices of each rank's samples."""

        def cost(unit: Unit) -> float:
            return self.group.cost(unit, samples[unit.indices[0]].prompt)

        units = units_of([Item.of(sample) for sample in samples], share=self.group.shares_prefix)
        return [[i for unit in share for i in unit.indices] for share in shares_of(units, len(self.group.nodes), cost)]

    def _all(
        self, method: str, shares: Sequence[Sequence[int]], rows: Sequence[Row], bare: Callable[[Row], Row], *args: Any
    ) -> list[Any]:
        bare_rows = [[bare(rows[index]) for index in share] for share in shares]
        self.group.send_images([[_sample_of(row).prompt for row in share] for share in bare_rows])
        return self.group.all(method, *args, each=bare_rows)


def verb_of(method: str) -> str:
    """The learner's or sampler's verb for a call of a worker."""
    return {"submit": "generate", "advance": "generate"}.get(method, method)


def _cost(request: SamplingRequest) -> int:
    return len(request.prompt.token_ids) + request.num_samples * request.max_new_tokens


def _bare(prompt: EncodedPrompt) -> EncodedPrompt:
    """What a rank needs of a prompt; the dataset's columns may be large."""
    return replace(prompt, prompt=Prompt(prompt.id, ()))


def _bare_sample(sample: Sample) -> Sample:
    return Sample(_bare(sample.prompt), sample.segments)


def _bare_row(row: TrainingRow) -> TrainingRow:
    return replace(row, sample=_bare_sample(row.sample))


def _sample_of(row: Any) -> Sample:
    sample: Sample = row.sample if isinstance(row, TrainingRow) else row
    return sample


def _merged(shares: Sequence[Sequence[int]], answers: Sequence[Sequence[FloatArray]]) -> list[FloatArray]:
    """Answers of all ranks in the order of the samples."""
    by_index = {
        index: value
        for share, values in zip(shares, answers, strict=True)
        for index, value in zip(share, values, strict=True)
    }
    return [by_index[index] for index in range(len(by_index))]


def _loss(error: BaseException) -> RankLostError | None:
    """The loss that an error of a rank's, told with its traceback, is a consequence of."""
    text = str(error)
    if isinstance(error, MMRLError) or not (_COLLECTIVE.search(text) and _PEER_GONE.search(text)):
        return None
    loss = RankLostError("a rank has lost another one", where=text.strip().splitlines()[-1][:300], remedy=LOOK)
    loss.__cause__ = error
    return loss


def _errors(futures: Iterable[Future[Any]]) -> list[BaseException]:
    return [error for future in futures if future.done() and (error := future.exception())]
