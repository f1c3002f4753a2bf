#!/usr/bin/env bash
# bash benchmarks/async_save.sh [--quick] [FLAGS]   a step that saves against one that does not; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" docs
exec "$PYTHON" "$HERE/async_save.py" "$@"
