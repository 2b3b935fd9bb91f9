#!/usr/bin/env bash
# Teaches a tiny vision-language policy to read digits in three parts, each from the folder of the one before:
# supervised warm-up, reinforcement learning, and DPO on the rollouts that the latter has recorded.
#
#   bash examples/own_rollouts.sh [overrides of all three runs]
#   SEED=1                        of the model and the runs (default: 0)
#   MMRL_VENV=DIR                 the virtual environment (default: .venv)
source "$(dirname "${BASH_SOURCE[0]}")/setup/stages.sh" own_rollouts

train() { # CONFIG FOLDER OVERRIDES...
    "$python" -m mmrl train "examples/$1.yaml" "data.eval.path=$base/data" "trainer.run_dir=$run/$2" \
        "trainer.seed=$seed" "${@:3}"
}

say "A random Qwen2.5-VL of 0.6 million parameters, and 1,797 real handwritten digits"
"$python" examples/tiny_model.py "$base/model" --seed "$seed"
"$python" -m mmrl_datasets.digits "$base/data" --warmup 600

say "Supervised warm-up, to about half right"
train digits_sft sft "model.path=$base/model" "data.train.path=$base/data" "$@"

say "Reinforcement learning from there, 60 steps"
train digits_grpo grpo "model.path=$(last sft)" "data.train.path=$base/data" trainer.steps=60 "$@"

say "DPO from there, on the groups that these 60 steps have sampled"
train digits_dpo dpo "model.path=$(last grpo)" "data.train.path=$run/grpo" "$@"

"$python" - "$run" <<'PYTHON'
import sys
from pathlib import Path

import mmrl

run = Path(sys.argv[1])
metrics = {name: mmrl.load_run(run / name).metrics for name in ("sft", "grpo", "dpo")}
shown = {name: f"{each['eval/accuracy']:.1%}" for name, each in metrics.items()}
print(f"\n== Held-out digits read: {shown['sft']} after the warm-up, {shown['grpo']} after GRPO, {shown['dpo']} after DPO")
margin = [*metrics["dpo"].curve("preference/margin").values()]
print(f"Margin of the implicit rewards: {margin[0]:.2f} at the first step of DPO, {margin[-1]:.2f} at the last.")
print(f"What DPO learned from: mmrl rollouts {run}/dpo")
PYTHON
