#!/usr/bin/env bash
# bash chapters/08_param_efficient/generate.sh [--prompt 今天天气] [--adapter FOLDER] [FLAGS]   text from an adapted model
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../../scripts/setup.sh"
exec "$PYTHON" "$HERE/generate.py" --model "$REPO/runs/08_param_efficient" "$@"
