"""Bad input, from the command line: the message, the exit code, no traceback, and a folder that can be used again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmrl.commands.cli import main
from mmrl_datasets.digits import write_digits

REWARDS = """\
def good(rollouts):
    return [float((rollout.token_ids % 2 == 0).mean()) for rollout in rollouts]

def raises(rollouts):
    raise LookupError("no such reference")

def forgets_one(rollouts):
    return [0.5] * (len(rollouts) - 1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits, sums in text, images that are none, and rewards of a file."""
    folder = tmp_path_factory.mktemp("bad")
    write_digits(folder / "digits", train=6, test=3)
    sums = [{"problem": f"what is {i}+1?", "answer": str(i + 1)} for i in range(6)]
    notes = [{"problem": "<image>what?", "images": ["note.png"], "answer": "1"}] * 2
    for name, rows in {"sums": sums, "notes": notes}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "note.png").write_bytes(b"<html>not found</html>")
    (folder / "rewards.py").write_text(REWARDS)
    return folder


@pytest.fixture
def train(folder, models, tmp_path, capsys) -> Callable[..., tuple[int, str]]:
    """Trains on digits, unless ``changes`` says otherwise; returns exit code and stderr. Dots lead into sections."""

    def run(**changes: Any) -> tuple[int, str]:
        config: dict[str, Any] = {
            "model": {"path": str(models("qwen2_5_vl"))},
            "data": {"train": {"name": "table", "path": str(folder / "digits"), "split": "train"}},
            "rewards": [{"name": "exact"}],
            "algorithm": {"name": "grpo"},
            "sampler": {"name": "hf", "group_size": 3, "max_new_tokens": 6},
            "learner": {"lr": 1e-3, "zero_stage": 0},
            "trainer": {"steps": 1, "prompts_per_step": 2, "run_dir": str(tmp_path / "run")},
        }
        for key, value in changes.items():
            section, _, name = key.partition(".")
            config[section] = config[section] | {name: value} if name else value
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        code = main(["train", str(path)])
        return code, capsys.readouterr().err

    return run


@pytest.fixture
def text_model(folder, models) -> dict[str, Any]:
    """Changes that train a text model on sums: the fastest start of real engines."""
    return {
        "model.path": str(models("qwen2")),
        "data.train": {"name": "table", "path": str(folder / "sums.jsonl")},
    }


@pytest.fixture
def shared_group(start, monkeypatch) -> None:
    """Lets a run in this process end without the process group that other tests' engines are in."""
    from mmrl.engine.rank import RankEngine

    monkeypatch.setattr(RankEngine, "close", lambda self: None)


@pytest.mark.parametrize(
    ("changes", "code", "fragments"),
    [
        ({"model.path": "/no/such/model"}, 2, ["no model folder at /no/such/model", "model.path"]),
        ({"algorithm": {"name": "grpoo"}}, 4, ["grpoo", "did you mean grpo?", "config.yaml:"]),
        ({"rewards": [{"name": "no/file.py:score"}]}, 4, ["no/file.py", "cannot read"]),
        ({"sampler.top_p": 0.9}, 2, ["sampler.top_p must be 1.0", "renormalised", "config.yaml:"]),
        ({"sampler.top_k": 20}, 2, ["sampler.top_k must be -1"]),
        ({"sampler.temperature": 0.0}, 2, ["sampler.temperature", "0.01"]),
        ({"sampler.group_size": 1}, 2, ["'grpo' compares the completions of a prompt", "sampler.group_size: 1"]),
        ({"rewards": []}, 2, ["'grpo' needs a reward"]),
        (
            {"environment": {"name": "zoom", "max_turns": 0}},
            2,
            ["environment.max_turns should be greater than or"],
        ),
        ({"environment": {"name": "zoom", "max_turn": 3}}, 2, ["max_turn", "did you mean max_turns?", "config.yaml:"]),
        ({"environment": {"name": "zoomm"}}, 4, ["zoomm", "did you mean zoom?"]),
        ({"environment": {"name": "no/file.py:Game"}}, 4, ["no/file.py", "cannot read"]),
        (
            {"environment": {"name": "zoom", "max_tokens": 3}},
            2,
            ["environment.max_tokens is 3, less than one turn: sampler.max_new_tokens is 6"],
        ),
        ({"trainer.prompts_per_step": 7}, 3, ["fewer rows than one step needs", "6 rows", "trainer.prompts_per_step"]),
        ({"data.max_prompt_tokens": 9}, 3, ["No row is left", "6 rows of", "data.max_prompt_tokens = 9"]),
        ({"data.max_prompt_tokens": 9, "data.overlong": "fail"}, 3, ["A prompt is too long", "row train/0"]),
        ({"learner.deepspeed": {"zero_optimisation": {}}}, 2, ["learner.deepspeed", "zero_optimisation"]),
        (
            {"learner.deepspeed": {"tensor_parallel": {"autotp_size": 2}}},
            2,
            ["layers cannot be divided", "zero_stage: 3"],
        ),
        ({"learner.deepspeed": {"compile": {"passes": ["autotp"]}}}, 2, ["does not take compile.passes"]),
        ({"learner.deepspeed": {"zero_optimization": {"stage": 2}}}, 2, ["does not take zero_optimization.stage"]),
        ({"learner.deepspeed": {"zero_optimization": 3}}, 2, ["zero_optimization is 3, and it holds settings"]),
        ({"learner.deepspeed": {"compile": True}}, 2, ["learner.deepspeed.compile is True"]),
        (
            {"learner.deepspeed": {"zero_optimization": {"sub_group_size": "many"}}},
            2,
            ["sub_group_size is 'many', and not a number", "such as 5e8"],
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_bad_value_is_explained_before_anything_starts(changes, code, fragments, train, tmp_path):
    found, error = train(**changes)
    assert found == code, error
    assert all(fragment in error for fragment in fragments), error
    assert "Traceback" not in error
    assert not {path.name for path in tmp_path.rglob("*")} & {"metrics.jsonl", "checkpoints", "rollouts"}


@pytest.mark.parametrize(
    ("source", "fragments"),
    [
        ({"path": "/no/such/rows.jsonl"}, ["/no/such/rows.jsonl"]),
        ({"path": "sums.jsonl", "prompt": "question"}, ["no column 'question'", "problem, answer"]),
        ({"path": "notes.jsonl"}, ["These bytes are no image", "row 0, images[0]", "PNG, JPEG"]),
    ],
)
def test_bad_data_is_explained_before_anything_starts(source, fragments, train, folder):
    code, error = train(**{"data.train": {"name": "table", **source, "path": str(folder / source["path"])}})
    assert code == 3, error
    assert all(fragment in error for fragment in fragments), error
    assert "Traceback" not in error


def test_supervised_training_needs_demonstrations(train, text_model):
    code, error = train(**text_model, algorithm={"name": "sft"}, rewards=[])
    assert code == 3
    assert "all 6 rows cannot be used, for one cause: The row has no demonstration to learn from" in error
    assert "data.train, row sums/0" in error and "name the column that holds the completions" in error


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_images_are_refused_by_a_text_model(family, train, models):
    code, error = train(**{"model.path": str(models(family))})
    assert code == 3
    assert "reads text only" in error and "train/0" in error


def test_an_unsupported_model_is_refused_with_the_list_of_those_that_are(train, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "mixtral"}')
    (model / "model.safetensors").write_bytes(b"")  # never read
    code, error = train(**{"model.path": str(model)})
    assert code == 2
    assert "'mixtral' are not supported" in error and "Traceback" not in error
    assert all(name in error for name in ("qwen2_5_vl (Qwen2.5-VL)", "Qwen2.5, DeepSeek", "llama (Llama 3"))


def test_after_a_failed_start_the_folder_can_be_used(train, text_model, shared_group, tmp_path):
    assert train(**text_model | {"model.path": "/no/such/model"})[0] == 2
    assert train(**text_model | {"trainer.prompts_per_step": 9})[0] == 3
    assert train(**text_model) == (0, "")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["exit_code"] for event in events if event["kind"] == "error"] == [2, 3]


def test_a_reward_that_fails_is_named_and_the_folder_can_be_used(train, text_model, shared_group, folder, tmp_path):
    def with_reward(name: str) -> tuple[int, str]:
        return train(**text_model, rewards=[{"name": f"{folder / 'rewards.py'}:{name}"}])

    code, error = with_reward("raises")
    assert code == 4, error
    assert "rewards.py:raises" in error and "LookupError: no such reference" in error and "rewards.py:5" in error
    assert "prompt 'sums/" in error or "prompt 'train/" in error
    assert "Traceback" not in error and "run/events.jsonl has the details" in error
    (event,) = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert "Traceback" in event["details"] and event["exit_code"] == 4

    code, error = with_reward("forgets_one")
    assert code == 4
    assert "forgets_one' answered 1 score\n" in error and "2 scores, one per rollout" in error

    assert with_reward("good") == (0, "")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]
    assert with_reward("good") == (0, "")  # it is finished
    assert (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() == lines
