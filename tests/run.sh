#!/usr/bin/env bash
# bash tests/run.sh [PYTEST ARGUMENTS]: sets the environment up when it is missing, checks the style, runs the tests.
# Without arguments everything runs; with arguments (a path, -k WORDS, -m "not slow") what they name.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
source "$here/../scripts/setup.sh" dev,docs,horovod
cd "$REPO"

begin=$SECONDS
style=0 tests=0 horovod=0
# Compiled once (three to ten minutes), then a line. Without a compiler its tests are skipped; where $CI is set that is red.
bash scripts/build_horovod.sh || horovod=$?
echo "style: ruff check"
"$PYTHON" -m ruff check . || style=$?
echo "tests: pytest $*"
"$PYTHON" -m pytest "$@" || tests=$?

echo
echo "style: $([ $style -eq 0 ] && echo passed || echo "FAILED (ruff, status $style)")"
echo "tests: $([ $tests -eq 0 ] && echo passed || echo "FAILED (pytest, status $tests)") in $((SECONDS - begin)) s"
echo "horovod: $([ $horovod -eq 0 ] && echo built || echo "NOT BUILT (status $horovod): the tests of chapter 03 were skipped")"
if [ $style -ne 0 ] || [ $tests -ne 0 ] || { [ $horovod -ne 0 ] && [ -n "${CI:-}" ]; }; then
    exit 1
fi
