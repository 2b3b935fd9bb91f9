"""Ranks that share a row: what is refused before engines start, and what a run says of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from mmrl.commands.cli import main

Write = Callable[..., str]


@pytest.fixture
def write(models: Callable[[str], Path], tmp_path: Path) -> Write:
    """Writes a config of a text model for eight ranks, of which so many share a row."""

    def config(size: int, family: str = "qwen2", **sections: Any) -> str:
        rows = [{"problem": f"what is {i}+1?", "answer": str(i + 1)} for i in range(5)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        base: dict[str, Any] = {
            "model": {"path": str(models(family))},
            "data": {"train": {"name": "table", "path": str(tmp_path / "rows.jsonl")}, "max_prompt_tokens": 64},
            "rewards": [{"name": "exact"}],
            "algorithm": {"name": "grpo"},
            "sampler": {"max_new_tokens": 16},
            "learner": {"sequence_parallel_size": size},
            "trainer": {"prompts_per_step": 5, "run_dir": str(tmp_path / "run")},
            "cluster": {"name": "ray", "ranks": 8},
        }
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(base | sections))
        return str(path)

    return config


def other_heads(source: Path, folder: Path, heads: int) -> str:
    """A copy of a text model's folder with another number of heads; its weights are of no use."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 16})
    )
    return str(folder)


@pytest.mark.parametrize("command", ["check", "plan", "train"])
def test_heads_that_ranks_cannot_divide_are_refused_with_the_sizes_that_they_can(write, capsys, command):
    assert main([command, write(8)]) == 2
    error = capsys.readouterr().err
    assert "8 ranks cannot divide the heads of a network whose rows they share: it has 4 attention heads" in error
    assert "learner.sequence_parallel_size: 8; model.path: " in error
    assert "1, 2, 4 (2 heads of keys and values, each 2 times); with cluster.ranks: 8" in error


def test_heads_of_linear_attention_are_divided_too(write, capsys):
    assert main(["check", write(4, "qwen3_5_text")]) == 2
    error = capsys.readouterr().err
    assert "its linear attention has 2 heads of values" in error
    assert "possible: 1, 2 (1 heads of keys in linear attention, each 2 times); with" in error


def test_layers_of_gemma_4_may_repeat_other_heads_than_its_first(write, capsys, models, tmp_path):
    assert main(["check", write(8, "gemma4")]) == 2
    assert "heads of keys and values, each" in capsys.readouterr().err


def test_a_teachers_heads_count_too(write, capsys, models, tmp_path):
    teacher = other_heads(models("qwen2"), tmp_path / "teacher", 6)
    taught = {"algorithm": {"name": "grpo", "kl": {"coef": 0.1}}, "reference": {"path": teacher}}
    assert main(["plan", write(4, **taught)]) == 2
    error = capsys.readouterr().err
    assert (
        f"it has 6 attention heads\n  where:    learner.sequence_parallel_size: 4; reference.path: {teacher}" in error
    )
    assert "possible: 1, 2 (1 heads of keys and values, each 2 times); with cluster.ranks: 8" in error


def test_a_critics_heads_count_too(write, capsys, models, tmp_path):
    critic = other_heads(models("qwen2"), tmp_path / "critic", 6)
    trained = {"algorithm": {"name": "ppo"}, "critic": {"path": critic}}
    assert main(["plan", write(4, **trained)]) == 2
    assert f"it has 6 attention heads\n  where:    learner.sequence_parallel_size: 4; critic.path: {critic}" in (
        capsys.readouterr().err
    )


def test_passes_that_exchange_rows_are_not_compiled(write, capsys):
    learner = {"sequence_parallel_size": 2, "deepspeed": {"compile": {"deepcompile": True}}}
    assert main(["check", write(2, learner=learner)]) == 2
    error = capsys.readouterr().err
    assert "ranks exchange parts of a row" in error and "learner.deepspeed.compile; learner.sequence_parallel" in error


def test_check_counts_the_rows_of_ranks_that_share_them_and_warns_of_longer_samples(write, capsys):
    learner = {"sequence_parallel_size": 2, "tokens_per_microbatch": 20}
    assert main(["check", write(2, learner=learner), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batches"]["tokens_per_row"] == 40 and 20 < found["batches"]["longest_sample"] <= 40
    assert not [each for each in found["warnings"] if "one sample may take" in each]
    learner["tokens_per_microbatch"] = 10
    assert main(["check", write(2, learner=learner), "--json"]) == 0
    (said,) = (each for each in json.loads(capsys.readouterr().out)["warnings"] if "one sample may take" in each)
    assert "more than learner.tokens_per_microbatch = 10 on each of 2 ranks that share a row (20)" in said


def test_check_warns_of_an_image_that_has_more_tokens_than_a_rank_is_to_hold(write, capsys, tmp_path):
    for name, size in (("0.png", (56, 56)), ("1.png", (112, 84))):
        Image.new("RGB", size, "white").save(tmp_path / name)
    rows = [{"problem": "<image>which?", "answer": "1", "images": [f"{i % 2}.png"]} for i in range(5)]
    told = {}
    for size, tokens in ((2, 11), (2, 12), (1, 11)):
        learner = {"sequence_parallel_size": size, "tokens_per_microbatch": tokens}
        path = write(size, "qwen2_5_vl", learner=learner)
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert main(["check", path, "--json"]) == 0
        warnings = json.loads(capsys.readouterr().out)["warnings"]
        told[size, tokens] = [each for each in warnings if each.startswith("an image takes 12 tokens, more than")]
    assert told[2, 12] == told[1, 11] == []
    (said,) = told[2, 11]
    assert "one of them computes the whole image in the vision tower" in said and "data.max_pixels" in said
