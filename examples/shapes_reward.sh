#!/usr/bin/env bash
# A reward model of drawn shapes, whose truth is known, in 60 steps, and a policy that learns from it: SFT until two
# thirds are named, the reward model, and GRPO with it. The truth judges the policy's held-out answers.
#
#   bash examples/shapes_reward.sh [overrides of all runs]
#   SEED=1                        of the model, the drawings and the runs (default: 0)
#   MMRL_VENV=DIR                 the virtual environment (default: .venv)
source "$(dirname "${BASH_SOURCE[0]}")/setup/stages.sh" shapes_reward

overrides=("$@")

train() { # CONFIG MODEL EVALUATED OVERRIDES...
    "$python" -m mmrl train "examples/digits_$1.yaml" "trainer.run_dir=$run/$1" "trainer.seed=$seed" "model.path=$2" \
        "data.train.path=$base/data" "data.eval.path=$3" sampler.max_new_tokens=8 \
        'trackers=[]' "${@:4}" "${overrides[@]}"
}

say "A random Qwen2.5-VL of 0.6 million parameters, and drawings of one thing each: twelve names"
"$python" examples/tiny_model.py "$base/model" --seed "$seed" --gain 4 \
    --words "red,green,blue,yellow, circle, square, triangle"
"$python" -m mmrl_datasets.shapes "$base/data" --single 1 --warmup 600 --verdicts 4000 --seed "$seed"

say "SFT, until two thirds of what it samples is right"
train sft "$base/model" "$base/data" trainer.steps=120 trainer.eval_every=10 trainer.eval_samples=4 \
    trainer.save_every=0 'trainer.stop_when=eval/accuracy >= 0.65'

say "The reward model, in 60 steps: things with all twelve names, and the policy's own answers, which exact has marked"
for split in train test; do
    "$python" -m mmrl eval --model "$run/sft" "data.eval.split=$split" --limit 500 --samples 8 --temperature 1 \
        --output "$run/answers/$split"
done
train reward "$(last sft)" "$run/answers/test" "data.mix.0.path=$run/answers/train" trainer.steps=60 \
    trainer.prompts_per_step=128 trainer.eval_every=30 learner.minibatches=2 learner.lr=2e-3 learner.warmup_steps=15

say "GRPO from the SFT policy, with the reward model, and a rule that an answer has its end"
train rlhf "$(last sft)" "$base/data" "rewards.0.path=$(last reward reward/model)" learner.lr=1e-3 \
    algorithm.kl.coef=0.05 trainer.prompts_per_step=48 trainer.steps=70

"$python" - "$run" <<'PYTHON'
import sys
from pathlib import Path

import mmrl

run = Path(sys.argv[1])


def told(name: str) -> str:
    first, *_, last = mmrl.load_run(run / name).metrics.curve("eval/accuracy").values()
    return f"{first:.1%} before, {last:.1%} after"


print("\n== Held out: pictures that no stage has seen")
print(f"Pairs of the policy's own answers in the right order: {told('reward')} the 60 steps of the reward model")
print(f"Things that the policy names, sampled: {told('rlhf')} GRPO; it was never told the truth")
PYTHON
