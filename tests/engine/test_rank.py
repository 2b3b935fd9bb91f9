"""The order in which a rank builds its engines and hands the device over, on a device that only writes down."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmrl.engine.device import DeviceKind
from mmrl.engine.learner import deepspeed_engine, frozen, trained_models
from mmrl.engine.learner.learner import DeepSpeedLearner
from mmrl.engine.network import policy
from mmrl.engine.network.features import Limit
from mmrl.engine.network.policy import Policy, load_policy
from mmrl.engine.rank import RankEngine
from mmrl.engine.sampler import sleep_backend, vllm_exit
from mmrl.engine.spec import EngineSpec
from mmrl.engine_api import SamplingRequest
from mmrl.errors import ConfigError, DeviceMemoryError
from mmrl.runs.setup import RunSetup
from mmrl_algorithms.grpo import GRPO

SYNC = ["reload", "reset encoder cache", "reset prefix cache"]
SAMPLE = ["request", "step"]


class FakeLLM:
    """vLLM's ``LLM`` as far as a sampler uses it: what sleeps cannot be used.

    Args:
        log: Where each call is written down.
    """

    def __init__(self, log: list[str], **arguments: Any) -> None:
        self.log, self.arguments = log, arguments
        self.asleep: set[str] = set()
        self.requests: list[str] = []
        self.fails: Exception | None = None
        self.llm_engine = self
        log.append("vLLM is built")

    def sleep(self, level: int) -> None:
        self.asleep = {"weights", "kv_cache"}
        self.requests.clear()
        self.log.append(f"sleep {level}")

    def is_sleeping(self) -> bool:
        return bool(self.asleep)

    def wake_up(self, tags: list[str]) -> None:
        assert self.asleep >= {*tags}
        self.asleep -= {*tags}
        self.log.append(f"wake {', '.join(tags)}")

    def collective_rpc(
        self, method: str | Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        if not isinstance(method, str):  # as a vLLM without other ways to sleep
            config = SimpleNamespace(
                model_config=SimpleNamespace(quantization=None), speculative_config=None, lora_config=None
            )
            return [method(SimpleNamespace(vllm_config=config), *args)]
        assert method == "reload_weights" and "weights" not in self.asleep
        if self.fails:
            raise self.fails
        self.received = {name: weight.dtype for name, weight in (kwargs or {})["weights_iterator"]}
        self.log.append("reload")
        return [None]

    def reset_encoder_cache(self) -> None:
        self.log.append("reset encoder cache")

    def reset_prefix_cache(self) -> bool:
        self.log.append("reset prefix cache")
        return not self.requests

    def add_request(self, request_id: str, prompt: dict[str, Any], params: Any) -> None:
        assert not self.asleep
        self.requests.append(request_id)
        self.log.append("request")

    def step(self) -> list[Any]:
        from vllm.logprobs import FlatLogprobs

        assert not self.asleep
        self.log.append("step")
        logprobs = FlatLogprobs(start_indices=[0], end_indices=[1], token_ids=[7], logprobs=[-1.0])
        choice = SimpleNamespace(token_ids=[7], logprobs=logprobs, index=0, finish_reason="stop", routed_experts=None)
        prompt = self.prompt.token_ids.tolist()
        return [
            SimpleNamespace(finished=True, request_id=self.requests.pop(), prompt_token_ids=prompt, outputs=[choice])
        ]

    def abort_request(self, request_ids: list[str]) -> None:
        self.requests = [name for name in self.requests if name not in request_ids]


class Recording:
    """Builds engines for a device; ``log`` holds what was asked of it, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bench: Any) -> None:
        import deepspeed
        import vllm

        self.log: list[str] = []
        self.version = 0
        self._bench, self._patch = bench, monkeypatch.setattr
        self._patch(vllm, "LLM", self._llm)
        self._patch(deepspeed, "init_distributed", lambda **_: None)
        self._patch(deepspeed, "initialize", self._deepspeed)
        self._patch(trained_models, "load_policy", self._read)
        self._patch(frozen, "load_policy", self._read)
        self._patch(trained_models, "place", lambda policy, settings, device: self.log.append(f"a policy on {device}"))
        self._patch(frozen, "place_frozen", self._frozen)
        self._patch(DeepSpeedLearner, "weight_version", property(lambda _: self.version))
        self._patch(vllm_exit, "_leave_groups", lambda: self.log.append("the groups are left"))
        self._patch(torch.cuda, "empty_cache", lambda: self.log.append("free the cache"))
        self._patch(torch.cuda, "get_device_name", lambda: "a fake")
        self._patch(torch.cuda, "mem_get_info", lambda: (3, 10))
        self._patch(torch.distributed, "is_initialized", lambda: False)
        self._patch(torch.distributed, "get_rank", lambda: 0)
        self._patch(torch.distributed, "get_world_size", lambda: 1)
        self._patch(torch.distributed, "all_gather_object", lambda found, own: found.__setitem__(0, own))
        self._patch(torch.distributed, "init_process_group", self._group)

    def engine(
        self,
        kind: DeviceKind,
        *,
        trains: bool = True,
        kl: float = 0.0,
        progress: Callable[[str], object] = lambda text: None,
        **sections: Any,
    ) -> RankEngine:
        bench = self._bench
        config = bench.config(**{"model": {"dtype": "auto"}} | sections)
        algorithm = GRPO(GRPO.Config.model_validate({"kl": {"coef": kl}})) if trains else None
        spec = EngineSpec(config, bench.folder, bench.media, algorithm, 2, with_sampler=True)
        return RankEngine(spec, kind, progress)

    def sample(self, engine: RankEngine) -> None:
        """One rollout."""
        self.llm.prompt = prompt = self._bench.prompts[0]
        with engine.sampling() as sampler:
            groups = dict(sampler.generate([SamplingRequest(prompt, 1, 1.0, 4, 0)]))
            assert groups[0].rollouts[0].token_ids.tolist() == [7]

    def since(self) -> list[str]:
        """The log, which begins anew."""
        log, self.log[:] = [*self.log], []
        return log

    def _llm(self, **arguments: Any) -> FakeLLM:
        self.llm = FakeLLM(self.log, **arguments)
        return self.llm

    def _deepspeed(self, *, model: Policy, model_parameters: Any, config: dict[str, Any]) -> tuple[Any, None]:
        assert {p.dtype for p in model_parameters} == {next(model.parameters()).dtype}
        self.deepspeed_config = config
        self.log.append("DeepSpeed is built")
        engine = SimpleNamespace(device=torch.device("cpu"), compile=lambda: self.log.append("DeepSpeed compiles"))
        return engine, None

    def _read(self, *arguments: Any, **options: Any) -> Policy:
        self.log.append("a model is read")
        return load_policy(*arguments, **options)

    def _frozen(self, policy: Policy, settings: Any, kind: str) -> tuple[Policy, Any]:
        self.log.append(f"a reference on {kind}")
        return policy, nullcontext

    def _group(self, backend: str, timeout: timedelta) -> None:
        self._patch(torch.distributed, "get_backend", lambda: backend)
        self.log.append(f"{backend} group")


