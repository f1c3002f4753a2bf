#!/usr/bin/env bash
# bash benchmarks/convert_memory.sh [--quick] [FLAGS]   peak memory of a conversion at 10 MB and 500 MB; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" docs
exec "$PYTHON" "$HERE/convert_memory.py" "$@"
