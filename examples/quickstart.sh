#!/usr/bin/env bash
# Teaches a tiny vision-language policy to read handwritten digits, end to end, on two CPU cores in minutes.
#
#   bash examples/quickstart.sh [overrides of both runs, such as trainer.seed=1]
#   MMRL_VENV=DIR               the virtual environment (default: .venv)
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE # else each process compiles torch and vLLM anew

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(bash "$root/examples/setup/install.sh")
cd "$root"

base=runs/quickstart
run=$base/$(date +%Y%m%d-%H%M%S)

say() { printf '\n== %s\n' "$*"; }

took=
began=0
lap() { # Notes the seconds since the last lap.
    took+="${took:+, }$1 $((SECONDS - began)) s"
    began=$SECONDS
}

lap set-up

say "A random Qwen2.5-VL of 0.6 million parameters, and 1,797 real handwritten digits"
"$python" examples/tiny_model.py "$base/model"
"$python" -m mmrl_datasets.digits "$base/data" --warmup 600
lap "model and data"

say "Supervised warm-up, to about half right"
"$python" -m mmrl train examples/digits_sft.yaml "trainer.run_dir=$run/sft" "$@"
warm=$(find "$run/sft/checkpoints" -path '*/step-*/model' -type d | sort | tail -n 1)
lap warm-up

say "Reinforcement learning from there"
"$python" -m mmrl train examples/digits_grpo.yaml "model.path=$warm" "trainer.run_dir=$run/grpo" "$@"
lap "reinforcement learning"

"$python" - "$run/grpo" "$took; $SECONDS s in all" <<'PYTHON'
import json
import sys
from pathlib import Path

run = Path(sys.argv[1])
lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
accuracy = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
print(f"\n== Held-out exact match: {accuracy[0]:.1%} before, {accuracy[-1]:.1%} after reinforcement learning")
print(f"""
(A loss of about 0 is right: with one update per batch its value vanishes and its gradient does not.)

time         {sys.argv[2]}
run          {run}
every step   {run}/metrics.jsonl
every answer {run}/rollouts/
the policy   {max((run / "checkpoints").glob("step-*/model"))}

Next: tensorboard --logdir {run}/tensorboard
      bash examples/quickstart.sh trainer.seed=1
      examples/README.md, for real models and datasets""")
PYTHON