@pytest.mark.parametrize("name", [name for name in vars(FakeLLM) if not name.startswith("_")])
def test_the_fake_has_what_vllm_has(name):
    import vllm
    from vllm.v1.engine.llm_engine import LLMEngine

    real = getattr(vllm.LLM, name, None) or getattr(LLMEngine, name)
    assert inspect.signature(getattr(FakeLLM, name)).parameters.keys() <= inspect.signature(real).parameters.keys()


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch, vision: Any) -> Recording:
    return Recording(monkeypatch, vision)


def test_vllm_is_built_first_and_sleeps_while_the_learner_is_built(recording):
    recording.engine("cuda")
    built = ["nccl group", "vLLM is built", "sleep 1", "a model is read", "a policy on cuda:0"]
    assert recording.since() == [*built, "DeepSpeed is built"]


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_vllm_has_room_for_an_episode_and_counts_its_steps(recording, vision, kind, tmp_path):
    """With the spec that a run's setup makes of its config and its prompts of 2 images at most."""
    limits = {"max_turns": 3, "max_observation_tokens": 10, "max_images": 4}
    found = {}
    cases = {"single": {}, "episode": {"environment": {"name": "game", **limits}}}
    for name, sections in {**cases, "partial": {"sampler": {"partial": {"engine_steps": 16}}}}.items():
        setup = RunSetup(vision.config(model={"dtype": "auto"}, **sections), tmp_path)
        setup.folder, setup.media, setup.algorithm = vision.folder, vision.media, GRPO(GRPO.Config())
        setup.prompts, setup.evaluations = SimpleNamespace(max_images=2), {}
        RankEngine(replace(setup.engine_spec(setup.algorithm), algorithm=None), kind)
        found[name] = recording.llm.arguments
    single, episode = found["single"], found["episode"]
    # Prompts of 256 tokens with 2 images at most, 24 tokens of the policy, and what the environment may answer.
    assert (single["max_model_len"], episode["max_model_len"]) == (256 + 24, 256 + 24 + 3 * 10)
    assert [each["limit_mm_per_prompt"]["image"] for each in (single, episode)] == [2, 2 + 4]
    assert episode["async_scheduling"] is False and "async_scheduling" not in single
    assert found["partial"]["async_scheduling"] is False and found["partial"]["max_model_len"] == 256 + 24


