#!/usr/bin/env bash
# bash benchmarks/parity.sh [--quick] [FLAGS]   pstar, DDP and FSDP2 against one plain PyTorch process; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" docs
exec "$PYTHON" "$HERE/parity.py" "$@"
