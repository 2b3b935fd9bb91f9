"""Both answers to every question about the device, asked on a CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import spec_from_file_location
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmrl.config.plugin_specs import EnvironmentSpec
from mmrl.config.sections import Config, LearnerConfig, SamplerConfig
from mmrl.engine import device
from mmrl.engine.device import overruled
from mmrl.engine.learner.learner_settings import LEARNER_KEYS, check_overlap, compiles, deepspeed_settings, lossy_sum
from mmrl.engine.sampler.vllm_arguments import OWNED_KEYS, check_engine_keys, written_arguments
from mmrl.engine.sampler.vllm_sampler import engine_arguments
from mmrl.errors import ConfigError

FULL = pytest.mark.full
STAGES = [0, pytest.param(1, marks=FULL), pytest.param(2, marks=FULL), 3]


def settings_of(kind: Any, dtype: str = "bfloat16", **learner: Any) -> dict[str, Any]:
    given = {"zero_stage": 3, "max_grad_norm": 0.5, "lr": 1e-4, "weight_decay": 0.1} | learner
    return deepspeed_settings(LearnerConfig(**given), dtype, kind)


@pytest.mark.parametrize(("kind", "local_rank"), [("cpu", "1"), ("cuda", "0")])
def test_a_rank_knows_its_place(kind, local_rank):
    place = device.rank_variables(kind, rank=9, node_rank=1, world_size=16, address="10.0.0.7", port=1234)
    assert place == {
        "RANK": "9", "LOCAL_RANK": local_rank, "WORLD_SIZE": "16", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def test_nothing_of_a_cpus_environment_reaches_cuda():
    cpu, cuda = device.variables("cpu"), device.variables("cuda")
    assert cpu.keys() - cuda.keys() == {"TORCHDYNAMO_DISABLE", "VLLM_CPU_OMP_THREADS_BIND"}
    assert cuda.keys() - cpu.keys() == {"VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_ALLREDUCE_USE_SYMM_MEM"}
    assert not {name for name in cuda if "VLLM_CPU" in name or "DYNAMO" in name or "OFFLINE" in name}
    different = {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]}
    assert different == {"DS_ACCELERATOR", "VLLM_USE_V2_MODEL_RUNNER"}
    assert cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_a_process_on_cuda_gets_the_settings_for_cuda_and_no_others():
    code = """
import json, os
before = dict(os.environ)
from mmrl.cluster import process
process.device.detect = lambda: "cuda"
kind = process.prepare_process()
print(json.dumps([kind, {name: value for name, value in os.environ.items() if before.get(name) != value}]))
"""
    clean = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    expected = device.variables("cuda") | device.QUIET | device.WAITING | device.PAGES
    assert json.loads(done.stdout) == ["cuda", expected]


def test_a_process_keeps_float32_convolutions_whole_and_torchs_compiler_can_read_it():
    code = """
import torch
from mmrl.cluster.process import prepare_process
assert torch.backends.cudnn.conv.fp32_precision == "tf32"  # torch's default
prepare_process()
assert torch.backends.cudnn.allow_tf32 is False  # it raises where both settings are mixed
assert torch.backends.cudnn.conv.fp32_precision in ("none", "ieee")
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


@pytest.mark.parametrize(
    ("where", "dtype", "expected"),
    [("cuda:0", torch.float32, True), ("cuda", torch.bfloat16, False), ("cpu", torch.float32, False)],
)
def test_plain_attention_gets_repeated_heads_on_a_gpu_in_float32_alone(where, dtype, expected):
    assert device.repeats_heads(where, dtype) is expected


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_vllm_knows_the_environment_variables_that_bear_its_name(kind):
    from vllm import envs

    ours = {name for name in device.variables(kind) | device.QUIET if name.startswith("VLLM_")}
    assert ours <= envs.environment_variables.keys() and len(ours) >= 4


