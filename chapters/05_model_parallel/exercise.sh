#!/usr/bin/env bash
# bash chapters/05_model_parallel/exercise.sh [-k WORD]   grades exercise.py in this folder; WORD names one function
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
source "$HERE/../../scripts/setup.sh" dev
cd "$REPO" && exec "$PYTHON" -m pytest tests/exercises/test_05.py "$@"
