"""The reward model of drawn shapes in a short form: verdicts teach it, and GRPO takes its scores and not the truth."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mmrl import load_run
from mmrl.engine.aids.tiny_model import write_model
from mmrl_datasets.shapes import write_shapes

pytestmark = pytest.mark.full

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = ("red", "green", "blue", "yellow", " circle", " square", " triangle")


def test_a_reward_model_learns_the_names_of_shapes_and_scores_a_policys(
    tmp_path: Path, warm_mmrl: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Without the policy's own answers, so that no warm-up is needed; ``test_pipeline.py`` has these."""
    model = write_model(tmp_path / "model", words=WORDS, gain=4.0)
    data = tmp_path / "data"
    write_shapes(data, train=8, test=8, verdicts=32, single=1.0)

    def train(name: str, *words: str) -> None:
        base = [f"model.path={model}", f"data.train.path={data}", "learner.warmup_steps=0", "trackers=[]"]
        sizes = ["trainer.prompts_per_step=8", "sampler.max_new_tokens=8", f"trainer.run_dir={tmp_path / name}"]
        done = warm_mmrl("train", EXAMPLES / f"digits_{name}.yaml", *base, *sizes, *words)
        assert done.returncode == 0, done.stderr

    verdicts = f"data.eval={{name: table, path: {data}, split: verdicts}}"
    train("reward", "data.mix=[]", verdicts, "trainer.steps=4", "trainer.eval_every=4", "learner.minibatches=2")
    learned = load_run(tmp_path / "reward")
    shown = [each for step in learned.rollout_steps for each in learned.rollouts(step)]
    assert len(shown) == 4 * 8 * 12 and sum(each.rewards["score"] for each in shown) == 4 * 8
    first, last = learned.metrics.curve("eval/loss").values()
    assert last < first

    train(
        "rlhf",
        f"rewards.0.path={learned.policy_path}",
        f"data.eval.path={data}",
        "trainer.steps=1",
        "sampler.group_size=2",
    )
    run = load_run(tmp_path / "rlhf")
    sampled = [each.rewards for each in run.rollouts(1)]
    assert {each["exact"] for each in sampled} <= {0, 1}
    told = [each["model"] + 5 * each["format"] for each in sampled]
    assert run.metrics["reward/mean"] == pytest.approx(sum(told) / len(told)), "exact weighs nothing"
