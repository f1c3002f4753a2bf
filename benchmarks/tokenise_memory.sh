#!/usr/bin/env bash
# bash benchmarks/tokenise_memory.sh [FLAGS]   peak memory and speed of tokenising, small and large; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" docs
exec "$PYTHON" "$HERE/tokenise_memory.py" "$@"
