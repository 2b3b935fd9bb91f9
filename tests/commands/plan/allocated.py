"""Bytes that one rank's learner really has allocated, by kind: a process of its own, started by ``test_allocated.py``.

    python allocated.py RANK RANKS PORT FOLDER SETTINGS

SETTINGS is a list of configs as JSON; the answer is a list of bytes by kind, also as JSON. Each learner takes an update
of a few micro-batches; every tensor that DeepSpeed holds is looked at in hooks of the layers' passes and of the
optimizer, and once more afterwards. Two tensors on one storage count once.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

KINDS = ("weights", "master", "optimizer", "buckets", "gradients", "gathered", "reference")


class Allocated:
    """The most of each kind so far.

    Attributes:
        most: In forward and backward passes.
        stepping: When the optimizer steps.
        resident: After the update.
        unknown: Bytes after the update of tensors that are none of these, activations and inputs among them.
    """

    def __init__(self, learner: Any) -> None:
        self._trained = [learner.networks[role] for role in ("policy", "critic") if role in learner.networks]
        self._frozen = [network for role, network in learner.networks.items() if role == "reference"]
        self.most, self.stepping = defaultdict[str, int](int), defaultdict[str, int](int)
        self.resident, self.unknown = dict[str, int](), 0

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Every tensor that DeepSpeed holds, by kind; a storage is of the first kind that has it."""
        for network in self._trained:
            yield from self._of_trained(network.engine.optimizer, list(network.policy.parameters()))
        for network in self._frozen:
            yield from (("reference", getattr(p, "ds_tensor", p.data)) for p in network.policy.parameters())

    def _of_trained(self, optimizer: Any, parameters: list[Any]) -> Iterator[tuple[str, Any]]:
        yield from (("weights", getattr(p, "ds_tensor", p.data)) for p in parameters)
        yield from (("gathered", p.data) for p in parameters if hasattr(p, "ds_id"))
        base = getattr(optimizer, "optimizer", optimizer)
        for state in base.state.values():
            yield from (("optimizer", state[name]) for name in ("exp_avg", "exp_avg_sq") if name in state)
        groups = [*getattr(optimizer, "single_partition_of_fp32_groups", ())]
        groups += getattr(optimizer, "fp32_partitioned_groups_flat", ())
        groups += [p for group in getattr(optimizer, "fp32_groups", ()) for p in group]
        yield from (("master", group.data) for group in groups)
        for bucket in getattr(optimizer, "ipg_buckets", {}).values():
            found = bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
            yield from (("buckets", buffer) for buffer in found if buffer is not None)
        gradients = [p.grad for p in (*parameters, *groups)] + [getattr(p, "grad_accum", None) for p in parameters]
        gradients += [getattr(optimizer, name, None) for name in ("grad_partitions_flat_buffer", "grads_in_partition")]
        for name in ("averaged_gradients", "all_grad_tensors"):
            gradients += [each for group in getattr(optimizer, name, {}).values() for each in group or ()]
        yield from (("gradients", gradient) for gradient in gradients if gradient is not None)

    def look(self, into: dict[str, int]) -> dict[int, int]:
        """Add up what there is now; returns the storages that were met."""
        known, found = dict[int, int](), dict.fromkeys(KINDS, 0)
        for kind, tensor in self.tensors():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                known[storage.data_ptr()] = storage.nbytes()
                found[kind] += storage.nbytes()
        for kind, count in found.items():
            into[kind] = max(into.get(kind, 0), count)
        return known

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at every layer's forward and backward pass, and at every optimizer step."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        with ExitStack() as stack:
            modules = [module for network in self._trained for module in network.policy.modules()]
            for layer in (m for m in modules if type(m).__name__.endswith(("DecoderLayer", "Block"))):
                handles = [
                    layer.register_forward_hook(lambda *_: void(self.look(self.most))),
                    layer.register_full_backward_hook(lambda *_: void(self.look(self.most))),
                ]
                for handle in handles:
                    stack.callback(handle.remove)
            for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
                stack.callback(register(lambda *_: void(self.look(self.stepping))).remove)
            yield
        known = self.look(self.resident)
        self.unknown = sum(_others(known).values())


def void(_: object) -> None:
    """Answers None, as a hook must."""


def _others(known: dict[int, int]) -> dict[int, int]:
    import torch

    found = dict[int, int]()
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.layout == torch.strided and not each.is_meta:
            storage = each.untyped_storage()
            if storage.data_ptr() not in known:
                found[storage.data_ptr()] = storage.nbytes()
    return found


