#!/usr/bin/env bash
# Trains a WordPiece vocabulary.   bash cache/make_vocab.sh [CORPUS [SIZE [OUTPUT]]]
# Without arguments it makes the shipped cache/vocab.txt again, byte for byte.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$ROOT/scripts/setup.sh"
exec "$PYTHON" -m gpt2_chinese.vocabulary train --corpus "${1:-$ROOT/data/train}" --size "${2:-4096}" \
    --output "${3:-$ROOT/cache/vocab.txt}" --held-out "$ROOT/data/valid"