@pytest.mark.parametrize(
    ("kind", "requested", "expected"),
    [("cpu", "auto", "float32"), ("cuda", "auto", "bfloat16"), ("cpu", "bfloat16", "bfloat16")],
)
def test_precision(kind, requested, expected):
    assert device.precision(kind, requested) == expected


def test_a_gpu_copies_from_pinned_memory_while_the_host_goes_on(monkeypatch):
    values, steps = torch.arange(3), []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: steps.append("pin") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *where, **how: steps.append((*where, how)) or self)
    assert device.moved(values, "cuda:0") is values and steps == ["pin", ("cuda:0", {"non_blocking": True})]
    steps.clear()
    assert device.moved(values, "cpu") is values and steps == [("cpu", {})]


def test_devices_backends_and_attention():
    assert [device.torch_device(kind) for kind in ("cpu", "cuda")] == ["cpu", "cuda:0"]
    assert [device.process_group_backend(kind) for kind in ("cpu", "cuda")] == ["gloo", "nccl"]
    assert device.attention("cuda", "bfloat16") == "mmrl_packed_varlen"
    assert device.attention("cuda", "float32") == device.attention("cpu", "bfloat16") == "mmrl_packed_sdpa"
    assert device.tower_attention("cuda", "bfloat16") == "mmrl_flash_tower"
    assert device.tower_attention("cuda", "float32") == device.tower_attention("cpu", "bfloat16") == "sdpa"
    kinds = [("cuda:0", torch.bfloat16), ("cuda:0", torch.float32), ("cpu", torch.bfloat16)]
    assert [device.tower_bounds(*each) for each in kinds] == ["cuda:0", "cpu", "cpu"]
    assert [device.sleep_level(kind) for kind in ("cpu", "cuda")] == [None, 1]
    assert [device.packs_experts(kind) for kind in ("cpu", "cuda")] == [True, False]
    assert [device.expert_columns(kind) for kind in ("cpu", "cuda")] == [32, 1]
    assert device.LOGITS_CHUNK_BYTES.keys() == {"cpu", "cuda"}
    assert device.detect() == ("cuda" if torch.cuda.is_available() else "cpu")
    assert device.used_memory_bytes("cpu") > 2**27
    assert [device.keeps_freed_memory(kind) for kind in ("cpu", "cuda")] == [True, False]


@pytest.mark.parametrize(("kind", "runner", "value"), [("cpu", 1, False), ("cuda", 2, True)])
def test_vllm_reads_the_model_runner_that_its_logits_processor_is_for(kind, runner, value, monkeypatch):
    from vllm import envs

    assert device.model_runner(kind) == runner and device.model_runner(kind, 2) == 1
    assert device.returns_experts(kind) == (kind == "cuda") and not device.returns_experts(kind, 2)
    assert device.variables(kind, 2)["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_ALLREDUCE_USE_SYMM_MEM"):
        monkeypatch.delenv(name, raising=False)
    for name, setting in device.variables(kind).items():
        monkeypatch.setenv(name, setting)
    assert envs.environment_variables["VLLM_USE_V2_MODEL_RUNNER"]() is value
    for name in ("VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_ALLREDUCE_USE_SYMM_MEM"):
        assert envs.environment_variables[name]() is (kind == "cpu")  # vLLM's default, which a CPU has no use for


@pytest.mark.parametrize(
    ("module", "runner"), [("logits_processor/__init__.py", 2), ("logits_processor.py", 2), ("", 1)]
)
def test_a_vllm_whose_second_model_runner_takes_no_logits_processors_gets_the_first(
    module, runner, tmp_path, monkeypatch
):
    for file in filter(None, ("__init__.py", module and f"v1/worker/gpu/sample/{module}")):
        path = tmp_path / "vllm" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = spec_from_file_location("vllm", tmp_path / "vllm" / "__init__.py")
    monkeypatch.setattr(device.importlib.util, "find_spec", {"vllm": found}.get)
    assert device.model_runner("cuda") == runner and device.model_runner("cpu") == 1
    assert device.variables("cuda")["VLLM_USE_V2_MODEL_RUNNER"] == str(runner - 1)
    assert device.returns_experts("cuda") == (runner == 2)


