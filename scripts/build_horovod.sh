#!/usr/bin/env bash
# bash scripts/build_horovod.sh   builds Horovod against the installed torch, once, and installs it; a second call is one line.
# Called by chapters/03_horovod/train.sh, by 04's with --comm horovod, and by tests/run.sh. The work is in build_horovod.py.
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if [ -z "${REPO:-}" ] || [ -z "${PYTHON:-}" ]; then
    source "$HERE/setup.sh"
fi
exec "$PYTHON" "$HERE/build_horovod.py"
