#!/usr/bin/env bash
# bash scripts/torchrun.sh FLAGS FILE.py [ARGUMENTS]   torchrun with the course's Python, whatever the shell's PATH holds
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
# With --nnodes MIN:MAX a node may come back. It would wait for an address that the others published only once, under the
# name of the first rendezvous (torch 2.13): without the shared store they publish it anew at each.
if [[ " $* " =~ " --nnodes"[=\ ][0-9]+: ]]; then
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE="${TORCH_DISABLE_SHARE_RDZV_TCP_STORE-1}"
fi
# What --standalone means, but by number: where nothing resolves the name localhost, torchrun would give up after minutes.
if [ "${1-}" = --standalone ]; then
    set -- --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --rdzv-id="$$-$RANDOM" --local-addr=127.0.0.1 "${@:2}"
fi
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL-ERROR}" # else torch prints its C++ stack for each connection that is lost
exec "$PYTHON" -m gpt2_chinese.distributed.torchrun_launcher "$@"
