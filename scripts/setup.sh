# Sourced by every train.sh, generate.sh and tests/run.sh; defines and exports REPO and PYTHON:
#
#     source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/setup.sh"             # packages for training
#     source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup.sh" dev,docs       # and for tests and pages
#
# The active environment is used if it has torch and this checkout's packages; otherwise $REPO/.venv is made, once.
# To choose the interpreter that .venv is made from: PYTHON=python3.12 bash chapters/…/train.sh
# setup_environment.py does the work; this file only finds a Python that can run it.

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

_setup() {
    local extras="" candidate found=""
    unset PYTHONSAFEPATH  # every program here imports modules of its own folder
    # Python reads and prints in the encoding of the locale. ISO-8859-1, that of LANG=en_US, has no Chinese.
    case "$(locale charmap 2>/dev/null)" in UTF-8 | GB* | BIG5* | "") ;; *) export PYTHONUTF8="${PYTHONUTF8-1}" ;; esac
    # A file sourced without arguments gets its caller's, so only known names are taken as extras.
    case "${1-}" in dev | docs | horovod | parquet | peft | dev,docs | docs,dev | dev,docs,horovod,parquet,peft) extras="$1" ;; esac
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

# On failure exit here, whether the caller uses `set -e` or not; an interactive shell that sources this file is not ended.
if ! _setup "$@"; then
    unset -f _setup
    case $- in *i*) return 2 ;; *) exit 2 ;; esac
fi
unset -f _setup
export REPO PYTHON
