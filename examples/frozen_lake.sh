#!/usr/bin/env bash
# Teaches a tiny vision-language policy to walk over frozen lakes that it sees as pictures, many turns an episode.
#
#   bash examples/frozen_lake.sh [overrides of both runs]
#   SEED=1                    of the model, the maps and the runs (default: 0)
#   MMRL_VENV=DIR             the virtual environment (default: .venv)
source "$(dirname "${BASH_SOURCE[0]}")/setup/stages.sh" frozen_lake

train() { # CONFIG FOLDER OVERRIDES...
    "$python" -m mmrl train "examples/$1.yaml" "data.train.path=$base/data" "trainer.run_dir=$run/$2" \
        "trainer.seed=$seed" "${@:3}"
}

say "A random Qwen2.5-VL of 0.6 million parameters, and frozen lakes of 4 x 4 fields"
"$python" examples/tiny_model.py "$base/model" --seed "$seed" --words left,down,right,up,assistant \
    --gain 4 # without it three times as many steps are needed to see what a map has to do with a way
"$python" -m mmrl_datasets.lakes "$base/data" --seed "$seed"

say "Supervised warm-up: shortest paths over other lakes, whole conversations"
train frozen_lake_sft sft "model.path=$base/model" "$@"

say "Reinforcement learning from there"
train frozen_lake_grpo grpo "model.path=$(last sft)" "data.eval.path=$base/data" "$@"

"$python" examples/draw_episode.py "$run/grpo" "$run/episode.png"
"$python" - "$run" <<'PYTHON'
import sys
from pathlib import Path

import mmrl

run = Path(sys.argv[1])
metrics = mmrl.load_run(run / "grpo").metrics
success = [*metrics.curve("eval/accuracy").values()]
turns = [*metrics.curve("episode/turns_mean").values()]
print(f"\n== Held-out lakes crossed: {success[0]:.1%} after the warm-up, {success[-1]:.1%} in the end")
print(f"Turns an episode: {sum(turns[:5]) / 5:.1f} in the first five steps, {sum(turns[-5:]) / 5:.1f} in the last five.")
print(f"An episode: {run}/episode.png")
PYTHON
