#!/usr/bin/env bash
# bash chapters/03_horovod/train.sh [FLAGS]   trains GPT-2 under horovodrun, a process per GPU, else two; --help lists the flags.
# If Horovod is missing, it is compiled once (three to ten minutes), after the flags have been checked.
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../../scripts/setup.sh"
export GPT2_CHINESE_HOROVOD_BUILD="$REPO/scripts/build_horovod.sh"
exec "$PYTHON" "$HERE/train.py" "$@"
