"""Where weights lie while they are loaded and used: on one rank, on two, and on a device that is only told apart."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.cluster.process import host_meeting
from mmrl.config.sections import LoraConfig
from mmrl.engine import device
from mmrl.engine.aids.tiny_model import write_model
from mmrl.engine.network import placement
from mmrl.engine.network.placement import HostWeights
from mmrl.engine.network.policy import Policy, load_policy
from tests.proofs import families

KL = {"kl": {"coef": 0.1}}


def facts(policy: Policy) -> list[Any]:
    """All that ranks must agree on before rank 0 sends its weights."""
    parameters = [
        (name, parameter.shape, parameter.dtype, parameter.requires_grad)
        for name, parameter in policy.named_parameters(remove_duplicate=False)
    ]
    model = policy.model
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    return [parameters, head is embeddings, policy.training, model.training, len(list(policy.parameters()))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("as_on_hub", [False, True], ids=["", "as on the hub"])
@pytest.mark.parametrize("family", families())
def test_a_policy_without_weights_is_the_same_in_all_else(family, as_on_hub, dtype, bench):
    folder, state = bench(family, as_on_hub).folder, torch.get_rng_state()
    read, empty = (
        load_policy(folder, "cpu", dtype, freeze=("vision",), temperature=1.0, with_weights=with_weights)
        for with_weights in (True, False)
    )
    assert facts(read) == facts(empty)
    own, other = dict(read.named_buffers()), dict(empty.named_buffers())
    assert own.keys() == other.keys()
    used = [name for name in own if folder.family.uses(name.removeprefix("model."))]  # an unused tower computes nothing
    assert used and all(torch.equal(own[name], other[name]) and own[name].dtype == other[name].dtype for name in used)
    assert {value.dtype for name, value in other.items() if "inv_freq" in name} == {torch.float32}
    assert torch.equal(torch.get_rng_state(), state)


def test_adapters_are_beside_the_same_layers_of_a_policy_without_weights(vision):
    lora = LoraConfig(rank=4, alpha=8, targets=("language", "vision"))
    read, empty = (
        load_policy(
            vision.folder, "cpu", "bfloat16", freeze=(), temperature=1.0, lora=lora, seed=3, with_weights=with_weights
        )
        for with_weights in (True, False)
    )
    assert facts(read) == facts(empty) and len(read.adapted) == len(empty.adapted) > 10
    for one, other in zip(read.adapted, empty.adapted, strict=True):
        assert one.name == other.name
        assert all(torch.equal(one.factors[end], other.factors[end]) for end in one.factors)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, models: Callable[..., Path]) -> list[dict[str, Any]]:
    """The lines that two processes of ``loading_ranks.py`` print of a model of 66 million parameters, 265 MB."""
    folder = tmp_path_factory.mktemp("placement")
    broken = shutil.copytree(models("qwen2"), folder / "broken")
    weights = load_file(broken / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    bound = socket.create_server(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    meeting = host_meeting(bound)
    command = [
        sys.executable,
        str(Path(__file__).with_name("loading_ranks.py")),
        str(large(folder / "large")),
        str(broken),
    ]
    ranks = []
    for rank in range(2):
        place = device.rank_variables("cpu", rank=rank, node_rank=rank, world_size=2, address="127.0.0.1", port=port)
        environment = {**os.environ, **place, "GLOO_SOCKET_IFNAME": "lo"}
        ranks.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE))
    try:  # DeepSpeed may compile its helper first
        found = [json.loads(rank.communicate(timeout=600)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    del meeting  # ranks met there
    weights = load_file(folder / "large" / "model.safetensors")
    found[0]["read"] = {name: hashlib.sha256(weight.numpy().tobytes()).hexdigest() for name, weight in weights.items()}
    return found


def large(folder: Path) -> Path:
    """A text model whose weights are a few hundred megabytes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_model(folder, "qwen2")
    config = AutoConfig.from_pretrained(folder)
    config.update({"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 7, "num_key_value_heads": 4})
    config.layer_types = ["full_attention"] * 7
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.full
def test_two_ranks_have_the_weights_that_rank_0_has_read(two_ranks):
    first, second = two_ranks
    assert first["weights"] == second["weights"] == first["read"]
    assert first["part"] == pytest.approx(first["whole"] / 2, rel=1e-3)


@pytest.mark.full
def test_a_rank_that_does_not_read_has_no_copy_of_the_weights_in_memory(two_ranks):
    first, second = two_ranks
    whole, part = first["whole"], first["part"]
    assert second["most"] < part + 4 * second["largest"] + 48 * 2**20
    assert first["most"] + second["most"] < whole + 2 * (part + 4 * first["largest"] + 48 * 2**20)
    assert max(first["left"], second["left"]) < part + 64 * 2**20


@pytest.mark.full
def test_a_device_never_has_more_than_a_part_and_two_parameters(two_ranks):
    for rank in two_ranks:  # gloo's thread may hold the parameter that was sent while the next one arrives
        assert rank["part"] < rank["arrived"] <= rank["part"] + 2 * rank["largest"] + rank["buffers"]


@pytest.mark.full
def test_two_ranks_gather_each_weight_once_for_a_sync_and_no_more_than_a_bucket_at_a_time(two_ranks):
    expected = two_ranks[0]["read"] | {"lm_head.weight": two_ranks[0]["read"]["model.embed_tokens.weight"]}  # tied
    for rank in two_ranks:
        padding = 4 * len(expected)  # an element of each weight
        most = []
        for sync in rank["syncs"]:
            assert sync["weights"] == expected
            assert rank["whole"] <= sync["gathered"] <= rank["whole"] + padding
            # DeepSpeed copies the rank's half of a bucket to this device; the receiver still holds the last weight.
            most.append(sync["most"])
            assert most[-1] <= 1.5 * (max(sync["bucket"], rank["largest"]) + padding) + rank["largest"]
            assert sync["held"] > 0 == sync["left"]
        assert most[0] < most[1] / 1.5 < rank["whole"] / 4 and most[2] >= rank["whole"]


@pytest.mark.full
def test_what_rank_0_cannot_read_ends_all_ranks_with_its_message(two_ranks):
    assert "lack 1 of its weights: model.norm.weight" in two_ranks[0]["said"]
    assert two_ranks[1]["said"] == two_ranks[0]["said"]


@pytest.mark.parametrize("piece_bytes", [None, 40_000])
def test_weights_in_host_memory_are_on_the_device_for_a_block(piece_bytes, start, vision):
    start(learner={"zero_stage": 0})  # joins a group
    policy = load_policy(vision.folder, "cpu", "float32", freeze=("language",), temperature=1.0)
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    host = HostWeights(policy, "cpu:0", pinned=False, piece_bytes=piece_bytes)  # for torch another device than "cpu"
    home = {name: parameter.data_ptr() for name, parameter in policy.named_parameters()}
    pieces = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    assert len(pieces) == 1 if piece_bytes is None else 10 < len(pieces) < len(home)
    for _ in range(2):
        with host.on_device():
            for name, parameter in policy.named_parameters():
                assert parameter.data_ptr() != home[name] and torch.equal(parameter, before[name])
        assert {name: parameter.data_ptr() for name, parameter in policy.named_parameters()} == home
    assert all(torch.equal(parameter, before[name]) for name, parameter in policy.named_parameters())


@pytest.mark.parametrize("stage", [0, 1])
def test_a_reference_that_waits_in_host_memory_scores_as_one_on_the_device(stage, start, vision, plain, monkeypatch):
    samples = vision.samples((5, 9, 12, 7))
    settings = {"learner": {"zero_stage": stage}, "algorithm": KL}
    with start(**settings).learning() as learner:
        expected = learner.network("reference").score(samples)
    monkeypatch.setattr(device, "reference_place", lambda kind, zero_stage: "host")
    made = []

    def host(policy: Policy, torch_device: str, *, pinned: bool) -> HostWeights:
        made.append(HostWeights(policy, "cpu:0", pinned=not pinned))  # only a GPU's driver can lock pages
        return made[0]

    monkeypatch.setattr(placement, "HostWeights", host)
    with start(**settings).learning() as learner:
        weight = learner.network("reference").policy.model.get_output_embeddings().weight
        home, places = weight.data_ptr(), set()
        learner.network("reference").policy.register_forward_pre_hook(lambda *_: places.add(weight.data_ptr()))
        found = learner.network("reference").score(samples)
        assert home not in places and len(places) == 1 and weight.data_ptr() == home
    assert len(made) == 1
    assert all(map(np.array_equal, found, expected))
    reference = plain(vision.folder.path)
    single = [reference.logprobs(sample, vision.media).detach().numpy() for sample in samples]
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(single), atol=1e-5)


def test_a_sharded_reference_is_gathered_only_while_it_computes(start, vision, plain):
    samples = vision.samples((5, 9, 12, 7))
    zero = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    with start(learner={"zero_stage": 3, "deepspeed": zero}, algorithm=KL).learning() as learner:
        found = learner.network("reference").score(samples)
        sizes = {parameter.numel() for parameter in learner.network("reference").policy.parameters()}
        again = learner.network("reference").score(samples)
    assert sizes == {0}
    assert all(map(np.array_equal, found, again))
    reference = plain(vision.folder.path)
    single = [reference.logprobs(sample, vision.media).detach().numpy() for sample in samples]
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(single), atol=1e-5)
