#!/usr/bin/env bash
# bash chapters/00_single/train.sh [FLAGS]   trains GPT-2 in one process; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../../scripts/setup.sh"
exec "$PYTHON" "$HERE/train.py" "$@"
