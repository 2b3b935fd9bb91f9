#!/usr/bin/env bash
# Trains a tiny vision-language policy to click into drawn windows, and to operate them in two to four actions.
#
#   bash examples/screens.sh [overrides of both runs of reinforcement learning]
#   SEED=1                    of the model, the windows and the runs (default: 0)
#   MMRL_VENV=DIR             the virtual environment (default: .venv)
source "$(dirname "${BASH_SOURCE[0]}")/setup/stages.sh" screens

overrides=("$@")

read -r -a cores <<<"$("$python" -c 'import os; print(*sorted(os.sched_getaffinity(0)))')"

pin=()
train() { # CONFIG FOLDER OVERRIDES...
    "${pin[@]}" "$python" -m mmrl train "examples/$1.yaml" "data.train.path=$base/data" "trainer.run_dir=$run/$2" \
        "trainer.seed=$seed" "${@:3}"
}

part() { # CONFIG FOLDER CORE: reinforcement learning from the warm-up, on a core of its own
    local log=$run/$2.log pin=(taskset -c "$3")
    train "$1" "$2" "model.path=$(last sft)" "data.eval.path=$base/data" "${overrides[@]}" >"$log" 2>&1 ||
        { tail -n 20 "$log" >&2 && return 1; }
}

say "A random Qwen2.5-VL of 0.6 million parameters, and drawn windows"
"$python" examples/tiny_model.py "$base/model" --seed "$seed" --words click,type,scroll,assistant \
    --gain 4 # without it a model so small takes far longer to see that a place depends on the question
"$python" -m mmrl_datasets.screens "$base/data" --seed "$seed" --train 2000 --points 2000 --warmup 8000

say "Supervised warm-up: single clicks, and conversations of two to four actions"
train screens_sft sft "model.path=$base/model"

say "Reinforcement learning from there, each on a core of its own: clicks ($run/point.log), tasks ($run/tasks.log)"
set -m # each in a process group of its own, which ends with this script
part screens_point_grpo point "${cores[0]}" &
point=$!
part screens_grpo tasks "${cores[-1]}" &
tasks=$!
trap 'kill -- "-$point" "-$tasks" 2>/dev/null || true' EXIT
wait "$point"
wait "$tasks"

"$python" -m mmrl eval examples/screens_grpo.yaml --model "$run/tasks" "data.eval.path=$base/data" environment.blank=true \
    --output "$run/blind" >"$run/blind.log"

"$python" examples/draw_episode.py "$run/tasks" "$run/episode.png"
"$python" - "$run" <<'PYTHON'
import sys
from pathlib import Path

import mmrl

run = Path(sys.argv[1])
for name, what in {"point": "Single clicks", "tasks": "Tasks of two to four actions"}.items():
    course = [*mmrl.load_run(run / name).metrics.curve("eval/accuracy").values()]
    print(f"\n== {what}, held-out windows: {course[0]:.1%} after the warm-up, {course[-1]:.1%} in the end")
tasks_blind = mmrl.load_evaluation(run / "blind").results["metrics"]["eval/accuracy"]["value"]
blind = [*mmrl.load_run(run / "point").metrics.curve("eval_blank/accuracy").values()][-1]
print(f"\nWith grey pictures: {blind:.1%} of the clicks, {tasks_blind:.1%} of the tasks.")
tasks = mmrl.load_run(run / "tasks").metrics
turns, tokens = ([*tasks.curve(name).values()] for name in ("episode/turns_mean", "length/completion_mean"))
print(f"Actions an episode: {sum(turns[:5]) / 5:.1f} in the first five steps, {sum(turns[-5:]) / 5:.1f} in the last five;")
print(f"tokens that the policy writes: {sum(tokens[:5]) / 5:.1f} and {sum(tokens[-5:]) / 5:.1f}.")
print(f"An episode: {run}/episode.png")
PYTHON
