# Sourced by every train.sh, generate.sh and tests/run.sh; sets and exports REPO and PYTHON:
#
#     source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/setup.sh"             # for training
#     source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup.sh" dev,docs       # also for tests and pages
#
# Uses the active environment if it has torch and this checkout's packages; otherwise makes $REPO/.venv, once.
# To choose the interpreter for .venv: PYTHON=python3.12 bash chapters/…/train.sh
# This file only finds a Python that can run setup_environment.py, which does the work.

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

_setup() {
    local extras="" candidate found=""
    # A file sourced without arguments sees its caller's arguments, so only known names are extras.
    case "${1-}" in dev | docs | horovod | dev,docs | docs,dev | dev,docs,horovod) extras="$1" ;; esac
    for candidate in ${PYTHON:+"$PYTHON"} python3 python python3.14 python3.13 python3.12 python3.11 \
        "$REPO/.venv/bin/python"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' </dev/null 2>/dev/null; then
            found="$candidate"
            break
        fi
    done
    if [ -z "$found" ]; then
        echo "error: no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python3 bash ${0##*/}" >&2
        return 2
    fi
    PYTHON="$("$found" "$REPO/scripts/setup_environment.py" --extras "$extras" </dev/null)" || return 2
}

# On failure exit, whether or not the caller has `set -e`; but do not end an interactive shell that sources this file.
if ! _setup "$@"; then
    unset -f _setup
    case $- in *i*) return 2 ;; *) exit 2 ;; esac
fi
unset -f _setup
export REPO PYTHON
