#!/usr/bin/env bash
# bash chapters/01_parameter_server/generate.sh [--prompt 今天天气] [--num 3] [FLAGS]   generates text with this chapter's model
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../../scripts/setup.sh"
exec "$PYTHON" -m gpt2_chinese.generate --model "$REPO/runs/01_parameter_server" "$@"
