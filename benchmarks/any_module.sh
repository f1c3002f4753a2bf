#!/usr/bin/env bash
# bash benchmarks/any_module.sh   models and forwards that nobody prepared for pstar, beside torch's AdamW; --help lists the flags
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../scripts/setup.sh" dev
exec "$PYTHON" "$HERE/any_module.py" "$@"
