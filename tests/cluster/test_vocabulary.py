"""Two ranks at ZeRO 3 with the vocabulary of a published model: logits in several chunks, of another number on each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from mmrl.engine.device import LOGITS_CHUNK_BYTES
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.spec import EngineSpec
from mmrl.interfaces import Aggregation
from mmrl.ops.objective import training_rows
from mmrl.types import Message, Prompt
from mmrl_algorithms.grpo import GRPO
from tests.cluster.process_ranks import on_each
from tests.faults.runs import rollouts

pytestmark = pytest.mark.full

VOCABULARY = 151_936
CHUNK_TOKENS = LOGITS_CHUNK_BYTES["cpu"] // (4 * VOCABULARY)
LENGTHS = ((500, 20, 333), (57, 210))
"""Of the completions of two prompts."""
REWARD = """\
def even(rollouts):
    return [float((rollout.token_ids % 2 == 0).mean()) for rollout in rollouts]
"""


@pytest.fixture(scope="module")
def large(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with that vocabulary, of which its tokenizer knows some hundred."""
    import transformers

    folder = tmp_path_factory.mktemp("large") / "model"
    shutil.copytree(models("qwen2"), folder)
    config = transformers.AutoConfig.from_pretrained(folder, vocab_size=VOCABULARY)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def gradients(worker: Any) -> dict[str, torch.Tensor]:
    """AdamW's first moment without memory; all ranks gather it together."""
    from deepspeed.utils import safe_get_full_optimizer_state

    named = worker._owner.policy.model.named_parameters()
    return {name: safe_get_full_optimizer_state(parameter, "exp_avg") for name, parameter in named}


@pytest.mark.parametrize(("of_a_row", "budget"), [(1, 560), pytest.param(2, 600, marks=pytest.mark.slow)])
def test_long_rows_have_plain_autograds_gradient(of_a_row, budget, large, bench, plain, start_ranks):
    """One rank has rows of 2 chunks and of 1; the other has one row, of 1 chunk, and an idle one. Or both hold one row
    together, each 2 chunks of it."""
    setting = replace(bench("qwen2"), folder=ModelFolder.open(str(large)))
    prompts = [
        setting.encoder.encode(Prompt(name, (Message("user", name),))) for name in ("what is 3+4?", "and 30+40?")
    ]
    pairs = [(prompt, length) for prompt, lengths in zip(prompts, LENGTHS, strict=True) for length in lengths]
    samples = setting.samples([length for _, length in pairs])
    samples = [replace(sample, prompt=prompt) for sample, (prompt, _) in zip(samples, pairs, strict=True)]
    masks = [np.ones(length, bool) for _, length in pairs]
    advantages = [np.full(length, 1.0 - index) for index, (_, length) in enumerate(pairs)]
    groups = np.array([0, 0, 0, 1, 1])
    rows = training_rows(samples, masks, {"advantages": advantages}, groups, Aggregation("token-mean"), range(5))

    reference = plain(large)
    single = [reference.logprobs(sample, setting.media) for sample in samples]
    sum(-(1.0 - i) * values.sum() / sum(map(len, single)) for i, values in enumerate(single)).backward()
    expected = {name: parameter.grad for name, parameter in reference.model.named_parameters()}

    assert CHUNK_TOKENS < 500
    learner = {"zero_stage": 3, "lr": 1e-30, "max_grad_norm": 1e9, "tokens_per_microbatch": budget}
    learner["sequence_parallel_size"] = of_a_row
    learner["deepspeed"] = {
        "zero_optimization": {"stage3_param_persistence_threshold": 0},
        "optimizer": {"params": {"betas": [0.0, 0.999]}},
    }
    config = setting.config(learner=learner, cluster={"name": "ray", "ranks": 2})
    grpo = GRPO(GRPO.Config())
    group = start_ranks(EngineSpec(config, setting.folder, setting.media, grpo, 0, with_sampler=False))
    try:
        with group.learning() as learner:
            logprobs = learner.network("policy").score(samples)
            result = learner.network("policy").update(list(rows.values()))
            found, _ = on_each(group, gradients)
    finally:
        group.close()
    assert result.metrics["perf/microbatches"] == (2 if of_a_row == 1 else 1)
    np.testing.assert_allclose(np.concatenate(logprobs), torch.cat(single).detach(), atol=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm()) < 1e-5 * float(gradient.norm()), name


@pytest.mark.slow
def test_three_steps_agree_with_the_sampler(large, household, tmp_path):
    """On 0.2.0 every start of this run died in its first update."""
    sums = [{"problem": f"{i}+1?", "answer": str(i + 1)} for i in range(12)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    (tmp_path / "reward.py").write_text(REWARD)
    config = {
        "model": {"path": str(large)},
        "data": {"train": {"name": "table", "path": "sums.jsonl"}, "max_prompt_tokens": 64},
        "rewards": [{"name": "reward.py:even"}],
        "algorithm": {"name": "grpo", "kl": {"coef": 0.05}},
        "sampler": {"group_size": 3, "max_new_tokens": 500, "engine": {"kv_cache_memory_bytes": 2**26}},
        "learner": {"lr": 1e-3, "tokens_per_microbatch": 1000},
        "trainer": {"steps": 3, "prompts_per_step": 5, "run_dir": "run", "save_every": 3},
        "cluster": {"name": "ray", "ranks": 2},
        "trackers": [],
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    result = household.call("-m", "mmrl", "train", "config.yaml", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert all(step["mismatch/logprob_abs_max"] < 1e-4 for step in steps[1:])
    assert all(step["kl/reference"] > 0 for step in steps[2:])
    lengths = [len(record["token_ids"]) for record in rollouts(tmp_path / "run", 1)]
    assert min(lengths) < 60 and max(lengths) > CHUNK_TOKENS
