#!/usr/bin/env bash
# bash scripts/tensorboard.sh FOLDER [FLAGS]   shows the curves of the runs below a folder in a browser; FLAGS of TensorBoard
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
case "${1--}" in
    -h | --help) ;;
    -*) echo "error: which run? bash scripts/tensorboard.sh runs/07_patrickstar [FLAGS]; --help lists the flags" >&2; exit 2 ;;
    *)
        [ -d "$1" ] || { echo "error: there is no folder $1: give a run's folder, or runs for all" >&2; exit 2; }
        set -- --logdir "$@" ;;
esac
exec "$PYTHON" -m tensorboard.main "$@"
