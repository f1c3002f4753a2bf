#!/usr/bin/env bash
# bash tests/run.sh [PYTEST ARGUMENTS]: sets the environment up when it is missing, checks the style, runs the tests.
# Without arguments everything runs; with arguments (a path, -k WORDS, -m "not slow") what they name.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
source "$here/../scripts/setup.sh" dev,docs
cd "$REPO"

begin=$SECONDS
style=0 tests=0
echo "style: ruff check"
"$PYTHON" -m ruff check . || style=$?
echo "tests: pytest $*"
"$PYTHON" -m pytest "$@" || tests=$?

echo
echo "style: $([ $style -eq 0 ] && echo passed || echo "FAILED (ruff, status $style)")"
echo "tests: $([ $tests -eq 0 ] && echo passed || echo "FAILED (pytest, status $tests)") in $((SECONDS - begin)) s"
if [ $style -ne 0 ] || [ $tests -ne 0 ]; then
    exit 1
fi
