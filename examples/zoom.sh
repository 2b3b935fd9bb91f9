#!/usr/bin/env bash
# Teaches a tiny vision-language policy to look closer: to read a digit on a page that it sees in too few pixels.
#
#   bash examples/zoom.sh [overrides of both runs of reinforcement learning]
#   SEED=1                    of the model, the pages and the runs (default: 0)
#   MMRL_VENV=DIR             the virtual environment (default: .venv)
source "$(dirname "${BASH_SOURCE[0]}")/setup/stages.sh" zoom

overrides=("$@")

read -r -a cores <<<"$("$python" -c 'import os; print(*sorted(os.sched_getaffinity(0)))')"

arm() { # FOLDER CORE SFT_OVERRIDE CONFIG... : warm-up and reinforcement learning, on a core of its own
    local log=$run/$1.log train=(taskset -c "$2" "$python" -m mmrl train)
    local common=("data.train.path=$base/data" "trainer.seed=$seed")
    {
        "${train[@]}" examples/zoom_sft.yaml "model.path=$base/model" "${common[@]}" "trainer.run_dir=$run/$1/sft" "$3" &&
            "${train[@]}" "${@:4}" "model.path=$(last "$1/sft")" "data.eval.path=$base/data" "${common[@]}" \
                "trainer.run_dir=$run/$1/grpo" "${overrides[@]}"
    } >"$log" 2>&1 || { tail -n 20 "$log" >&2 && return 1; }
}

say "A random Qwen2.5-VL of 0.6 million parameters, and pages of 100 handwritten digits"
"$python" examples/tiny_model.py "$base/model" --seed "$seed" --words zoom,assistant
"$python" -m mmrl_datasets.pages "$base/data" --seed "$seed"
mkdir -p "$run"

say "Each on a core of its own: with the tool ($run/with.log), and without it ($run/without.log)"
echo "A warm-up, half of which looks at a cell with the tool before it answers; then reinforcement learning."
set -m # each in a process group of its own, which ends with this script
arm with "${cores[0]}" data.train.split=warmup examples/zoom_grpo.yaml examples/zoom_tool.yaml &
with=$!
arm without "${cores[-1]}" data.train.split=direct examples/zoom_grpo.yaml &
without=$!
trap 'kill -- "-$with" "-$without" 2>/dev/null || true' EXIT
wait "$with"
wait "$without"

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
