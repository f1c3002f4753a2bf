#!/usr/bin/env bash
# bash chapters/01_parameter_server/train.sh [FLAGS]   trains GPT-2 through a parameter server, a process per GPU, else two; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../../scripts/setup.sh"
exec "$PYTHON" "$HERE/train.py" "$@"
