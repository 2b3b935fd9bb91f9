#!/usr/bin/env bash
# Teaches a tiny vision-language policy to look closer: to read a digit on a page that it sees in too few pixels.
#
#   bash examples/zoom.sh [overrides of all runs]
#   SEED=1                    of the model, the pages and the runs (default: 0)
#   MMRL_VENV=DIR             the virtual environment (default: .venv)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(bash "$root/examples/setup/install.sh")
cd "$root"

seed=${SEED:-0}
base=runs/zoom/seed-$seed
run=$base/$(date +%Y%m%d-%H%M%S)

say() { printf '\n== %s\n' "$*"; }

train() { # CONFIG FOLDER FURTHER_CONFIGS_AND_OVERRIDES...
    "$python" -m mmrl train "examples/$1.yaml" "${@:3}" "data.train.path=$base/data" "trainer.run_dir=$run/$2" \
        "trainer.seed=$seed"
}

warmed_up() { find "$run/$1/checkpoints" -path '*/step-*/model' -type d | sort | tail -n 1; }

say "A random Qwen2.5-VL of 0.6 million parameters, and pages of 100 handwritten digits"
"$python" examples/tiny_model.py "$base/model" --seed "$seed" --words zoom,assistant
"$python" -m mmrl_datasets.pages "$base/data" --seed "$seed"

say "With the tool: warm-up, half of which looks at a cell before it answers"
train zoom_sft with/sft "model.path=$base/model" "$@"
say "With the tool: reinforcement learning"
train zoom_grpo with/grpo examples/zoom_tool.yaml "model.path=$(warmed_up with/sft)" "data.eval.path=$base/data" "$@"

say "Without the tool: warm-up on the same questions, answered at once"
train zoom_sft without/sft "model.path=$base/model" data.train.split=direct "$@"
say "Without the tool: reinforcement learning"
train zoom_grpo without/grpo "model.path=$(warmed_up without/sft)" "data.eval.path=$base/data" "$@"

"$python" examples/draw_episode.py "$run/with/grpo" "$run/episode.png"
"$python" - "$run" <<'PYTHON'
import sys
from pathlib import Path

import mmrl

run = Path(sys.argv[1])
accuracy = {}
for name, what in {"with": "With the tool", "without": "Without it"}.items():
    metrics = mmrl.load_run(run / name / "grpo").metrics
    course = [*metrics.curve("eval/accuracy").values()]
    accuracy[name] = course[-1]
    print(f"\n== {what}: held-out accuracy {course[0]:.1%} after the warm-up, {course[-1]:.1%} in the end")
turns = [*mmrl.load_run(run / "with" / "grpo").metrics.curve("episode/turns_mean").values()]
first, last = (sum(part) / len(part) - 1 for part in (turns[:5], turns[-5:]))
print(f"\nThe tool is worth {100 * (accuracy['with'] - accuracy['without']):.1f} points.")
print(f"Episodes that use it: {first:.1%} in the first five steps, {last:.1%} in the last five.")
print(f"An episode: {run}/episode.png")
PYTHON