def test_without_vllm_a_plan_is_for_the_one_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    assert device.model_runner("cuda") == 2


def test_a_gpu_compiles_sleeps_and_takes_its_share_of_memory():
    cuda = device.sampler_arguments("cuda", 0.4, 3000, 320)
    assert cuda == {
        "gpu_memory_utilization": 0.4, "enable_sleep_mode": True, "max_num_seqs": 320, "max_num_batched_tokens": 8192,
    }  # fmt: skip
    cpu = device.sampler_arguments("cpu", 0.4, 9000, 320)
    assert cpu["enforce_eager"] and cpu["kv_cache_memory_bytes"] == 128 * 2**20
    assert cpu["max_num_batched_tokens"] == 9000 and not cpu["enable_chunked_prefill"]
    assert cuda.keys() & cpu.keys() == {"max_num_seqs", "max_num_batched_tokens"} and cpu["max_num_seqs"] == 256


@pytest.mark.parametrize(("num_sequences", "expected"), [(8, 256), (320, 320), (5120, 1024)])
def test_a_gpu_samples_the_completions_of_a_step_at_once_within_bounds(num_sequences, expected):
    assert device.sampler_arguments("cuda", 0.4, 3000, num_sequences)["max_num_seqs"] == expected


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2", "gemma4"])
def test_vllm_accepts_the_arguments_by_name(kind, family, bench):
    from vllm import EngineArgs

    own = {"max_num_seqs": 7, "compilation_config": {"max_cudagraph_capture_size": 64}}
    config = SamplerConfig(engine=own, gpu_memory_utilization=0.3, tensor_parallel_size=2, pipeline_parallel_size=3)
    folder = bench(family).folder
    sizes = {"max_images": 3, "max_tokens": 999, "num_sequences": 640}
    arguments = engine_arguments(folder, config, kind, dtype="bfloat16", **sizes, seed=2**40 + 5)
    built = EngineArgs(**arguments)
    assert built.max_model_len == 999 and built.seed == 5 and built.max_num_seqs == 7
    assert built.generation_config == "vllm" and built.logprobs_mode == "processed_logprobs"
    assert built.tensor_parallel_size == 2 and built.distributed_executor_backend == "external_launcher"
    assert built.pipeline_parallel_size == 3 and built.async_scheduling is (False if kind == "cuda" else None)
    assert built.enforce_eager == (kind == "cpu")
    assert built.enable_sleep_mode == built.disable_custom_all_reduce == (kind == "cuda")
    assert (built.gpu_memory_utilization == 0.3) == (kind == "cuda")
    assert built.compilation_config.max_cudagraph_capture_size == 64
    assert (built.compilation_config.pass_config.fuse_allreduce_rms is False) == (kind == "cuda")
    limits = {"qwen2": {}, "qwen2_5_vl": {"image": 3, "video": 0}, "gemma4": {"image": 3, "video": 0, "audio": 0}}
    assert (built.limit_mm_per_prompt or {}) == limits[family]
    assert arguments.keys() - {"model", "dtype"} <= {*EngineArgs.__dataclass_fields__}
    assert arguments["load_format"] == "safetensors"  # no pickles; a dummy load would leave buffers that no sync sends


@pytest.mark.parametrize(
    ("engine", "message"),
    [({"dtype": "float16"}, "mmrl decides dtype"), ({"max_seqs": 3}, "vLLM has no argument max_seqs")],
)
def test_engine_settings_that_are_owned_or_unknown_are_refused(engine, message, vision):
    config = SamplerConfig(engine=engine)
    sizes = {"max_images": 1, "max_tokens": 99, "num_sequences": 1}
    with pytest.raises(ConfigError, match=message) as caught:
        engine_arguments(vision.folder, config, "cpu", dtype="float32", **sizes, seed=0)
    assert caught.value.where.startswith("sampler.engine")


