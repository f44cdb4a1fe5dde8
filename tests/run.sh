#!/usr/bin/env bash
# Runs the tests: bash tests/run.sh [pytest options]
# Without options the data tests run a second time, with the lowest release of datasets that flame allows.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../utils/setup_env.sh"

setup_env dev pytest hypothesis
cd "$FLAME_ROOT"
if (($#)); then
    exec "$PYTHON" -m pytest "$@"
fi

lowest="$FLAME_ROOT/.lowest"
if [[ ! -e "$lowest/installed" ]]; then
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target "$lowest" \
        -r tests/lowest.txt
    touch "$lowest/installed"
fi
PYTHONPATH="$lowest:$PYTHONPATH" "$PYTHON" -m pytest tests/data
exec "$PYTHON" -m pytest
