"""One rank in a process of its own, driven from another; how calls reach it is not its concern."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mmrl.cluster.jobs import Installation, RankJob, Rendezvous
from mmrl.cluster.nodes import PACKAGES, fingerprints, holds, installed_versions
from mmrl.cluster.process import forget_shared_memory, host_meeting, prepare_process
from mmrl.cluster.shipping import PackedArrays, PackedCuts, PackedGroup
from mmrl.config.load import from_mapping
from mmrl.config.plugin_specs import Kind
from mmrl.data.images import MediaStore
from mmrl.engine import device
from mmrl.engine.machine.interfaces import tell_interface
from mmrl.engine.machine.preconditions import check_process
from mmrl.engine.transfer.order import Meeting, Order
from mmrl.engine_api import Cut, Learner, NetworkFiles, Polled, Sampler, SamplingRequest, UpdateResult, Way
from mmrl.errors import DeviceBusyError, DeviceMemoryError, MMRLError, NumericsError, PluginError, ResourceError
from mmrl.plugin_host import registry
from mmrl.system import failpoints
from mmrl.system.machine_memory import total_bytes
from mmrl.types import EncodedPrompt, FloatArray, ImageReport, Inspection, Sample, TrainingRow, WeightReport

if TYPE_CHECKING:
    from mmrl.engine.aids.inspection import HeldWeights
    from mmrl.engine.network.eye import Sight
    from mmrl.engine.rank import RankEngine
    from mmrl.engine.transfer.receiving import WeightsReceiver


class RankWorker:
    """Builds and drives one ``RankEngine``; every call is one of the driver's."""

    def __init__(self) -> None:
        self._kind = prepare_process()
        self._engine: RankEngine
        self._media: MediaStore
        self._verb = ExitStack()
        self._owner: Any = None
        self._port = socket.socket()
        self._meeting: Any = None
        self._receiver: WeightsReceiver | None = None

    def installation(self, plugins: Sequence[tuple[Kind, str]]) -> Installation:
        """Versions of what runs here, and of the plugins."""
        return Installation(installed_versions(PACKAGES), {plugin: _plugin_version(*plugin) for plugin in plugins})

    def device_memory(self) -> int | None:
        """Bytes of this rank's GPU; None without one."""
        return device.total_memory_bytes(self._kind)

    def machine_memory(self) -> int:
        """Bytes of this node's memory."""
        return total_bytes()

    def check_gpu(self) -> None:
        """Raises ResourceError if this rank has a GPU, and torch cannot use it."""
        device.check_gpu(self._kind)

    def check_process(self, config: Mapping[str, Any], samples: bool, least_bytes: int) -> None:
        """See ``preconditions.check_process``."""
        check_process(self._kind, from_mapping(config), samples=samples, least_bytes=least_bytes)

    def cores(self) -> int:
        """Cores of this node that this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def reserve_port(self, host: str) -> int:
        """A port that is kept free until the ranks meet there."""
        self._port = socket.socket()
        self._port.bind((host, 0))
        return int(self._port.getsockname()[1])

    def holds(self, path: str, content: bytes) -> bool:
        return holds(path, content)

    def fingerprints(self, folder: str, names: Sequence[str]) -> list[str]:
        return fingerprints(folder, names)

    def make_folder(self) -> str:
        """A temporary folder on this node."""
        return tempfile.mkdtemp(prefix="mmrl-node-")

    def write_part(self, path: str, offset: int, data: bytes) -> None:
        """Write a part of a file; parts come in order."""
        file = Path(path)
        with _of_this_node(path):
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("r+b" if offset else "wb") as stream:
                stream.seek(offset)
                stream.write(data)

    def read_part(self, path: str, offset: int, size: int) -> bytes:
        with _of_this_node(path), Path(path).open("rb") as stream:
            stream.seek(offset)
            return stream.read(size)

    def files(self, folder: str) -> list[str]:
        """Relative paths of all files in a folder."""
        return sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*") if p.is_file())

    def remove_folder(self, path: str) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def fetch_model(self, name: str, commit: str, trust_remote_code: bool) -> str:
        """The folder on this node of a hub's model."""
        from mmrl.engine.network.folder import ModelFolder

        return ModelFolder.open(name, commit, trust_remote_code=trust_remote_code).fetched().path

    def start(self, job: RankJob) -> Mapping[str, Any]:
        """Build the engine, together with the other ranks; returns its description."""
        from mmrl.engine.network.folder import ModelFolder
        from mmrl.engine.network.teacher import reopened
        from mmrl.engine.rank import RankEngine
        from mmrl.engine.spec import EngineSpec

        config = from_mapping(job.config)
        # The process was prepared before there was a config.
        os.environ.update(device.variables(self._kind, config.sampler.pipeline_parallel_size))
        self._take(job.rendezvous)
        trusted = config.model.trust_remote_code
        folder = ModelFolder.open(job.model, trust_remote_code=trusted, template=job.template)
        initial = ModelFolder.open(job.initial, trust_remote_code=trusted) if job.initial else None
        self._media = MediaStore(Path(job.media), job.grid)
        algorithm = registry.create("algorithm", config.algorithm) if job.with_learner else None
        if job.rendezvous.rank == 0:
            self._meeting = host_meeting(self._port)
        checkpoint = Path(job.checkpoint) if job.checkpoint else None
        args = config, folder, self._media, algorithm, job.max_images, job.with_sampler, checkpoint
        teachers = tuple(reopened(path, folder) for path in job.teachers)
        critic = reopened(job.critic, folder, "critic") if job.critic else None
        spec = EngineSpec(*args, trains=job.trains, initial=initial, teachers=teachers, critic=critic)
        self._engine = RankEngine(spec, self._kind)
        process = {"host": socket.gethostname(), "pid": os.getpid()}
        return {**self._engine.describe(), "process": process}

    def _take(self, own: Rendezvous) -> None:
        import torch

        if self._kind == "cuda" and torch.cuda.device_count() != 1:  # all ranks would take the first
            raise ResourceError(
                f"rank {own.rank} sees {torch.cuda.device_count()} GPUs instead of its own",
                where="CUDA_VISIBLE_DEVICES of the rank's process",
                remedy="unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES on all nodes, and start Ray again",
            )
        os.environ.update(
            device.rank_variables(
                self._kind,
                rank=own.rank,
                node_rank=own.node_rank,
                world_size=own.world_size,
                address=own.address,
                port=own.port,
            )
        )
        tell_interface(own.own_address)
        if own.threads:  # Ray has set one
            torch.set_num_threads(own.threads)

    def forget_shared_memory(self) -> None:
        """Remove names on this node that a later run stumbles over; called before and after the ranks start."""
        forget_shared_memory()

    def receive_images(self, files: Mapping[str, bytes]) -> None:
        """Take over images that this node cannot see otherwise, by hash."""
        for name, data in files.items():
            self._media.write_file(name, data)

    def publish(self) -> int:
        """The version of the newest weights; ranks that sample apart can have it from now on."""
        return self._engine.publish()

    def host_weights(self, address: str, size: int) -> int:
        """The port at which so many ranks that sample apart get published weights, of this address of this node."""
        bound = socket.create_server((address, 0))
        port = int(bound.getsockname()[1])
        self._engine.serve_weights(host_meeting(bound), address, port, size)
        return port

    def take_weights(self, meeting: Meeting, order: Order) -> None:
        """Get a version of the weights from a learner elsewhere."""
        from mmrl.engine.transfer.receiving import WeightsReceiver

        if self._receiver is None:
            self._receiver = WeightsReceiver(self._kind, meeting)
        with self._engine.span("sync"):
            self._engine.take_weights(self._receiver, order)

    def enter(self, verb: Literal["sampling", "learning"]) -> None:
        """Give the device to the sampler, with the newest weights, or to the learner."""
        with self._engine.span("sync") if verb == "sampling" else nullcontext():
            self._owner = self._verb.enter_context(getattr(self._engine, verb)())

    def leave(self) -> None:
        """Hand the device back; requests that are left are dropped."""
        self._owner = None
        self._verb.close()

    def submit(self, requests: Sequence[SamplingRequest]) -> None:
        """Begin to sample; ``advance`` runs it. Tickets count from 0, in the order of all requests since ``enter``."""
        sampler: Sampler = self._owner
        sampler.submit(requests)

    def answer(self, ticket: int, requests: Sequence[SamplingRequest]) -> None:
        """Go on with an episode by one request, or end it by none."""
        sampler: Sampler = self._owner
        sampler.answer(ticket, next(iter(requests), None))

    def advance(self, answer: bool) -> Polled | None:
        """Run until requests are finished or an answer is missing; without ``answer`` a peer tells the driver."""
        failpoints.reach("rank.advance")
        sampler: Sampler = self._owner
        with self._engine.span("generate"):
            try:
                news = sampler.poll()
            except BaseException:
                sampler.drop()  # the next call is in the queue already
                raise
        if not answer:
            return None
        packed = (replace(each, group=PackedGroup(each.group.prompt, each.group.rollouts)) for each in news.finished)
        return replace(news, finished=tuple(packed))

    def stop_after(self, engine_steps: int, groups: int) -> None:
        """See ``Sampler.stop_after``; a later ``advance`` that comes after the stop makes no step."""
        sampler: Sampler = self._owner
        sampler.stop_after(engine_steps, groups)

    def cut(self, answer: bool) -> list[Cut] | None:
        """See ``Sampler.cut``; without ``answer`` a peer tells the driver."""
        sampler: Sampler = self._owner
        cuts = sampler.cut()
        return PackedCuts(cuts) if answer else None

    def drop(self) -> None:
        """Give up all requests."""
        sampler: Sampler = self._owner
        sampler.drop()

    def forget_prompts(self) -> None:
        """Drop what finished requests have left in the sampler's caches."""
        sampler: Sampler = self._owner
        sampler.forget_prompts()

    def score_sampled(self, samples: Sequence[Sample], temperature: float) -> list[list[FloatArray]]:
        """This rank's sampler's log-probs of tokens, as ``Sampler.score`` answers."""
        sampler: Sampler = self._owner
        with self._engine.span("generate"):
            return [PackedArrays(values) for values in sampler.score(samples, temperature)]

    def score(self, samples: Sequence[Sample], role: str, way: Way) -> list[FloatArray]:
        learner: Learner = self._owner
        with self._engine.span("logprob"):
            return PackedArrays(learner.network(role).score(samples, way=way))

    def final_values(self, samples: Sequence[Sample], role: str) -> FloatArray:
        learner: Learner = self._owner
        with self._engine.span("logprob"):
            return learner.network(role).final_values(samples)

    def update(self, rows: Sequence[TrainingRow], role: str) -> UpdateResult:
        learner: Learner = self._owner
        with self._engine.span("update"):
            result = learner.network(role).update(rows)
        return replace(
            result,
            logprobs=PackedArrays(result.logprobs),
            entropies=PackedArrays(result.entropies),
            vpreds=PackedArrays(result.vpreds),
        )

    def reset_reference(self) -> None:
        learner: Learner = self._owner
        learner.reset_reference()

    def inspect(self, prompts: Sequence[EncodedPrompt]) -> Inspection:
        return self._engine.inspect(prompts)

    def inspect_sampler(
        self, prompts: Sequence[EncodedPrompt], learned: Sequence[Sequence[Sight]]
    ) -> tuple[HeldWeights, list[ImageReport]]:
        return self._engine.inspect_sampler(prompts, learned)

    def look(self, prompts: Sequence[EncodedPrompt]) -> list[Sight]:
        return self._engine.look(prompts)

    def compare_weights(self, copies: Sequence[HeldWeights]) -> list[WeightReport]:
        return self._engine.compare_weights(copies)

    def save(self, folder: str) -> Mapping[str, NetworkFiles] | MMRLError:
        """Save; an error is returned and not raised, so that all ranks answer and none waits for another."""
        learner: Learner = self._owner
        try:
            return learner.save(Path(folder))
        except (DeviceBusyError, DeviceMemoryError):  # the others wait for this rank
            raise
        except (ResourceError, NumericsError) as error:
            return error

    def start_trace(self) -> None:
        self._engine.start_trace()

    def stop_trace(self, path: str) -> None:
        """An empty path drops the trace."""
        with _of_this_node(path):
            self._engine.stop_trace(Path(path) if path else None)

    def memory_bytes_max(self) -> int:
        return self._engine.memory_bytes_max()


@contextmanager
def _of_this_node(path: str) -> Iterator[None]:
    """Turns an error of the file system into a ResourceError that names the node."""
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"node {socket.gethostname()} cannot read or write a file: {error.strerror or error}",
            where=path,
            remedy="make room in its temporary folder, or set TMPDIR there to another",
        ) from error


def _plugin_version(kind: Kind, name: str) -> str:
    try:
        info = registry.locate(kind, name)
    except PluginError as error:
        return error.what
    return f"{info.distribution} {info.version}"
