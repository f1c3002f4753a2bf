#!/usr/bin/env bash
# bash benchmarks/hf_trainer.sh   the Hugging Face Trainer and pstar on the same weights and batches; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" dev
exec "$PYTHON" "$HERE/hf_trainer.py" "$@"