def test_owned_engine_keys_are_vllms():
    from vllm import EngineArgs

    assert {*EngineArgs.__dataclass_fields__} >= {*OWNED_KEYS}
    assert written_arguments() == {*EngineArgs.__dataclass_fields__}


@pytest.mark.parametrize("key", OWNED_KEYS)
def test_an_engine_key_that_mmrl_owns_is_answered_with_what_decides_it(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_engine_keys({key: 1})
    text = str(caught.value)
    assert f"mmrl decides {key}, from {OWNED_KEYS[key]}" in text and "`sampler.engine={}` removes all" in text
    sections = ("model", "data", "sampler", "trainer", "environment")
    schema = {f"{name}.{inner}" for name in sections for inner in _keys(name)}
    named = re.findall(r"\b(?:model|data|sampler|trainer|environment)\.[a-z_]+", OWNED_KEYS[key])
    assert {*named} - {"data.train", "data.eval"} <= schema


def _keys(section: str) -> list[str]:
    model = EnvironmentSpec if section == "environment" else Config.model_fields[section].annotation
    return [*model.model_fields]


@pytest.mark.parametrize(
    ("kind", "engine", "expected"),
    [
        ("cpu", {"enforce_eager": False}, {"enforce_eager": True}),
        ("cpu", {"enforce_eager": True}, {}),
        ("cpu", {"enable_chunked_prefill": True, "max_num_seqs": 4}, {"enable_chunked_prefill": False}),
        ("cuda", {"enforce_eager": False, "enable_chunked_prefill": True}, {}),
    ],
)
def test_settings_for_gpus_give_way_on_a_cpu(vision, kind, engine, expected) -> None:
    assert overruled(kind, engine) == expected
    sizes = {"max_images": 1, "max_tokens": 99, "num_sequences": 1}
    made = engine_arguments(vision.folder, SamplerConfig(engine=engine), kind, dtype="float32", **sizes, seed=0)
    assert {key: made[key] for key in engine} == {**engine, **expected}


def test_a_gpus_step_has_as_many_tokens_as_the_user_says_or_as_a_prompt_needs_in_one_piece(vision) -> None:
    def tokens(**engine: Any) -> int:
        sizes = {"max_images": 1, "max_tokens": 20_000, "num_sequences": 1}
        config = SamplerConfig(engine=engine)
        return engine_arguments(vision.folder, config, "cuda", dtype="bfloat16", **sizes, seed=0)[
            "max_num_batched_tokens"
        ]

    assert tokens() == 8192  # longer prompts are prefilled in chunks
    assert tokens(enable_chunked_prefill=False) == 20_000
    assert tokens(max_num_batched_tokens=16_384) == 16_384
    assert tokens(enable_chunked_prefill=False, max_num_batched_tokens=30_000) == 30_000


def test_engine_keys_are_checked_all_at_once_with_suggestions():
    with pytest.raises(ConfigError) as caught:
        check_engine_keys({"seed": 1, "max_num_seq": 3, "enforce_eagre": True, "block_size": 16})
    text = str(caught.value)
    assert "mmrl decides seed" in text
    assert (
        "vLLM has no argument max_num_seq\n  where:    sampler.engine\n  do:       did you mean max_num_seqs?" in text
    )
    assert "did you mean enforce_eager?" in text and text.startswith("3 errors")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("kind", "dtype"), [("cpu", "float32"), pytest.param("cuda", "float32", marks=FULL), ("cuda", "bfloat16")]
)
def test_deepspeed_accepts_the_settings_for_many_ranks(kind, dtype, stage, start, monkeypatch):
    from deepspeed.runtime.config import DeepSpeedConfig

    start()  # DeepSpeed asks the process group for its size
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda *_: 8)
    settings = settings_of(kind, dtype, zero_stage=stage)
    built = DeepSpeedConfig(settings)
    assert built.world_size == built.train_batch_size == 8 and built.gradient_accumulation_steps == 1
    assert built.zero_config.stage == stage and built.gradient_clipping == 0.5
    assert built.bfloat16_config.enabled == (dtype == "bfloat16") and not built.float16_config.enabled
    assert built.grad_accum_dtype == ("fp32" if dtype == "bfloat16" and stage >= 2 else None)
    assert built.optimizer_name == "adamw" and built.optimizer_params["lr"] == 1e-4
    assert built.zero_config.offload_optimizer is built.zero_config.offload_param is None
    assert built.zero_config.overlap_comm == (stage == 3) and built.zero_config.contiguous_gradients
    assert built.optimizer_params["torch_adam"] and built.optimizer_params["fused"]


