#!/usr/bin/env bash
# bash chapters/08_param_efficient/compress.sh --model runs/00_single [FLAGS]   the model in 8 and 4 bits, and as GGUF; --help
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../../scripts/setup.sh"
exec "$PYTHON" "$HERE/compress.py" "$@"
