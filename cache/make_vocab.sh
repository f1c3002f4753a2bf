#!/usr/bin/env bash
# Trains a WordPiece vocabulary.   bash cache/make_vocab.sh [CORPUS [SIZE [OUTPUT [HELD_OUT_TEXT]]]]
# Without arguments it makes the shipped cache/vocab.txt again, byte for byte.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$ROOT/scripts/setup.sh"
# The rate of unknown tokens means something on text that the vocabulary has not seen, of the same corpus.
if [ $# -eq 0 ]; then HELD_OUT="$ROOT/data/valid"; else HELD_OUT="${4:-}"; fi
exec "$PYTHON" -m gpt2_chinese.vocabulary train --corpus "${1:-$ROOT/data/train}" --size "${2:-4096}" \
    --output "${3:-$ROOT/cache/vocab.txt}" ${HELD_OUT:+--held-out "$HELD_OUT"}
