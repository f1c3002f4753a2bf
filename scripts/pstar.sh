#!/usr/bin/env bash
# bash scripts/pstar.sh config | plan | trace [FLAGS]   the engine's command line, whatever the shell's PATH holds
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$PYTHON" -m pstar.cli "$@"
