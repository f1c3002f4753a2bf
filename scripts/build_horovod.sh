#!/usr/bin/env bash
# bash scripts/build_horovod.sh   builds Horovod once against the installed torch and installs it; later calls only print a line.
# Called by train.sh of chapter 03, of chapter 04 with --comm horovod, and by tests/run.sh. build_horovod.py does the work.
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if [ -z "${REPO:-}" ] || [ -z "${PYTHON:-}" ]; then
    source "$HERE/setup.sh"
fi
exec "$PYTHON" "$HERE/build_horovod.py"