def test_what_a_family_does_not_have_on_a_device_is_refused_before_anything_is_built(recording, vision):
    limits = {"vllm": Limit("refused", "not built for it", "cpu")}
    folder = replace(vision.folder, family=replace(vision.folder.family, limits=limits))
    recording._bench = replace(vision, folder=folder)
    with pytest.raises(ConfigError, match=r"have no sampler `vllm`: not built for it"):
        recording.engine("cpu")
    assert recording.since() == []
    recording.engine("cuda")


def test_a_model_is_where_it_belongs_before_the_next_one_is_read(recording):
    recording.engine("cuda", kl=0.1)
    placed = ["a model is read", "a policy on cuda:0", "a model is read", "a reference on cuda"]
    assert recording.since()[3:] == [*placed, "DeepSpeed is built"]


def test_weights_wake_before_the_sync_and_the_cache_after_it(recording):
    engine = recording.engine("cuda")
    recording.since()
    recording.sample(engine)
    assert recording.since() == ["free the cache", "wake weights", *SYNC, "wake kv_cache", *SAMPLE, "sleep 1"]
    with engine.learning() as learner:
        assert recording.llm.asleep == {"weights", "kv_cache"} and recording.since() == []
        names = dict(learner.policy.model.named_parameters(remove_duplicate=False))
    assert recording.llm.received == dict.fromkeys(names, torch.bfloat16) and "lm_head.weight" in names


def test_the_first_bucket_is_gathered_before_the_sampler_wakes_and_dropped_when_it_fails(recording, monkeypatch):
    """NCCL then transfers while the sampler's memory is mapped; here the bucket holds the whole model."""

    @contextmanager
    def gathered(*parameters: torch.nn.Parameter) -> Iterator[None]:
        recording.log.append("gather")
        try:
            yield
        finally:
            recording.log.append("drop")

    monkeypatch.setattr(policy, "gathered", gathered)
    engine = recording.engine("cuda")
    recording.since()
    recording.sample(engine)
    overlapped = ["free the cache", "gather", "wake weights", "drop", *SYNC, "wake kv_cache"]
    assert recording.since()[:-3] == overlapped
    recording.sample(engine)
    assert recording.since()[:3] == ["free the cache", "wake weights", "wake kv_cache"]
    recording.version, recording.llm.fails = 1, RuntimeError("no memory for a sync")
    with pytest.raises(RuntimeError, match="no memory"), engine.sampling():
        pytest.fail("the weights are stale")
    assert recording.since() == ["free the cache", "gather", "wake weights", "drop", "sleep 1"]


def test_only_new_weights_are_sent(recording):
    engine = recording.engine("cuda")
    recording.sample(engine)
    recording.since()
    recording.sample(engine)
    assert recording.since() == ["free the cache", "wake weights", "wake kv_cache", *SAMPLE, "sleep 1"]
    recording.version = 1
    recording.sample(engine)
    assert recording.since()[2:5] == SYNC


