#!/usr/bin/env bash
# bash benchmarks/zero.sh [FLAGS]   chapter 06: bytes of model states and of communication, measured and by the formulas; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" docs
exec "$PYTHON" "$HERE/zero.py" "$@"
