"""The names by which torch and transformers are called, against the oldest versions that pyproject.toml allows.

Both take unknown names somewhere, or fail on a GPU only; so their parameters were read from the wheels of those
versions, which nothing here runs.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache, reduce
from pathlib import Path

import pytest
import torch

from mmrl.engine.learner.collation import Collator
from mmrl.engine.network.family import FAMILIES
from mmrl.engine.network.policy import load_policy
from mmrl.engine.network.vision import ImageInputs

ROOT = Path(__file__).parents[2]
READ = {"torch": "2.11", "transformers": "5.18"}
FORWARD = "input_ids attention_mask position_ids past_key_values inputs_embeds use_cache"
ATTENTION = "query key value"
IMAGES = "pixel_values pixel_values_videos image_grid_thw video_grid_thw mm_token_type_ids"
ROPE = "input_ids mm_token_type_ids image_grid_thw video_grid_thw"
OLDEST = {
    "torch.nn.attention.varlen:varlen_attn": f"{ATTENTION} cu_seq_q cu_seq_k max_q max_k return_aux scale window_size",
    "torch.nn.functional:scaled_dot_product_attention": f"{ATTENTION} attn_mask dropout_p is_causal scale enable_gqa",
    "torch.utils.checkpoint:checkpoint": "function use_reentrant context_fn determinism_check debug early_stop",
    "torch.random:fork_rng": "devices enabled _caller _devices_kw device_type",
    "torch.profiler:profile": "activities schedule on_trace_ready record_shapes profile_memory with_stack with_flops "
    "with_modules experimental_config execution_trace_observer acc_events use_cuda custom_trace_id_callback",
    "torch.nn:Module.register_buffer": "name tensor persistent",
    "torch.nn:Module.named_parameters": "prefix recurse remove_duplicate",
    "transformers:AttentionInterface.register": "key value",
    "transformers:PreTrainedModel.set_attn_implementation": "attn_implementation allow_all_kernels",
    "transformers:PreTrainedModel.gradient_checkpointing_enable": "gradient_checkpointing_kwargs "
    "every_n_layers offload",
    "transformers.cache_utils:Cache.reorder_cache": "beam_idx",
    "transformers.vision_utils:get_vision_cu_seqlens": "grid_thw merge_temporal kwargs",
    "transformers.vision_utils:get_vision_position_ids": "grid_thw spatial_merge_size include_temporal kwargs",
    "transformers.vision_utils:get_vision_window_index": "grid_thw spatial_merge_size window_size patch_size kwargs",
    "transformers.vision_utils:get_vision_interpolation_indices_and_weights": "grid_thw num_grid_per_side mode "
    "align_corners spatial_merge_size padding kwargs",
    "transformers:Qwen2VLModel.get_rope_index": f"{ROPE} attention_mask",
    "transformers:Qwen2_5_VLModel.get_rope_index": f"{ROPE} second_per_grid_ts attention_mask",
    "transformers:Qwen3VLModel.get_rope_index": f"{ROPE} attention_mask",
}
"""Parameters, without ``self``."""
FORWARDS = {
    "qwen2_vl": f"{FORWARD} {IMAGES} mm_encoder_outputs",
    "qwen2_5_vl": f"{FORWARD} {IMAGES} second_per_grid_ts mm_encoder_outputs",
    "qwen3_vl": f"{FORWARD} {IMAGES} mm_encoder_outputs",  # use_cache goes on to its language model, which names it
    "internvl": "input_ids pixel_values attention_mask position_ids past_key_values inputs_embeds "
    "vision_feature_layer vision_feature_select_strategy mm_encoder_outputs",
    "gemma4": f"{FORWARD} mm_encoder_outputs",  # and more, whose names no row gives
    "qwen3_vl_moe": f"{FORWARD} {IMAGES} mm_encoder_outputs",
    "qwen3_5": f"{FORWARD} {IMAGES} mm_encoder_outputs",
    "qwen3_5_moe": f"{FORWARD} {IMAGES} mm_encoder_outputs",
    "qwen3_5_text": FORWARD,
    "qwen2": FORWARD,
    "qwen3": FORWARD,
    "qwen3_moe": FORWARD,
    "llama": FORWARD,
}
"""Parameters of the bodies' forward, which take any further name and hand it on."""
TOWER = {
    "qwen2_vl": {"cu_seqlens", "max_seqlen", "position_ids"},
    "qwen2_5_vl": {
        "cu_seqlens", "max_seqlen", "position_ids", "window_index", "cu_window_seqlens", "max_window_seqlen"
    },
    "qwen3_vl": {"cu_seqlens", "max_seqlen", "position_ids", "interp_indices", "interp_weights"},
    "internvl": set(),
    "gemma4": {"image_position_ids"},
    "qwen3_vl_moe": {"cu_seqlens", "max_seqlen", "position_ids", "interp_indices", "interp_weights"},
    "qwen3_5": {"cu_seqlens", "max_seqlen", "position_ids", "interp_indices", "interp_weights"},
    "qwen3_5_moe": {"cu_seqlens", "max_seqlen", "position_ids", "interp_indices", "interp_weights"},
}  # fmt: skip
"""What the towers take out of their further keyword arguments."""


