#!/usr/bin/env bash
# bash benchmarks/disk.sh [--quick] [FLAGS]   the disk tier's speed against plain writes and reads; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" docs
exec "$PYTHON" "$HERE/disk.py" "$@"