def test_what_drops_its_weights_is_sent_them_each_time_it_wakes(recording, monkeypatch):
    discarding = SimpleNamespace(check=lambda: recording.log.append("all came"), drops=True)
    monkeypatch.setattr(sleep_backend, "install", lambda rpc: discarding)
    said = list[str]()
    engine = recording.engine("cuda", progress=said.append)
    assert recording.since()[2] == "sleep 1" and not any("copy of its weights" in line for line in said)
    assert not engine.describe()["sleep_backs_up_weights"]
    sync = ["reload", "all came", *SYNC[1:]]
    for _ in range(2):  # the version stays 0: an evaluation before training, and one with no update in between
        recording.sample(engine)
        assert recording.since() == ["free the cache", "wake weights", *sync, "wake kv_cache", *SAMPLE, "sleep 1"]
    recording.llm.fails = RuntimeError("no memory for a sync")
    with pytest.raises(RuntimeError, match="no memory"), engine.sampling():
        pytest.fail("there are no weights")
    recording.llm.fails = None
    recording.since()
    recording.sample(engine)
    assert recording.since()[1:6] == ["wake weights", *sync]


def test_a_vllm_without_other_ways_to_sleep_backs_up_its_weights_and_this_is_told(recording):
    said = list[str]()
    engine = recording.engine("cuda", progress=said.append)
    assert any("copy of its weights" in line for line in said)
    assert engine.describe()["sleep_backs_up_weights"]
    said.clear()
    assert not recording.engine("cpu", progress=said.append).describe()["sleep_backs_up_weights"]
    assert not any("copy of its weights" in line for line in said)


def test_the_learner_keeps_the_threads_that_vllm_takes_for_itself(recording, monkeypatch):
    """vLLM's own function, which its worker calls on a GPU once the model is loaded; torch's setting is a fake."""
    import vllm
    from vllm.utils.torch_utils import set_torch_threads_for_runtime

    threads = SimpleNamespace(number=6, before=None)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads.number)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: setattr(threads, "number", number))
    build = recording._llm

    def take(**arguments: Any) -> FakeLLM:
        set_torch_threads_for_runtime()
        threads.before = threads.number
        return build(**arguments)

    monkeypatch.setattr(vllm, "LLM", take)
    recording.engine("cuda")
    assert (threads.before, threads.number) == (1, 6)


def test_what_is_drawn_while_sampling_does_not_move_the_generator_of_checkpoints(recording):
    engine, before = recording.engine("cuda"), torch.get_rng_state()
    with engine.sampling():
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_error_hands_the_device_back(recording):
    engine = recording.engine("cuda")
    recording.sample(engine)
    recording.since()
    with pytest.raises(KeyError), engine.sampling():
        raise KeyError
    assert recording.since()[-2:] == ["wake kv_cache", "sleep 1"]
    recording.version, recording.llm.fails = 1, RuntimeError("no memory for a sync")
    with pytest.raises(RuntimeError, match="no memory"), engine.sampling():
        pytest.fail("the weights are stale")
    assert recording.since()[-2:] == ["wake weights", "sleep 1"]
    recording.llm.fails = None
    with engine.learning():
        assert recording.llm.asleep == {"weights", "kv_cache"}
    recording.sample(engine)
    assert recording.since()[2:5] == SYNC


