#!/usr/bin/env bash
# Teaches a small vision-language policy to see in a figure where the right angle is, and to work the answer out.
#
#   bash examples/geometry.sh [overrides of both runs, such as trainer.seed=1]
#   MMRL_VENV=DIR             the virtual environment (default: .venv)
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE # else each process compiles torch and vLLM anew

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(bash "$root/examples/setup/install.sh")
cd "$root"

base=runs/geometry
run=$base/$(date +%Y%m%d-%H%M%S)

"$python" examples/tiny_model.py "$base/model" --size small
"$python" -m mmrl_datasets.geometry "$base/data" --kinds right_corner --level 1 --image-size 84 --warmup 4000 --fresh 300
"$python" -m mmrl train examples/geometry_sft.yaml "trainer.run_dir=$run/sft" "$@"
warm=$(find "$run/sft/checkpoints" -path '*/step-*/model' -type d | sort | tail -n 1)
"$python" -m mmrl train examples/geometry_grpo.yaml "model.path=$warm" "trainer.run_dir=$run/grpo" "$@"

"$python" - "$run/grpo/metrics.jsonl" <<'PYTHON'
import json
import sys
from pathlib import Path

steps = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
sampled = [step for step in steps if step["step"]]
accuracy = [step["eval/accuracy"] for step in steps if "eval/accuracy" in step]


def course(name: str) -> str:
    """Mean over the first ten steps, and over the last."""
    means = [sum(step[name] for step in part) / len(part) for part in (sampled[:10], sampled[-10:])]
    return " to ".join(f"{mean:.3g}" for mean in means)


print(f"\n== Held-out accuracy: {accuracy[0]:.1%} before, {accuracy[-1]:.1%} after reinforcement learning")
print(f"tokens a completion {course('length/completion_mean')}")
print(f"truncated           {course('length/truncated_fraction')}")
print(f"well formed         {course('reward/format_mean')}")
PYTHON
