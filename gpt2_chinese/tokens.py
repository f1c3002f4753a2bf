"""Tokenises a corpus ahead of a run.

    bash scripts/python.sh -m gpt2_chinese.tokens --corpus data/train --vocab cache/vocab.txt
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from gpt2_chinese.corpus import corpus_files
from gpt2_chinese.data.token_cache import load_tokens
from gpt2_chinese.errors import OneLineParser, exit_on_user_error
from gpt2_chinese.vocabulary.profiles import PROFILE_CHOICES


def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    parser = OneLineParser(
        prog="bash scripts/python.sh -m gpt2_chinese.tokens",
        description="Tokenises a corpus ahead of a run. On all cores; after Ctrl-C or a kill the same command resumes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--corpus", required=True, type=Path, help="array-JSON file or folder")
    parser.add_argument("--vocab", type=Path, default=root / "cache/vocab.txt", help="vocab.txt, tokenizer.json or folder")
    parser.add_argument("--vocab-profile", choices=PROFILE_CHOICES, default="auto", help="how a vocab.txt is used")
    with exit_on_user_error():
        arguments = parser.parse_args(argv)
        begin = time.perf_counter()
        try:
            tokens = load_tokens(arguments.corpus, arguments.vocab, arguments.vocab_profile)
        except KeyboardInterrupt:
            print("\ninterrupted: the same command resumes with what is not done", file=sys.stderr)
            raise SystemExit(130) from None
        seconds = time.perf_counter() - begin
        megabytes = sum(file.stat().st_size for file in corpus_files(arguments.corpus)) / 1e6
        print(f"{len(tokens):,} tokens of {tokens.documents:,} documents, {tokens.characters:,} characters")
        print(f"{tokens.unknown_rate:.2%} unknown, {tokens.characters_per_token:.3f} characters per token")
        print(f"{megabytes:.1f} MB in {seconds:.1f} s, {megabytes / seconds * 60:,.0f} MB a minute")
        print(tokens.path)


if __name__ == "__main__":
    main()
