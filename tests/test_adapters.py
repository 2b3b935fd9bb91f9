"""Runs of adapters with vLLM and DeepSpeed: the vision tower is adapted too, on one rank and on two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.conftest import Plain
from tests.faults.comparison import metrics
from tests.faults.harness import Blow
from tests.faults.runs import Runs, events, outcome, rollouts, steps
from tests.runs.test_resumption import EVEN

WORDS = ("<image>What digit is this?", "<image> and <image>, what is the sum?", "what is 3+4?", "<image>Is it a seven?")

KILL = Blow(at=("point", "checkpoint.renamed", 2))
"""Dealt when the checkpoint of step 1 is there, before the step is logged."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, models, picture) -> Runs:
    """Rows with no, one and two images."""
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "even.py").write_text(EVEN)
    for index, size in enumerate([(64, 64), (100, 60), (60, 130)]):
        (folder / f"{index}.png").write_bytes(picture(*size).data)
    found = Runs(folder, models("qwen2_5_vl"))
    rows = [
        {
            "id": f"r{n}",
            "problem": text,
            "images": [f"{(n + i) % 3}.png" for i in range(text.count("<image>"))],
            "answer": "7",
        }
        for n, text in enumerate(WORDS)
    ]
    found.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


def options(runs: Runs, **cluster: Any) -> dict[str, Any]:
    rows = {"name": "table", "path": str(runs.rows)}
    return {
        "model": {
            "path": str(runs.model),
            "dtype": "float32",
            "lora": {"rank": 4, "alpha": 8, "targets": ["language", "vision", "projector"]},
        },
        "rewards": [{"name": f"{runs.folder / 'even.py'}:even"}],
        "data": {"train": rows, "eval": dict(rows), "max_prompt_tokens": 160},
        "algorithm": {"name": "grpo", "kl": {"coef": 0.05}},
        "sampler": {"group_size": 3, "max_new_tokens": 8, "engine": {"kv_cache_memory_bytes": 2**26}},
        "learner": {"lr": 1e-2, "zero_stage": 3, "minibatches": 2, "tokens_per_microbatch": 300},
        "trainer": {"steps": 3, "eval_every": 1, "save_every": 1, "prompts_per_step": 4},
        **cluster,
    }


@pytest.fixture(scope="module")
def plain(runs, warm_mmrl) -> Path:
    """An unbroken run of three steps."""
    done = warm_mmrl("train", runs.config("plain", **options(runs)))
    assert done.returncode == 0, done.stderr
    return runs.folder / "plain"


def adapter(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "model" / "adapter_model.safetensors")


@pytest.mark.proves("lora", family="qwen2_5_vl")
def test_sampler_and_learner_agree_while_adapters_of_every_part_move(plain):
    logged = metrics(plain)
    assert [logged[step]["mismatch/logprob_abs_max"] < 1e-4 for step in (1, 2, 3)] == [True] * 3
    assert logged[1]["policy/grad_norm"] > 0 and logged[2]["kl/reference"] > 1e-5
    first, last = adapter(plain, 1), adapter(plain, 3)
    still = {name for name in first if torch.equal(first[name], last[name])}
    assert len(first) == 52 and any("visual.merger" in name for name in first) and not still


@pytest.mark.full
def test_adapters_go_on_to_the_same_bits_after_a_kill(plain, runs, nursery, warm_mmrl):
    config = str(runs.config(**options(runs)))
    killed = nursery.train([config], KILL)
    assert killed.status == -9 and steps(runs.folder / "run")[-1] == "step-000001", killed.log
    done = warm_mmrl("train", config)
    assert done.returncode == 0, done.stderr
    expected, found = outcome(plain), outcome(runs.folder / "run")
    for part in expected:
        assert found[part] == expected[part], part
    assert [event["step"] for event in events(runs.folder / "run", "resumed")] == [1]


@pytest.mark.full
def test_a_checkpoint_is_evaluated_as_the_run_did_and_exported_whole_or_as_an_adapter(plain, runs, warm_mmrl):
    """vLLM answers with the merged weights; in transformers and peft they have the log-probs that the run recorded."""
    import peft
    import transformers

    checkpoint, logged = plain / "checkpoints" / "step-000002", metrics(plain)
    whole, alone = runs.folder / "whole", runs.folder / "alone"
    for words in ([whole], [alone, "--adapter"]):
        done = warm_mmrl("export", checkpoint, *words)
        assert done.returncode == 0, done.stderr
    assert not (alone / "model.safetensors").exists()
    for model, words, step in ((plain, [], 3), (whole, [runs.folder / "plain.yaml"], 2)):
        done = warm_mmrl("eval", *words, "--model", model, "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)["metrics"]
        for name in ("eval/accuracy", "eval/reward_mean"):
            assert found[name]["value"] == pytest.approx(logged[step][name], abs=1e-9)
    reference = Plain(whole)
    base = transformers.AutoModelForImageTextToText.from_pretrained(runs.model, dtype=torch.float32)
    for model in (reference.model, peft.PeftModel.from_pretrained(base, alone).eval()):
        reference.model = model
        for record in rollouts(plain, 3):
            images = [Image.open(plain / "media" / f"{image['hash']}.png") for image in record["images"]]
            table = reference.distribution(record["prompt"], images, record["token_ids"], temperature=1.0)
            expected = table[np.arange(len(record["token_ids"])), record["token_ids"]].detach()
            np.testing.assert_allclose(expected, record["sampler_logprobs"], atol=1e-4)


@pytest.mark.full
def test_weights_in_4_bits_are_sampled_go_on_after_a_kill_and_are_evaluated_as_the_run_did(runs, nursery, warm_mmrl):
    """Sampler and learner have the same unpacked weights, and a new process quantises to the same bits."""
    sections = options(runs)
    sections["model"]["quantize"] = "nf4"
    sections["trainer"]["steps"] = 2
    done = warm_mmrl("train", runs.config("whole4", **sections))
    assert done.returncode == 0, done.stderr
    whole, again = runs.folder / "whole4", runs.folder / "again4"
    logged = metrics(whole)
    assert all(logged[step]["mismatch/logprob_abs_max"] < 1e-4 for step in (1, 2)) and logged[2]["kl/reference"] > 1e-5
    config = str(runs.config("again4", **sections))
    killed = nursery.train([config], KILL)
    assert killed.status == -9 and steps(again)[-1] == "step-000001", killed.log
    done = warm_mmrl("train", config)
    assert done.returncode == 0, done.stderr
    expected, found = outcome(whole), outcome(again)
    for part in expected:
        assert found[part] == expected[part], part
    done = warm_mmrl("eval", "--model", whole, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["eval/reward_mean"]["value"] == pytest.approx(
        logged[2]["eval/reward_mean"], abs=1e-9
    )


@pytest.mark.slow
def test_two_ranks_adapt_as_one_does(plain, runs, household):
    config = options(runs, cluster={"name": "ray", "ranks": 2})
    done = household.run("train", str(runs.config("two", **config)), folder=runs.folder)
    assert done.returncode == 0, done.stderr
    one, two = metrics(plain), metrics(runs.folder / "two")
    assert all(two[step]["mismatch/logprob_abs_max"] < 1e-4 for step in (1, 2, 3))
    assert two[1]["policy/grad_norm"] == pytest.approx(one[1]["policy/grad_norm"], rel=1e-3)
    pairs = zip(*(rollouts(run, 1) for run in (plain, runs.folder / "two")), strict=True)
    assert np.mean([one["token_ids"] == two["token_ids"] for one, two in pairs]) > 0.9
