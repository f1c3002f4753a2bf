#!/usr/bin/env bash
# bash chapters/07_patrickstar/train.sh [FLAGS]   trains GPT-2 with the chunk-based engine; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../../scripts/setup.sh"
exec "$PYTHON" "$HERE/train.py" "$@"
