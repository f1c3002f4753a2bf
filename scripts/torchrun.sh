#!/usr/bin/env bash
# bash scripts/torchrun.sh FLAGS FILE.py [ARGUMENTS]   torchrun with the course's Python, whatever the shell's PATH holds
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$PYTHON" -m torch.distributed.run "$@"