@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize("stage", STAGES)
def test_deepspeed_steps_with_torchs_fused_adamw(stage, offload, start):
    import deepspeed

    if stage == 0 and offload != "none":
        pytest.skip("there is nothing to offload without ZeRO")
    start()
    layer = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    settings = settings_of("cpu", zero_stage=stage, offload=offload)
    engine, *_ = deepspeed.initialize(model=layer, model_parameters=layer.parameters(), config=settings)
    engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum())
    engine.step()
    groups = engine.optimizer.param_groups
    assert groups and all(group["fused"] for group in groups)
    stepped = [state for state in engine.optimizer.state.values() if "exp_avg" in state]
    assert stepped and all(state["exp_avg"].dtype == torch.float32 and state["step"] >= 1 for state in stepped)


@pytest.mark.parametrize("bucket", [None, 16])  # a weight may be larger than a bucket
@pytest.mark.parametrize("stage", STAGES[1:])
def test_with_the_settings_for_cuda_steps_too_small_for_bfloat16_are_not_lost(stage, bucket, start):
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    start()
    layer = torch.nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    before = layer.weight.detach().float()
    settings = settings_of("cuda", zero_stage=stage, lr=1e-6, weight_decay=0.0)
    if bucket is not None:
        settings["zero_optimization"]["reduce_bucket_size"] = bucket
    engine, *_ = deepspeed.initialize(model=layer, model_parameters=layer.parameters(), config=settings)
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum())
        engine.step()
    assert float(engine.get_global_grad_norm()) == 16.0  # 64 gradients of 2
    step = safe_get_full_fp32_param(layer.weight).view(8, 8) - before
    torch.testing.assert_close(step, torch.full((8, 8), -3e-6), atol=1e-7, rtol=0)


OVERLAP = {"zero_optimization": {"overlap_comm": True}}


def test_a_gradient_that_would_be_freed_while_it_is_reduced_is_refused():
    """DeepSpeed does not guard it at stage 2 on a GPU; the bucket has 100 million elements."""

    def check(kind: Any, largest: int, **changes: Any) -> None:
        settings = settings_of(kind, **{"zero_stage": 2, "deepspeed": OVERLAP} | changes)
        check_overlap(kind, settings, largest)

    with pytest.raises(ConfigError, match=r"free a gradient of 100,000,001 elements .* buckets have 100,000,000"):
        check("cuda", 10**8 + 1)
    check("cuda", 10**8)
    check("cpu", 10**9)
    for safe in ({"zero_stage": 1}, {"zero_stage": 3}, {"deepspeed": {}}, {"offload": "optimizer"}):
        check("cuda", 10**9, **safe)


@pytest.mark.parametrize(
    ("dtype", "stage", "microbatches", "told"),
    [
        ("bfloat16", 0, 64, True),
        ("bfloat16", 1, 64, True),
        ("bfloat16", 1, 63, False),
        ("bfloat16", 2, 900, False),
        ("float32", 0, 900, False),
    ],
)
def test_a_sum_that_loses_digits_is_told_of(dtype, stage, microbatches, told):
    assert bool(lossy_sum(dtype, stage, microbatches)) is told
    settings = settings_of("cuda", dtype, zero_stage=stage)
    in_bfloat16 = dtype == "bfloat16" and settings.get("data_types", {}).get("grad_accum_dtype") != "fp32"
    assert told <= in_bfloat16  # the settings do what the words say


