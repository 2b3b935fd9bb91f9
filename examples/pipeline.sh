#!/usr/bin/env bash
# The stages of a post-training pipeline on handwritten digits, each from the folder of the one before: continued
# pretraining on documents with images, SFT, a reward model, GRPO with that reward model, and DPO on what GRPO has sampled.
#
#   bash examples/pipeline.sh [overrides of all runs]
#   SEED=1                        of the model and the runs (default: 0)
#   MMRL_VENV=DIR                 the virtual environment (default: .venv)
source "$(dirname "${BASH_SOURCE[0]}")/setup/stages.sh" pipeline

train() { # CONFIG FOLDER OVERRIDES...
    "$python" -m mmrl train "examples/$1.yaml" "trainer.run_dir=$run/$2" "trainer.seed=$seed" "${@:3}"
}

say "A random Qwen2.5-VL of 0.6 million parameters, and 1,797 real handwritten digits"
"$python" examples/tiny_model.py "$base/model" --seed "$seed"
"$python" -m mmrl_datasets.digits "$base/data" --captions 1200 --warmup 100 --verdicts 1400
data=("data.train.path=$base/data" "data.eval.path=$base/data")

say "PT: continued pretraining on 1,200 documents of digits with captions"
train digits_pretrain pretrain "model.path=$base/model" "${data[@]}" "$@"

say "SFT: 100 questions with answers"
train digits_sft sft "model.path=$(last pretrain)" "${data[@]}" trainer.steps=40 "$@"

say "RM: answers of which one is right, to digits that were labelled, and the policy's own, which exact has marked"
for split in train test; do
    "$python" -m mmrl eval --model "$run/sft" "data.eval.split=$split" --samples 8 --temperature 1 \
        --output "$run/answers/$split"
done
train digits_reward reward "model.path=$(last sft)" "data.train.path=$base/data" \
    "data.mix.0.path=$run/answers/train" "data.eval.path=$run/answers/test" "$@"

say "RLHF: GRPO from the SFT policy, with the reward model, and a rule that an answer has its end"
train digits_rlhf grpo "model.path=$(last sft)" "rewards.0.path=$(last reward reward/model)" "${data[@]}" "$@"

say "DPO from there, on the groups that GRPO has sampled, in the order of its rewards"
train digits_dpo dpo "model.path=$(last grpo)" "data.train.path=$run/grpo" "data.eval.path=$base/data" \
    trainer.steps=40 learner.lr=1e-4 "$@"

"$python" - "$run" <<'PYTHON'
import sys
from pathlib import Path

import mmrl

run = Path(sys.argv[1])
metrics = {name: mmrl.load_run(run / name).metrics for name in ("pretrain", "sft", "reward", "grpo", "dpo")}


def told(name, metric, form):
    first, *_, last = metrics[name].curve(metric).values()
    return f"{first:{form}} to {last:{form}}"


print("\n== Held out: digits that no stage has seen")
blank = metrics["pretrain"]["eval_blank/loss"]
print(f"PT     loss of a caption's token  {told('pretrain', 'eval/loss', '.2f')}; {blank:.2f} with blank pictures")
print(f"SFT    digits read                {told('sft', 'eval/accuracy', '.1%')}")
blank = metrics["reward"]["eval_blank/accuracy_gap"]
print(f"RM     pairs in the right order   {told('reward', 'eval/accuracy', '.1%')}; {blank:.1%} more than with blank ones")
print(f"GRPO   digits read                {told('grpo', 'eval/accuracy', '.1%')}; never told to the policy")
print(f"DPO    digits read                {told('dpo', 'eval/accuracy', '.1%')}")
print(f"The last policy: {mmrl.load_run(run / 'dpo').policy_path}")
PYTHON
