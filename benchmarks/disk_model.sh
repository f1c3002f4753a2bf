#!/usr/bin/env bash
# bash benchmarks/disk_model.sh [--quick] [FLAGS]   a model larger than near and far together, the rest on disk; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" docs
exec "$PYTHON" "$HERE/disk_model.py" "$@"
