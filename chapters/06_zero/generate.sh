#!/usr/bin/env bash
# bash chapters/06_zero/generate.sh [--prompt 今天天气] [--num 3] [FLAGS]   text from what this chapter trained
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../../scripts/setup.sh"
exec "$PYTHON" -m gpt2_chinese.generate --model "$REPO/runs/06_zero" "$@"
