#!/usr/bin/env bash
# bash benchmarks/tiled_loss.sh [--quick] [FLAGS]   head and loss by tiles against whole logits; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" docs
exec "$PYTHON" "$HERE/tiled_loss.py" "$@"
