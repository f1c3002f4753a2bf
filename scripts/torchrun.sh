#!/usr/bin/env bash
# bash scripts/torchrun.sh FLAGS FILE.py [ARGUMENTS]   torchrun with the course's Python, whatever the shell's PATH holds
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
# With --nnodes MIN:MAX a node may come back. It would wait for an address that the others published only once, under the
# name of the first rendezvous (torch 2.13): without the shared store they publish it anew at each.
if [[ " $* " =~ " --nnodes"[=\ ][0-9]+: ]]; then
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE="${TORCH_DISABLE_SHARE_RDZV_TCP_STORE-1}"
fi
exec "$PYTHON" -m torch.distributed.run "$@"
