#!/usr/bin/env bash
# bash scripts/python.sh FILE.py | -m MODULE [ARGUMENTS]   runs it with the course's Python, whatever the shell's PATH holds
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$PYTHON" "$@"
