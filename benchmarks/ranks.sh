#!/usr/bin/env bash
# bash benchmarks/ranks.sh [--quick] [FLAGS]   pstar, DDP, FSDP2, DeepSpeed on several processes of one machine; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" docs
exec "$PYTHON" "$HERE/ranks.py" "$@"
