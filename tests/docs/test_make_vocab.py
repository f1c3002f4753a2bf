"""cache/make_vocab.sh: its positional arguments, the flags after them, and a mistake that could replace the shipped file."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_kinds_and_check(shell, tmp_path: Path) -> None:
    text, out = ROOT / "data/valid/comments.json", tmp_path / "tokenizer.json"
    said = shell(f"bash cache/make_vocab.sh {text} 400 {out} --kind bpe")
    assert "400 entries" in said and "characters per token" in said
    assert "own: <s> text </s>" in shell(f"bash cache/make_vocab.sh check --vocab {out} --corpus {text}")


def test_flags_alone_do_not_replace_the_shipped_vocabulary(shell) -> None:
    before = (ROOT / "cache/vocab.txt").read_bytes()
    said = shell("bash cache/make_vocab.sh --kind characters", status=2)
    assert said.splitlines()[-1].startswith("error: with flags CORPUS, SIZE and OUTPUT must be given")
    assert (ROOT / "cache/vocab.txt").read_bytes() == before
