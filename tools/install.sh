#!/usr/bin/env bash
# Makes .venv and installs Longtake with its test tools into it. `make demo` and `make test` call it; `make oldest` with
# another folder and PyTorch (VENV, TORCH).
#
# PyTorch comes first and alone: on a machine without an NVIDIA GPU a CPU build is taken where pip finds one, because
# the ordinary Linux build brings several GB of CUDA libraries that such a machine cannot use.
set -euo pipefail
cd "$(dirname "$0")/.."
requirement="${TORCH:-torch>=2.11,<2.14}" venv=${VENV:-.venv}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "tools/install.sh: $("$python" --version) found, Python 3.11 or later is needed; set PYTHON=/path/to/python3.11" >&2
    exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

if ! pip show --quiet torch 2>/dev/null; then
    found=$(pip install --dry-run --no-deps "$requirement" 2>/dev/null || true)
    if command -v nvidia-smi >/dev/null 2>&1 || [[ $found == *+cpu* ]]; then
        pip install --quiet "$requirement" # a GPU is here, or pip's own sources hold a CPU build, which it prefers
    elif [ "$(uname -s)" = Linux ]; then
        echo "no GPU found: looking for PyTorch's CPU build"
        pip install --quiet --retries 1 --timeout 30 --extra-index-url https://download.pytorch.org/whl/cpu "$requirement"
    else
        pip install --quiet "$requirement"
    fi
fi
pip install --quiet --editable '.[dev]'
