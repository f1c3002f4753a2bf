#!/usr/bin/env bash
# bash chapters/07_patrickstar/exercise.sh [-k WORD]   grades exercise.py in this folder; WORD names one function
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
source "$HERE/../../scripts/setup.sh" dev
cd "$REPO" && exec "$PYTHON" -m pytest tests/exercises/test_07.py "$@"
