# shellcheck shell=bash disable=SC2034
# Begins a script of several runs, which sources it: source "$(dirname "${BASH_SOURCE[0]}")/setup/stages.sh" NAME
# It sets `python`, `seed` and the folders `base` (of the seed) and `run` (of this start), and goes to the repository's root.
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE # else each process compiles torch and vLLM anew

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$(bash "$root/examples/setup/install.sh")
cd "$root"

seed=${SEED:-0}
base=runs/$1/seed-$seed
run=$base/$(date +%Y%m%d-%H%M%S)

say() { printf '\n== %s\n' "$*"; }

last() { find "$run/$1/checkpoints" -path "*/step-*/${2:-model}" -type d | sort | tail -n 1; } # FOLDER [PART]
