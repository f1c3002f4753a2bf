#!/usr/bin/env bash
# bash chapters/06_zero/train.sh [FLAGS]   trains GPT-2 with ZeRO stage 3, a process per GPU, else two; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../../scripts/setup.sh"
exec "$PYTHON" "$HERE/train.py" "$@"
