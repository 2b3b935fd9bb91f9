#!/usr/bin/env bash
# Brings the environment up to date and runs the tests, arguments are pytest's; without any, two files at a time.
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE # the tests start hundreds of interpreters: each would compile torch and vLLM anew

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(bash "$root/examples/setup/install.sh")
cd "$root"
(($#)) || set -- -n 2 --dist loadfile
exec "$python" -m pytest "$@"
