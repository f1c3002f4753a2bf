#!/usr/bin/env bash
# bash benchmarks/plan_memory.sh [--quick] [FLAGS]   one process's peak memory against what pstar plans; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" docs
exec "$PYTHON" "$HERE/plan_memory.py" "$@"
