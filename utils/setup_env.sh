# Sourced by train.sh and tests/run.sh: finds or makes a Python environment that can run flame.
#   find_python       prints a Python >= 3.11, or says that there is none and fails
#   setup_env [EXTRA MODULE...]
#                     sets PYTHON: the current environment if it has all that flame needs (and the modules), else the
#                     checkout's .venv, which is made and filled when it is missing or unfinished

FLAME_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# This checkout's flame is the one that runs, whatever other one is installed.
export PYTHONPATH="$FLAME_ROOT${PYTHONPATH:+:$PYTHONPATH}"

find_python() {
    local python
    for python in python3 python python3.13 python3.12 python3.11 "$FLAME_ROOT/.venv/bin/python"; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    echo "flame: needs Python 3.11 or newer, and found none (tried python3, python, python3.13 to 3.11)" >&2
    return 1
}

setup_env() {
    local extra="${1:-}" venv="$FLAME_ROOT/.venv"
    # Present while packages are being installed: an interrupted installation is not taken for a finished one.
    local unfinished="$venv/.unfinished"
    PYTHON="$(find_python)" || return
    if "$PYTHON" -m flame.launch.versions "${@:2}" 2>/dev/null; then
        return
    fi
    if [[ ! -e "$unfinished" ]] && "$venv/bin/python" -m flame.launch.versions "${@:2}" 2>/dev/null; then
        PYTHON="$venv/bin/python"
        return
    fi
    echo "flame: installing into $venv (once, a few minutes)" >&2
    mkdir -p "$venv" && touch "$unfinished"
    "$PYTHON" -m venv "$venv" || return
    PYTHON="$venv/bin/python"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check -c "$FLAME_ROOT/constraints.txt" \
        -e "$FLAME_ROOT${extra:+[$extra]}" || return
    rm "$unfinished"
    echo "flame: installed" >&2
}
