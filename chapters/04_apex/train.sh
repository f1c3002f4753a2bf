#!/usr/bin/env bash
# bash chapters/04_apex/train.sh [FLAGS]   trains GPT-2 in mixed precision, a process per GPU, else two; --help lists the flags.
# With --comm horovod Horovod is compiled once when it is missing, after the flags were found right.
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../../scripts/setup.sh"
export GPT2_CHINESE_HOROVOD_BUILD="$REPO/scripts/build_horovod.sh"
exec "$PYTHON" "$HERE/train.py" "$@"