def test_only_a_gpus_learner_is_compiled_and_only_if_it_is_asked_for():
    from deepspeed.runtime.config import DeepSpeedConfig

    wish = {"compile": {"deepcompile": True}}
    settings = settings_of("cuda", deepspeed=wish)
    assert DeepSpeedConfig(settings).compile_config.deepcompile
    assert compiles("cuda", settings) and not compiles("cpu", settings)
    assert not compiles("cuda", settings_of("cuda"))


def test_the_learners_own_decisions_are_no_setting_of_the_user():
    decided = settings_of("cuda").keys()
    assert decided - LEARNER_KEYS == {
        "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16",
    }  # fmt: skip


def test_settings_of_the_user_are_merged_into_the_defaults():
    overrides = {"zero_optimization": {"reduce_bucket_size": 9}, "optimizer": {"params": {"eps": 1e-6}}}
    settings = settings_of("cuda", deepspeed=overrides)
    assert settings["zero_optimization"]["stage"] == 3 and settings["zero_optimization"]["reduce_bucket_size"] == 9
    assert settings["optimizer"]["params"] == {
        "lr": 1e-4, "weight_decay": 0.1, "betas": [0.9, 0.999], "torch_adam": True, "fused": True, "eps": 1e-6,
    }  # fmt: skip


def test_the_memory_that_is_taken_of_a_gpu_is_asked_of_the_driver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3, 10))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 99)  # vLLM's tensors, asleep
    assert device.used_memory_bytes("cuda") == 7


def test_free_memory_is_the_gpus_after_unused_memory_was_given_back(monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (calls.append("ask"), (7, 9))[1])
    gpu = SimpleNamespace()  # torch 2.11 does not tell
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpu)
    assert device.free_memory_bytes("cpu") is None and not calls
    assert device.free_memory_bytes("cuda") == (7, 9)
    assert calls == ["synchronize", "empty_cache", "ask"]
    gpu.is_integrated = True
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=8))
    assert device.free_memory_bytes("cuda") == (8, 9)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_reference_is_sharded_at_zero_3_and_else_whole_in_a_gpus_host(kind):
    whole = "host" if kind == "cuda" else "device"
    assert [device.reference_place(kind, stage) for stage in range(4)] == [whole, whole, whole, "sharded"]


def test_buckets_are_small_on_cuda_and_the_users_come_first():
    def bucket(kind, stage, **zero):
        settings = settings_of(kind, zero_stage=stage, deepspeed={"zero_optimization": zero})
        return settings["zero_optimization"].get("reduce_bucket_size")

    assert [bucket("cuda", stage) for stage in range(4)] == [None, 10**8, 10**8, 10**8]
    assert bucket("cpu", 3) is None and bucket("cuda", 3, reduce_bucket_size=7) == 7


def test_a_plan_allows_memory_for_what_is_no_tensor_on_cuda_alone(monkeypatch):
    for allowed in (device.RUNTIME_BYTES, device.SAMPLER_BYTES, device.ASLEEP_BYTES):
        assert allowed["cpu"] == 0 < allowed["cuda"] < 5 * 10**9
    assert device.ASLEEP_BYTES["cuda"] <= device.SAMPLER_BYTES["cuda"]
    monkeypatch.setattr(device, "free_memory_bytes", lambda kind: None if kind == "cpu" else (7, 9))
    assert [device.total_memory_bytes(kind) for kind in ("cpu", "cuda")] == [None, 9]


@pytest.mark.parametrize(("kind", "spec", "lacks"), [("cuda", None, True), ("cuda", "x", False), ("cpu", None, False)])
def test_a_gpu_without_flash_linear_attention_lacks_kernels_for_states(kind, spec, lacks, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", {"fla": spec}.get)
    assert device.lacks_state_kernels(kind) == lacks
