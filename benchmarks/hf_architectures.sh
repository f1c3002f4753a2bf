#!/usr/bin/env bash
# bash benchmarks/hf_architectures.sh   architectures of Transformers beside plain PyTorch, to the bit; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" dev
exec "$PYTHON" "$HERE/hf_architectures.py" "$@"
