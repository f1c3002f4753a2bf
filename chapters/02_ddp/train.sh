#!/usr/bin/env bash
# bash chapters/02_ddp/train.sh [FLAGS]   trains GPT-2 with distributed data parallel, a process per GPU, else two; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../../scripts/setup.sh"
exec "$PYTHON" "$HERE/train.py" "$@"
