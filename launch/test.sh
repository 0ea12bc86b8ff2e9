#!/usr/bin/env bash
# Install, lint, check types, test. Arguments go to pytest: bash launch/test.sh tests/unit -k layout
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/lib.sh
source launch/lib.sh

# Announce a check, run it as a module of the virtual environment, say how long it took.
check() {
    local started=$SECONDS
    say "$*"
    "$VENV_PYTHON" -m "$@" || die "$* failed"
    echo "   $((SECONDS - started)) s"
}

install dev
check ruff check
check ruff format --check
check mypy aioengine launch
check pytest --durations 15 "$@"
say "all checks passed in $SECONDS s"
