"""The chain of examples from warm-up to DPO on a run's own rollouts, in a short form, each part from the one before."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrl.engine.aids.tiny_model import write_model
from mmrl.runs.reader import Run, load_run
from mmrl.types import GIVEN
from mmrl_datasets.digits import write_digits

pytestmark = pytest.mark.full

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["trainer.prompts_per_step=16", "trackers=[]", "data.eval.limit=16"]
SIZES = {"sft": 40, "grpo": 2, "dpo": 2}
"""Steps of each part: a warm-up after which some answers are right, as each group must have an order."""


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, warm_mmrl: Callable[..., subprocess.CompletedProcess[str]]
) -> Path:
    """The three runs, as the script starts them."""
    folder = tmp_path_factory.mktemp("own")
    write_model(folder / "model")
    write_digits(folder / "data", warmup=600)

    def train(name: str, *words: str) -> None:
        base = [*SMALL, f"data.eval.path={folder / 'data'}", f"trainer.run_dir={folder / name}"]
        done = warm_mmrl("train", EXAMPLES / f"digits_{name}.yaml", *base, f"trainer.steps={SIZES[name]}", *words)
        assert done.returncode == 0, done.stderr

    def policy(name: str) -> str:
        return f"model.path={load_run(folder / name).policy_path}"

    data = f"data.train.path={folder / 'data'}"
    train("sft", f"model.path={folder / 'model'}", data, "trainer.prompts_per_step=64", "trainer.eval_every=0")
    train("grpo", policy("sft"), data, "trainer.eval_every=0")
    train("dpo", policy("grpo"), f"data.train.path={folder / 'grpo'}", "trainer.eval_every=2")
    return folder


def pairs(run: Run) -> list[list[dict[str, Any]]]:
    """The records of each group."""
    return [
        pages.records(group.place)
        for step in run.rollout_steps
        for pages in [run.groups(step)]
        for group in pages.index(("prompt_id",), ())
    ]


def test_dpo_learns_what_the_run_before_has_sampled_to_the_token_and_with_its_images(folder: Path) -> None:
    sampled, learned = load_run(folder / "grpo"), load_run(folder / "dpo")
    by_id = {
        f"step-{step}/epoch-{each.rollout.prompt.epoch}/{each.rollout.prompt.id}/{each.text}": each
        for step in sampled.rollout_steps
        for each in sampled.rollouts(step)
    }
    groups, same = pairs(learned), 0
    assert len(groups) == 2 * 16 and {len(group) for group in groups} == {2}
    for group in groups:
        assert sorted(each["reward"] for each in group) == [0, 1]
        for each in group:
            then = by_id[f"{each['prompt_id']}/{each['completion']}"]
            assert each["weight_version"] == GIVEN and then.rollout.weight_version != GIVEN
            assert then.rewards["exact"] == each["reward"]
            assert [image["hash"] for image in each["images"]] == [image.hash for image in then.rollout.images]
            assert each["images"] and each["prompt_token_ids"].tolist() == then.rollout.prompt.token_ids.tolist()
            same += each["token_ids"].tolist() == then.rollout.token_ids.tolist()
    assert same > 0.9 * 2 * len(groups), "a policy may write a text in other tokens than the tokenizer's"


def test_the_parts_report_what_the_script_shows(folder: Path) -> None:
    metrics = load_run(folder / "dpo").metrics
    assert list(metrics.curve("eval/accuracy")) == [0, 2] and 0 <= metrics["eval/accuracy"] <= 1
    first, second = metrics.curve("preference/margin").values()
    assert first == pytest.approx(0, abs=1e-6) and second != first
    kinds = [json.loads(line) for line in (folder / "dpo" / "events.jsonl").read_text().splitlines()]
    assert not [each for each in kinds if "read otherwise" in each.get("message", "")], "the template is the same"
