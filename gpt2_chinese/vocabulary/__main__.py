"""Trains a vocabulary, or reports how well a vocabulary fits a corpus.

    bash scripts/python.sh -m gpt2_chinese.vocabulary train --corpus data/train --size 4096 --output cache/vocab.txt
    bash scripts/python.sh -m gpt2_chinese.vocabulary check --vocab cache/vocab.txt --corpus data/valid
"""

from __future__ import annotations

import argparse
from pathlib import Path

from durable.files import replacing
from gpt2_chinese.errors import OneLineParser, UserError, command_parser, exit_on_user_error
from gpt2_chinese.files import check_output_file
from gpt2_chinese.vocabulary.fit import describe, measure
from gpt2_chinese.vocabulary.profiles import PROFILE_CHOICES, PROFILES
from gpt2_chinese.vocabulary.training import KINDS, train, train_bpe
from gpt2_chinese.vocabulary.vocabulary import Vocabulary


def main(argv: list[str] | None = None) -> None:
    """The commands `train` and `check`; a wrong input is one line and exit status 2."""
    with exit_on_user_error():
        arguments = _parse(argv)
        if arguments.command == "check":
            vocabulary = Vocabulary.load(arguments.vocab, arguments.vocab_profile)
            for name, value in describe(vocabulary, measure(vocabulary, arguments.corpus)):
                print(f"{name:<20}  {value}")
            return
        if (arguments.kind == "bpe") != (arguments.output.suffix == ".json"):
            wanted = "a tokenizer.json" if arguments.kind == "bpe" else "a vocab.txt"
            raise UserError(f"--output {arguments.output}: --kind {arguments.kind} makes {wanted}, name it so")
        check_output_file(arguments.output, "--output", in_new_folder=True)
        if arguments.kind == "bpe":
            text = train_bpe(arguments.corpus, arguments.size)
        else:
            entries = train(arguments.corpus, arguments.size, arguments.kind, arguments.vocab_profile)
            text = "".join(entry + "\n" for entry in entries)
        _write(arguments.output, text)
        vocabulary = Vocabulary.load(arguments.output, "auto" if arguments.kind == "bpe" else arguments.vocab_profile)
        print(f"{arguments.output}: {vocabulary.size} entries")
        if arguments.vocab_profile != "gpt2_chinese" and arguments.kind != "bpe":
            print(f"train with --vocab-profile {arguments.vocab_profile}: a bare vocab.txt does not record it")
        for corpus in filter(None, (arguments.corpus, arguments.held_out)):
            fit = measure(vocabulary, corpus)
            each = f"characters per token: {fit.characters_per_token:.3f}"
            print(f"unknown tokens in {corpus}: {fit.unknown_rate:.2%}; {each}")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser("bash scripts/python.sh -m gpt2_chinese.vocabulary", __doc__)
    commands = parser.add_subparsers(required=True, dest="command", parser_class=OneLineParser)
    trained = commands.add_parser("train", help="train a vocabulary")
    trained.add_argument("--kind", choices=KINDS, default="wordpiece", help="kind of vocabulary (default: wordpiece)")
    trained.add_argument("--corpus", required=True, type=Path, help="array-JSON file or folder")
    trained.add_argument("--size", type=int, default=4096, help="most entries (default: 4096)")
    trained.add_argument("--output", required=True, type=Path, help="the vocab.txt to write; for bpe the tokenizer.json")
    trained.add_argument("--held-out", type=Path,
                         help="a second corpus whose unknown tokens are counted, too (default: none)")  # fmt: skip
    trained.add_argument("--vocab-profile", choices=tuple(PROFILES), default="gpt2_chinese",
                         help="how a vocab.txt will be used; uer keeps numbers whole (default: gpt2_chinese)")  # fmt: skip
    checked = commands.add_parser("check", help="report how well a vocabulary fits a corpus")
    checked.add_argument("--vocab", required=True, type=Path, help="a vocab.txt, a tokenizer.json, or a folder with one")
    checked.add_argument("--corpus", required=True, type=Path, help="array-JSON file or folder")
    checked.add_argument("--vocab-profile", choices=PROFILE_CHOICES, default="auto",
                         help="how a vocab.txt is used (default: auto, what its folder records)")  # fmt: skip
    return parser.parse_args(argv)


def _write(path: Path, text: str) -> None:
    """Writes a file, complete or not at all. Raises UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as staging:
            staging.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    main()
