#!/usr/bin/env bash
# bash benchmarks/memory_speed.sh [--quick] [FLAGS]   pstar against a plain loop, and behind a slow simulated link; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" docs
exec "$PYTHON" "$HERE/memory_speed.py" "$@"
