#!/usr/bin/env bash
# Brings the virtual environment up to date; its Python's path is all that goes to stdout.
#
#   MMRL_VENV              where the environment is, or shall be (default: .venv in the repository)
#   CUDA_VISIBLE_DEVICES   set to nothing, it asks for a CPU's environment where there is a GPU
#   MMRL_DEVICE            cpu or gpu: the environment to make, whatever this machine has
#
# It installs the complete lock for a machine with a GPU, or for one without, and compares each file with the lock's hash;
# on a Python or machine that the locks are not for, it installs the extra `gpu` or `cpu`. When nothing has changed since the last time it does nothing.
set -euo pipefail

venv=${MMRL_VENV:-.venv}
[[ -z ${MMRL_VENV:-} || $venv == /* ]] || venv=$PWD/$venv
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ $venv == /* ]] || venv=$PWD/$venv
python=$venv/bin/python
done_mark=$venv/mmrl-installed # what was installed; written last
begun_mark=$venv/mmrl-installing
device=cpu
cpu_wanted=
if [[ ${CUDA_VISIBLE_DEVICES-all} =~ ^(|-1|NoDevFiles)$ ]]; then cpu_wanted=yes; fi
if [[ ${MMRL_DEVICE-} =~ ^(cpu|gpu)$ ]]; then
    device=$MMRL_DEVICE cpu_wanted=yes
elif [[ ! $cpu_wanted ]] && nvidia-smi >/dev/null 2>&1; then
    device=gpu
fi
oldest_driver=580 # of CUDA 13, for which the lock's torch is built
lock=examples/setup/$device.lock
cpu_builds=examples/setup/cpu_builds.lock

say() { echo "set-up: $*" >&2; }

version() { "$1" -c 'import sys; print(100 * sys.version_info[0] + sys.version_info[1])'; }

pip() { "$python" -m pip --disable-pip-version-check -qq "$@" >&2; }

find_python() { # The lock's own version first. Version managers leave commands that do not run: try each.
    local candidate found
    for candidate in python3.11 python3 python3.12 python3.13; do
        found=$(version "$candidate" 2>/dev/null) || continue
        ((found < 311)) || { echo "$candidate"; return; }
    done
    say "mmrl needs Python 3.11 or newer (the locks are for 3.11), and none is on the PATH; install or activate one"
    return 2
}

wanted() { # Whatever the environment depends on.
    echo "$PWD $device"
    cat "$lock" "$cpu_builds" pyproject.toml examples/setup/torchvision_ops.py
}

up_to_date() { wanted | cmp -s - "$done_mark"; }

locked() { pip install "${options[@]}" --no-deps --require-hashes -r "$1"; }

pin() { # name==version of a locked package
    local line
    line=$(grep "^$1==" "$lock")
    echo "${line%% *}"
}

install_pinned() { # The CPU build of a locked package, which has a lock and an index of its own, else the lock's own.
    locked <(grep "^$1==" "$cpu_builds") 2>/dev/null || locked <(grep "^$1==" "$lock")
}

install_lock() {
    say "installing the $(wc -l <"$lock") packages of $lock, a few minutes"
    if [[ $device == gpu ]]; then
        locked "$lock"
    else
        install_pinned torch
        install_pinned torchvision
        locked <(grep -vE '^torch(vision)?==' "$lock")
        # Where the build at hand is linked to CUDA, it needs CUDA's libraries even without a GPU.
        "$python" -c 'import torch' 2>/dev/null || pip install "$(pin torch)"
    fi
    pip install --no-deps --no-build-isolation -e .
}

install_extra() {
    say "installing the extras [$device,ray,dev]; pip chooses the versions, which takes a while"
    pip install "${options[@]}" -e ".[$device,ray,dev]" && return
    say "pip found no versions that fit: use Python 3.11, or configure an index that has torch's $device builds"
    return 5
}

remove_old_name() { # The package was once called mmrl. Beside it every plugin would be there twice.
    if compgen -G "$venv/lib/python*/site-packages/mmrl-*.dist-info" >/dev/null; then pip uninstall --yes mmrl; fi
    rm -rf mmrl.egg-info
}

check_driver() { # One that is too old would be found out after gigabytes, when torch sees no GPU.
    local driver
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || return 0
    driver=${driver%%$'\n'*}
    [[ $driver =~ ^[0-9]+ ]] || return 0
    ((BASH_REMATCH[0] < oldest_driver)) || return 0
    say "NVIDIA's driver is $driver, and torch for CUDA 13 needs $oldest_driver or newer: update it;"
    say "or, to install for a CPU and train on it, set CUDA_VISIBLE_DEVICES to nothing (export CUDA_VISIBLE_DEVICES=)"
    return 5
}

check_parts() { # Debian and Ubuntu leave parts of Python out; without them it would fail later, after gigabytes.
    local lacks
    lacks=$("$1" -c 'from importlib.util import find_spec
import os.path, sys, sysconfig
parts = ["venv"] * (find_spec("ensurepip") is None)
more = ":".join(os.environ.get(name, "") for name in ("CPATH", "C_INCLUDE_PATH")).split(":")
folders = [sysconfig.get_path("include", "posix_prefix"), *filter(None, more)]
found = any(os.path.exists(os.path.join(folder, "Python.h")) for folder in folders)
parts += ["dev"] * (sys.argv[1] == "gpu" and not found)
print(*(f"python{sysconfig.get_python_version()}-{part}" for part in parts))' "$device")
    if [[ $device == gpu && -z $(command -v ${CC:-gcc} || command -v clang) ]]; then lacks="${lacks:+$lacks }gcc"; fi
    [[ $lacks ]] || return 0
    say "$1 or this machine lacks what this needs: apt-get install $lacks (elsewhere: a C compiler, and a"
    say "Python with venv and its headers, Python.h)"
    return 5
}

check_made_for() { # Packages for a GPU and for a CPU write parts of the same folders.
    local made
    [[ -e $done_mark ]] || return 0
    read -r made <"$done_mark"
    [[ $made != *" $device" ]] || return 0
    say "$venv was made for a ${made##* } and is now asked for a $device: remove it, or set MMRL_VENV to another folder"
    return 2
}

install() {
    local found interrupted=
    check_made_for
    if [[ $device == gpu ]]; then check_driver; fi
    if [[ -e $begun_mark ]]; then interrupted=yes; fi
    touch "$begun_mark"
    if [[ $device$cpu_wanted == cpu && -n $(command -v nvidia-smi) ]]; then
        say "nvidia-smi fails: installing for a CPU"
    fi
    rm -f "$done_mark"
    if [[ ! -x $python || $interrupted ]]; then
        found=$(find_python)
        check_parts "$found"
        say "creating $venv with $found"
        "$found" -m venv "$venv"
        pip install --upgrade pip || true # a recent one installs the lock in two thirds of the time
    fi
    remove_old_name
    options=(--no-compile) # modules compile when first imported; most never are
    if [[ $interrupted ]]; then options+=(--ignore-installed); fi # half-written packages look installed to pip
    if [[ $(version "$python") == 311 && $OSTYPE-$HOSTTYPE == linux-gnu-x86_64 ]]; then
        install_lock
    else
        say "the locks are for Python 3.11 on Linux and x86-64; this is another Python or machine"
        install_extra
    fi
    [[ $device == gpu ]] || "$python" examples/setup/torchvision_ops.py
    wanted >"$done_mark"
    rm "$begun_mark"
    say "ready: $venv"
}

if ! up_to_date; then
    mkdir -p "$venv"
    ( # One set-up at a time; a second one waits and finds the work done.
        if command -v flock >/dev/null; then flock 9; fi
        if ! up_to_date; then install; fi
    ) 9>"$venv/mmrl-lock"
fi
echo "$python"
