#!/usr/bin/env bash
# Trains a vocabulary.   bash cache/make_vocab.sh [CORPUS [SIZE [OUTPUT [HELD_OUT_TEXT]]]] [FLAGS]
# FLAGS: --kind wordpiece, characters or bpe (OUTPUT is then a tokenizer.json); --vocab-profile gpt2_chinese or uer.
# Without arguments it makes the shipped cache/vocab.txt again, byte for byte.
#        bash cache/make_vocab.sh check --vocab VOCAB --corpus CORPUS   tells how well a vocabulary fits a corpus
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$ROOT/scripts/setup.sh"
case "${1:-}" in
    check) exec "$PYTHON" -m gpt2_chinese.vocabulary "$@" ;;
    -h | --help) exec "$PYTHON" -m gpt2_chinese.vocabulary train --help ;;
esac
WORDS=()
while [ $# -gt 0 ] && [[ "$1" != -* ]]; do
    WORDS+=("$1")
    shift
done
if [ $# -gt 0 ] && [ ${#WORDS[@]} -lt 3 ]; then  # else the flags would change the shipped vocabulary
    echo "error: with flags CORPUS, SIZE and OUTPUT must be given before them" >&2
    exit 2
fi
# Only held-out text of the same corpus gives a useful rate of unknown tokens.
if [ ${#WORDS[@]} -eq 0 ]; then HELD_OUT="$ROOT/data/valid"; else HELD_OUT="${WORDS[3]:-}"; fi
exec "$PYTHON" -m gpt2_chinese.vocabulary train --corpus "${WORDS[0]:-$ROOT/data/train}" --size "${WORDS[1]:-4096}" \
    --output "${WORDS[2]:-$ROOT/cache/vocab.txt}" ${HELD_OUT:+--held-out "$HELD_OUT"} "$@"
