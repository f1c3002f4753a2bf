#!/usr/bin/env bash
# bash benchmarks/gpu/run.sh [--minutes 9] [--only PARTS] [FLAGS]   all that needs a GPU, part by part; --help lists the flags
#
# Installs nothing: it takes the active Python with its torch (or PYTHON=/path/to/python3) and the files of this checkout.
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONPATH="$(dirname "$(dirname "$HERE")")${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" "$HERE/run_parts.py" "$@"
