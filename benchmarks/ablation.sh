#!/usr/bin/env bash
# bash benchmarks/ablation.sh [--quick] [FLAGS]   the same work through every chapter: a table and the data of two charts; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" docs
exec "$PYTHON" "$HERE/ablation.py" "$@"
