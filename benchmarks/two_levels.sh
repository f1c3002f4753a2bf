#!/usr/bin/env bash
# bash benchmarks/two_levels.sh [--quick] [FLAGS]   pstar on two nodes with a slow link: in two levels, flat, replicated; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" docs
exec "$PYTHON" "$HERE/two_levels.py" "$@"
