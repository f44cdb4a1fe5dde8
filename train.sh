#!/usr/bin/env bash
# Trains a model: bash train.sh [--section.name value] ...   -h lists the options; without any, the demo runs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/utils/setup_env.sh"

for word in "$@"; do
    if [[ "$word" == -h || "$word" == --help ]]; then
        python="$(find_python)"
        exec "$python" -m flame.cli -h
    fi
done
setup_env
exec "$PYTHON" -m flame.launch "$@"
