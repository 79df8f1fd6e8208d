#!/usr/bin/env bash
# Make .venv and install Longtake into it: `tools/install.sh` for what the demo imports, `tools/install.sh dev` for the
# test tools too. `make oldest` gives another folder and PyTorch (VENV, TORCH); INSTALLER=pip does without uv.
#
# pip installs PyTorch, first and alone: on Linux without an NVIDIA GPU from PyTorch's CPU index, because the default
# build brings several GB of CUDA libraries. uv installs its dependencies and the rest, several times faster than pip,
# which takes over where uv cannot be had or fails. Each stage prints one line with its seconds; only errors follow.
set -euo pipefail
cd "$(dirname "$0")/.."
requirement=${TORCH:-torch>=2.11,<2.14}
venv=${VENV:-.venv}
python=${PYTHON:-python3}
project=.${1:+[$1]}
log=$(mktemp)
trap 'rm -f "$log"' EXIT

stage() { # stage TITLE COMMAND...: run a command, print its seconds; its output only where it fails
    local title=$1 start=$SECONDS
    shift
    if "$@" >"$log" 2>&1; then
        echo "$title: $((SECONDS - start)) s"
    else
        local status=$?
        grep -iE 'error|fail|denied|no matching|no space' "$log" >&2 || tail -n 20 "$log" >&2
        echo "tools/install.sh: $title failed: $*" >&2
        return $status
    fi
}
pip_install() { "$venv/bin/python" -m pip --disable-pip-version-check install "$@"; }
find_uv() { # print uv's path; install it into the environment where it is not on the PATH
    [ "${INSTALLER:-uv}" = uv ] || return
    command -v uv && return
    [ -x "$venv/bin/uv" ] || pip_install --quiet uv >/dev/null 2>&1 || return
    echo "$venv/bin/uv"
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "tools/install.sh: expected Python 3.11 or later, found $("$python" --version); set PYTHON=/path/to/python3.11" >&2
    exit 1
}
[ -x "$venv/bin/python" ] || stage "environment $venv" "$python" -m venv "$venv"
if ! "$venv/bin/python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
    index=()
    if [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null 2>&1; then
        index=(--retries 1 --timeout 30 --extra-index-url https://download.pytorch.org/whl/cpu)
    fi
    stage "PyTorch" pip_install --no-deps --no-compile ${index[@]+"${index[@]}"} "$requirement"
fi
if uv=$(find_uv) && stage "Longtake and its packages, by uv" "$uv" pip install --python "$venv/bin/python" -e "$project"; then
    exit 0
fi
stage "Longtake and its packages, by pip" pip_install -e "$project"