def measure(folder: str, sections: dict[str, Any]) -> dict[str, Any]:
    """Counts the bytes that one setting takes on this rank."""
    import numpy as np

    from mmrl.config.load import from_mapping
    from mmrl.config.reference import Teacher
    from mmrl.data.images import ImageGrid, MediaStore
    from mmrl.engine.network.folder import ModelFolder
    from mmrl.engine.network.quantization import packed_layers
    from mmrl.engine.network.teacher import open_teacher
    from mmrl.engine.rank import RankEngine
    from mmrl.engine.spec import EngineSpec
    from mmrl.engine.text.encoding import Encoder
    from mmrl.interfaces import Aggregation
    from mmrl.ops.objective import training_rows
    from mmrl.types import Message, Prompt, Sample, Segment
    from mmrl_algorithms.grpo import GRPO
    from mmrl_algorithms.ppo import PPO

    options = dict(sections)
    kl, model, critic = options.pop("kl", None), ModelFolder.open(folder), options.pop("critic", False)
    named = [Teacher("reference", str(Path(folder).with_name("teacher")), None)] * options.pop("teacher", False)
    teachers = tuple(open_teacher(each, model, (3136, 50176)) for each in named)
    base = {"data": {"train": {"name": "table"}}, "algorithm": {"name": "grpo"}}
    config = from_mapping(
        base | options | ({"critic": {}} if critic else {}) | {"model": {"path": folder, **options.get("model", {})}}
    )
    media = MediaStore(Path(folder, f"media-{os.environ['RANK']}"), ImageGrid(28, 3136, 50176))
    prompt = Encoder(model, media).encode(Prompt("p", (Message("user", "what is 3+4?"),)))
    ids = np.arange(20, 52, dtype=np.int32)
    samples = [Sample(prompt, (Segment(ids, True, np.zeros(len(ids), np.float32)),)) for _ in range(4)]
    advantages = [np.full(len(ids), (-1.0) ** i) for i in range(4)]
    masks = [sample.mask for sample in samples]

    def rows_of(**columns: Any) -> list[Any]:
        return list(training_rows(samples, masks, columns, np.arange(4), Aggregation("token-mean"), range(4)).values())

    rows, valued = rows_of(advantages=advantages), rows_of(values=advantages, returns=advantages)
    of_kl = {"kl": {"coef": 0.1 if kl else 0.0}}
    algorithm = (PPO if critic else GRPO)((PPO if critic else GRPO).Config.model_validate(of_kl))
    engine = RankEngine(EngineSpec(config, model, media, algorithm, 0, with_sampler=False, teachers=teachers), "cpu")
    with engine.learning() as learner:
        if kl:
            known = zip(rows, learner.network("reference").score(samples), strict=True)
            rows = [
                replace(row, columns={**row.columns, "reference_logprobs": v}, constants={"kl_coef": 0.1})
                for row, v in known
            ]

        _update(learner, critic=valued, policy=rows)  # DeepSpeed makes the optimizers' states
        found = Allocated(learner)
        with found.watching():
            _update(learner, critic=valued, policy=rows)
    answer: dict[str, Any] = {name: dict(getattr(found, name)) for name in ("most", "stepping", "resident")}
    answer["settings"] = learner.settings
    own = learner.network("reference").policy.parameters() if teachers else ()
    answer["teacher"] = [getattr(p, "ds_numel", p.numel()) for p in own]
    of_critic = [(p.requires_grad, getattr(p, "ds_numel", p.numel()), id(p)) for p in _parameters(learner, "critic")]
    shared = {id(p) for p in learner.policy.parameters()}
    answer["critic"] = [
        sum(n for on, n, place in of_critic if on is kind and place not in shared) for kind in (True, False)
    ]
    packed = {id(layer.weight): layer for layer in packed_layers(learner.policy)}
    quantized = sum(layer.in_features * layer.out_features for layer in packed.values())
    parameters = list(learner.policy.parameters())
    small = [p.element_size() * p.ds_numel for p in parameters if getattr(p, "ds_numel", 10**6) <= 10**5]
    whole = [(p.requires_grad, getattr(p, "ds_numel", p.numel())) for p in parameters if id(p) not in packed]
    small += [
        p.element_size() * p.ds_numel for p in _parameters(learner, "critic") if getattr(p, "ds_numel", 10**6) <= 10**5
    ]
    del packed, parameters, own
    del learner, engine, algorithm
    return answer | {
        "unknown": found.unknown,
        "trained": sum(size for trained, size in whole if trained),
        "frozen": sum(size for trained, size in whole if not trained) + quantized,
        "quantized": quantized,
        "small": sum(small),
        "largest": max(size for _, size in whole),
    }


def _update(learner: Any, **rows: list[Any]) -> None:
    for role, own in rows.items():
        if role in learner.networks:
            learner.network(role).update(own)


def _parameters(learner: Any, role: str) -> list[Any]:
    return list(learner.networks[role].policy.parameters()) if role in learner.networks else []


def main(rank: int, ranks: int, port: int, folder: str, settings: str) -> None:
    from mmrl.cluster.process import prepare_process
    from mmrl.engine import device
    from mmrl.engine.machine.interfaces import interface_of

    prepare_process()
    if interface := interface_of("127.0.0.1"):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    place = {"rank": rank, "node_rank": rank, "world_size": ranks, "address": "127.0.0.1", "port": port}
    os.environ.update(device.rank_variables("cpu", **place) | {"TORCHELASTIC_USE_AGENT_STORE": "False"})
    with redirect_stdout(sys.stderr):
        answers = []
        for sections in json.loads(settings):
            answers.append(measure(folder, sections))
            gc.collect()
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