@cache
def calls() -> Mapping[str, Sequence[ast.Call]]:
    """All calls in the engine, by the last part of what is called."""
    found: dict[str, list[ast.Call]] = {}
    for path in [*(ROOT / "mmrl/engine").rglob("*.py"), ROOT / "mmrl/ops/logprobs.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                found.setdefault(ast.unparse(node.func).rpartition(".")[2], []).append(node)
    return found


@pytest.mark.parametrize("function", OLDEST)
def test_calls_fit_the_oldest_allowed_version_and_the_installed_one(function):
    module, _, path = function.partition(":")
    names = OLDEST[function].split()
    for call in calls()[path.rpartition(".")[2]]:
        assert {keyword.arg for keyword in call.keywords if keyword.arg} <= {*names}
        assert function.endswith(":checkpoint") or len(call.args) <= len(names)  # its others go to the function
    if function.endswith("scaled_dot_product_attention"):  # in C++: its documentation has the signature
        assert {*names} <= {*re.findall(r"\w+", torch.nn.functional.scaled_dot_product_attention.__doc__ or "")}
        return
    installed = reduce(getattr, path.split("."), importlib.import_module(module))
    assert {*names} <= {*inspect.signature(installed).parameters}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rows_inputs_are_named_by_the_oldest_allowed_models_and_the_installed_ones(family, bench):
    setting = bench(family)
    policy = load_policy(setting.folder, "cpu", "float32", freeze=(), temperature=1.0)
    body = policy.model.base_model
    collate = Collator(setting.folder, body, ImageInputs(setting.folder, setting.media), "cpu", torch.float32)
    inputs = collate(setting.samples([3, 3, 3]))
    given = {*inputs.model_inputs, "attention_mask", *(["mm_encoder_outputs"] if family in TOWER else [])} - {"layout"}
    assert given <= {*FORWARDS[family].split()} and given <= {*inspect.signature(body.forward).parameters}
    if family not in TOWER:
        return
    assert inputs.images is not None and inputs.images.derived.keys() == TOWER[family]
    if not TOWER[family]:
        return
    unread: list[set[str]] = []
    if family == "gemma4":  # its tower takes no other
        policy(inputs)
        return
    body.visual.blocks[0].register_forward_pre_hook(lambda _, args, more: unread.append({*more}), with_kwargs=True)
    policy(inputs)
    assert unread[0] - {"cu_seqlens", "max_seqlen", "position_embeddings"} == set()


def test_pyproject_allows_no_older_version_than_was_read():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {name: re.findall(rf"^{name}>=([\d.]+),", "\n".join(wanted), re.M) for name in READ} == {
        name: [version] for name, version in READ.items()
    }
