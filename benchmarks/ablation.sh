#!/usr/bin/env bash
# bash benchmarks/ablation.sh [--quick] [FLAGS]   the same work through every chapter: a table and two figures; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" docs
exec "$PYTHON" "$HERE/ablation.py" "$@"
