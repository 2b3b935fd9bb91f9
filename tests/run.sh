#!/usr/bin/env bash
# Brings the environment up to date and runs the tests, two files at a time; arguments are pytest's.
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE # the tests start hundreds of interpreters: each would compile torch and vLLM anew

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(bash "$root/examples/setup/install.sh")
cd "$root"
exec "$python" -m pytest -n 2 --dist loadfile "$@"
