#!/usr/bin/env bash
# Brings the environment up to date and runs a tier of the tests, two files at a time; further arguments are pytest's.
#
#   tests/run.sh [short]   minutes: what every change is tried with
#   tests/run.sh full      everything that has to hold before a change lands
#   tests/run.sh soak      what only long sweeps show, before a release
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE # the tests start hundreds of interpreters: each would compile torch and vLLM anew

tier="not slow and not full"
case ${1-} in
    short) shift ;;
    full) shift && tier="not slow" ;;
    soak) shift && tier="slow" ;;
esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(bash "$root/examples/setup/install.sh")
cd "$root"
# The order is tests/conftest.py's: the longest files first. A test that hangs or kills its process would do it again.
exec "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m "$tier" "$@"
