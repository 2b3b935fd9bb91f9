"""The pipeline of examples, from documents to DPO, in a short form: each stage from the folder of the one before."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mmrl import load_evaluation, load_run
from mmrl.engine.aids.tiny_model import write_model
from mmrl.types import DOCUMENT, GIVEN, SCORE
from mmrl_datasets.digits import write_digits

pytestmark = pytest.mark.full

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["trackers=[]", "trainer.eval_every=100"]
PROMPTS = 16
CONFIGS = {"pretrain": 2, "sft": 40, "reward": 3, "rlhf": 2, "dpo": 2}
"""Steps of each stage; the second is a warm-up after which some answers are right, as a pair needs one that is."""


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, warm_mmrl: Callable[..., subprocess.CompletedProcess[str]]
) -> Path:
    """The runs and the evaluations, as the script starts them."""
    folder = tmp_path_factory.mktemp("pipeline")
    write_model(folder / "model")
    write_digits(folder / "data", captions=80, warmup=600, verdicts=16)

    def mmrl(*words: object) -> None:
        done = warm_mmrl(*words)
        assert done.returncode == 0, done.stderr

    def train(name: str, *words: str, prompts: int = PROMPTS) -> None:
        base = [f"trainer.run_dir={folder / name}", f"trainer.steps={CONFIGS[name]}"]
        mmrl("train", EXAMPLES / f"digits_{name}.yaml", *SMALL, *base, f"trainer.prompts_per_step={prompts}", *words)

    def model(name: str) -> str:
        return f"model.path={load_run(folder / name).policy_path}"

    held_out = [f"data.eval.path={folder / 'data'}", "data.eval.limit=16"]
    data = [f"data.train.path={folder / 'data'}", *held_out]
    train("pretrain", f"model.path={folder / 'model'}", *data)
    train("sft", model("pretrain"), *data, prompts=64)
    for split in ("train", "test"):
        words = [f"data.eval.split={split}", "data.eval.limit=64", "--samples", 8, "--temperature", 1]
        mmrl("eval", "--model", folder / "sft", *words, "--output", folder / "answers" / split)
    answers = [f"data.{key}.path={folder / 'answers' / split}" for key, split in (("mix.0", "train"), ("eval", "test"))]
    train("reward", model("sft"), data[0], *answers, "learner.warmup_steps=0", prompts=8)
    train(
        "rlhf",
        model("sft"),
        *data,
        "learner.warmup_steps=0",
        f"rewards.0.path={load_run(folder / 'reward').policy_path}",
    )
    train("dpo", model("rlhf"), f"data.train.path={folder / 'rlhf'}", *held_out, prompts=8)
    return folder


def test_pretraining_learns_all_text_of_the_documents_and_tells_the_loss_of_held_out_ones(folder: Path) -> None:
    run = load_run(folder / "pretrain")
    for each in run.rollouts(1):
        rollout = each.rollout
        assert [message.role for message in rollout.prompt.prompt.messages] == [DOCUMENT]
        assert len(rollout.all_images) == rollout.text.count("<image>") > 0
        learned = np.flatnonzero(rollout.mask)
        assert len(learned) > len(rollout.text.replace("<image>", "").split()), "the values and the end"
    first, last = run.metrics.curve("eval/loss").values()
    assert last < first and run.metrics["eval_blank/loss"] > 0


def test_the_reward_model_learns_verdicts_and_the_policys_own_answers_as_exact_judges_them(folder: Path) -> None:
    sampled = {
        (each.rollout.prompt.id, each.text): each for each in load_evaluation(folder / "answers" / "train").rollouts()
    }
    run = load_run(folder / "reward")
    rows = [each for step in run.rollout_steps for each in run.rollouts(step)]
    assert all(each.rollout.weight_version == GIVEN for each in rows)
    own = [each for each in rows if each.rollout.prompt.id.startswith("recorded/")]
    assert 0 < len(own) < len(rows)
    for each in own:
        name = each.rollout.prompt.id.partition("/")[2]
        assert sampled[name, each.text].rewards["exact"] == each.rewards[SCORE]
    assert 0 <= run.metrics["eval/accuracy"] <= 1
    config = json.loads((run.policy_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen2_5_VLForSequenceClassification"] and config["num_labels"] == 1


def test_the_policy_learns_from_the_reward_model_and_the_form_and_dpo_from_their_order(folder: Path) -> None:
    sampled, learned = load_run(folder / "rlhf"), load_run(folder / "dpo")
    for each in sampled.rollouts(1):
        assert isinstance(each.rewards["model"], float) and each.rewards["exact"] in (0, 1)
    assert 0 <= sampled.metrics["eval/accuracy"] <= 1
    rollouts = [each for step in (1, 2) for each in sampled.rollouts(step)]
    then = {
        (each.rollout.prompt.id, each.text): each.rewards["model"] + 5 * each.rewards["format"] for each in rollouts
    }
    for each in (each for step in learned.rollout_steps for each in learned.rollouts(step)):
        name = each.rollout.prompt.id.rpartition("epoch-0/")[2]
        assert each.rewards[SCORE] == pytest.approx(then[name, each.text])