PHASES = {
    "the sampler's sleep": "sleep",
    "the sampler's wake-up": "wake_up",
    "the weight sync": "collective_rpc",
    "sampling": "step",
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_device_that_is_full_names_the_phase_and_what_to_set(recording, phase, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:62\nmore")

    engine = recording.engine("cuda")
    monkeypatch.setattr(recording.llm, PHASES[phase], fail)
    with pytest.raises(DeviceMemoryError, match=f"^out of memory in {phase}: CUDA Error: .*:62\n  where") as caught:
        recording.sample(engine)
    assert caught.value.exit_code == 5 and not caught.value.microbatches_help
    assert ("gpu_memory_utilization" in caught.value.remedy) == (phase != "the sampler's sleep")


@pytest.mark.parametrize("part", ["sampler", "learner", "sleep"])
def test_a_device_that_is_full_at_the_start_names_the_part(recording, part, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    place = {"sampler": (recording, "_llm"), "learner": (trained_models, "place"), "sleep": (FakeLLM, "sleep")}[part]
    monkeypatch.setattr(*place, fail)
    monkeypatch.setattr("vllm.LLM", recording._llm)
    phase = "the sampler's sleep" if part == "sleep" else f"the start of the {part}"
    with pytest.raises(DeviceMemoryError, match=f"^out of memory in {phase}: CUDA out of memory"):
        recording.engine("cuda")


def test_a_vllm_that_sleeps_is_left_asleep_at_the_end_and_after_a_start_that_fails(recording, monkeypatch):
    engine = recording.engine("cuda")
    recording.since()
    engine.close()
    assert recording.since() == ["the groups are left"]
    recording.engine("cuda", trains=False).close()
    recording.engine("cpu").close()
    assert "the groups are left" not in recording.since()

    def fail(*_: Any, **__: Any) -> None:
        raise ConfigError("the checkpoint belongs to another model")

    monkeypatch.setattr(trained_models, "place", fail)
    with pytest.raises(ConfigError):
        recording.engine("cuda")
    assert recording.since()[-1] == "the groups are left"


@pytest.mark.parametrize("name", ["generate", "logprob", "update", "sync"])
def test_a_ranks_span_names_the_phase_of_a_full_device(recording, name):
    engine = recording.engine("cuda")
    with pytest.raises(DeviceMemoryError, match="out of memory in"), engine.span(name):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="a bug"), engine.span(name):
        raise RuntimeError("a bug")


def test_without_a_learner_nothing_sleeps_and_the_folders_weights_stay(recording):
    engine = recording.engine("cuda", trains=False)
    recording.sample(engine)
    assert recording.since() == ["nccl group", "vLLM is built", "free the cache", *SAMPLE]


def test_on_a_cpu_nothing_sleeps(recording):
    engine = recording.engine("cpu")
    recording.sample(engine)
    built = ["gloo group", "vLLM is built", "a model is read", "a policy on cpu", "DeepSpeed is built"]
    assert recording.since() == [*built, *SYNC, *SAMPLE]
    assert {*recording.llm.received.values()} == {torch.float32}


def test_the_record_holds_what_a_gpu_was_asked_for(recording):
    engine = recording.engine(
        "cuda",
        cluster={"name": "ray", "ranks": 4},
        trainer={"prompts_per_step": 29},  # 15 for one of the two pairs of ranks
        sampler={"gpu_memory_utilization": 0.35, "tensor_parallel_size": 2, "group_size": 20},
        learner={"zero_stage": 3},
    )
    described = json.loads(json.dumps(engine.describe()))
    sampler, learner = described.pop("sampler_arguments"), described.pop("learner_settings")
    assert described.items() >= {
        "device": "cuda", "device_name": "a fake", "precision": "bfloat16", "process_group": "nccl",
        "attention": "mmrl_packed_varlen", "sleep_level": 1, "offload": "none",
    }.items()  # fmt: skip
    assert sampler.items() >= {
        "dtype": "bfloat16", "gpu_memory_utilization": 0.35, "enable_sleep_mode": True, "tensor_parallel_size": 2,
        "max_num_seqs": 15 * 20,
    }.items()  # fmt: skip
    assert learner == recording.deepspeed_config
    assert learner["bf16"] == {"enabled": True} and learner["zero_optimization"]["stage"] == 3
    assert learner["data_types"] == {"grad_accum_dtype": "fp32"}


def test_a_learner_is_compiled_if_it_is_asked_for(recording, monkeypatch):
    monkeypatch.setattr(deepspeed_engine, "compiles", lambda kind, settings: settings["compile"]["deepcompile"])
    for wish in (False, True):
        recording.engine("cuda", learner={"deepspeed": {"compile": {"deepcompile": wish}}})
        assert ("DeepSpeed compiles" in recording.since()) == wish


def test_vllm_is_asked_for_nothing_that_only_a_cpu_needs(recording):
    arguments = {}
    for kind in ("cpu", "cuda"):
        recording.engine(kind)
        arguments[kind] = recording.llm.arguments.keys()
    assert arguments["cpu"] - arguments["cuda"] == {"enforce_eager", "kv_cache_memory_bytes", "enable_chunked_prefill"}
    assert arguments["cuda"] - arguments["cpu"] == {"gpu_memory_utilization", "enable_sleep_mode"}
