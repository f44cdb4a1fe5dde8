#!/usr/bin/env bash
# Runs the tests: bash tests/run.sh [pytest options]
# Without options all of them run, in three parts: first, two at a time, those that keep one core busy and look at no
# other process; then the others; then the data tests once more, with the lowest release of datasets that flame allows.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../utils/setup_env.sh"

setup_env dev pytest hypothesis xdist
cd "$FLAME_ROOT"
if (($#)); then
    exec "$PYTHON" -m pytest "$@"
fi

# Tests of several processes at once, and those that measure time or memory or count processes and threads.
alone=(
    tests/checkpoint/test_convert_limits.py
    tests/checkpoint/test_ranks.py
    tests/data/test_read_ahead.py
    tests/data/test_workers.py
    tests/faults
    tests/launch/test_{ahead,launcher}.py
    tests/models/test_init.py
    tests/parallel/test_{context_gpus,context_pieces,tensor,two_ranks}.py
    tests/runs/test_{auto,command_line,data_hash,hang,harness,launching,layout_refusals,layouts,saving}.py
    tests/test_train_sh.py
)
lowest="$FLAME_ROOT/.lowest"
if [[ ! -e "$lowest/installed" ]]; then
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target "$lowest" \
        -r tests/lowest.txt
    touch "$lowest/installed"
fi

status=0
trap 'exit 130' INT
# run PYTEST_OPTIONS...: a part that fails does not keep the next from running.
run() {
    "$PYTHON" -m pytest --durations=40 --durations-min=5 "$@" || status=1
}

# A file's tests stay together, since they share what its fixtures made, and files are taken in their order: those with
# the fewest tests, which would be the last, are the longest.
two=(-n 2 --dist loadfile --no-loadscope-reorder)
run "${two[@]}" "${alone[@]/#/--ignore=}"
run "${alone[@]}"
# Once is enough for what depends on processes and threads, and not on how datasets reads its files.
PYTHONPATH="$lowest:$PYTHONPATH" run "${two[@]}" tests/data \
    --ignore=tests/data/test_workers.py --ignore=tests/data/test_read_ahead.py \
    --deselect=tests/data/test_global_order.py::test_every_layout_gives_the_same_sequences
exit "$status"
