#!/usr/bin/env bash
# bash chapters/05_model_parallel/train.sh [FLAGS]   trains GPT-2 cut into stages and slices, a process per GPU, else two; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../../scripts/setup.sh"
exec "$PYTHON" "$HERE/train.py" "$@"
