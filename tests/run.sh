#!/usr/bin/env bash
# Runs the tests: bash tests/run.sh [pytest options]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../utils/setup_env.sh"

setup_env dev pytest hypothesis
cd "$FLAME_ROOT"
exec "$PYTHON" -m pytest "$@"
