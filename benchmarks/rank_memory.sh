#!/usr/bin/env bash
# bash benchmarks/rank_memory.sh [FLAGS]   each rank's peak memory against the formula; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" docs
exec "$PYTHON" "$HERE/rank_memory.py" "$@"
