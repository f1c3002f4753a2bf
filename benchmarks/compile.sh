#!/usr/bin/env bash
# bash benchmarks/compile.sh [FLAGS]   plain PyTorch, DDP and pstar, each with eager and with compiled blocks; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" docs
exec "$PYTHON" "$HERE/compile.py" "$@"
