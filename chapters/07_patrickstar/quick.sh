#!/usr/bin/env bash
# bash chapters/07_patrickstar/quick.sh [FLAGS]   what each optimisation brings, in three minutes; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../../scripts/setup.sh" docs
exec "$PYTHON" "$HERE/quick.py" "$@"
