#!/usr/bin/env bash
# bash benchmarks/quantization.sh [FLAGS]   chapter 08's formats: bits a weight against perplexity; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" docs
exec "$PYTHON" "$HERE/quantization.py" "$@"
