# Sourced by every train.sh, generate.sh and tests/run.sh; defines and exports REPO and PYTHON:
#
#     source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/setup.sh"             # what training needs
#     source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup.sh" dev,docs       # and what tests and pages need
#
# The active environment is used when it holds torch and this checkout's packages; otherwise $REPO/.venv is made, once.
# To choose the interpreter that .venv is made from: PYTHON=python3.12 bash chapters/…/train.sh
# The work is done by setup_environment.py; here only a Python that can run it is looked for.

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

_setup() {
    local extras="" candidate found=""
    # Without arguments of its own a sourced file sees those of its caller, so anything but a known name is not for us.
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

# The caller may run with or without `set -e`: leave it here. An interactive shell that sources this file is not ended.
if ! _setup "$@"; then
    unset -f _setup
    case $- in *i*) return 2 ;; *) exit 2 ;; esac
fi
unset -f _setup
export REPO PYTHON
