#!/usr/bin/env bash
# bash benchmarks/staleness.sh [FLAGS]   chapter 01 with gradients of several ages: a table and a figure; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" docs
exec "$PYTHON" "$HERE/staleness.py" "$@"
