"""Training a vocabulary: WordPiece, characters, or byte-level BPE. The same corpus gives the same bytes at every call."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from gpt2_chinese.corpus import read_paragraphs
from gpt2_chinese.errors import UserError
from gpt2_chinese.vocabulary.vocabulary import SPECIAL_TOKENS, wordpiece

KINDS = ("wordpiece", "characters", "bpe")
BPE_SPECIAL_TOKENS = ["<pad>", "<unk>", "<s>", "</s>"]


def train(corpus: Path | str, size: int, kind: str = "wordpiece", profile: str = "gpt2_chinese") -> list[str]:
    """Entries of a `vocab.txt` of at most `size` entries.

    The alphabet comes first, by falling frequency, ties by code point. With WordPiece the remaining entries are merged
    pieces of Latin words, in profile uer also of numbers. The library's trainer would order its alphabet by a hash map,
    which differs from run to run. So the alphabet is passed to it ready-made, as special tokens.

    Raises:
        UserError: a bad corpus, or a size too small for an alphabet.
    """
    from tokenizers import trainers

    if size <= len(SPECIAL_TOKENS):
        raise UserError(f"--size {size} leaves no room after the {len(SPECIAL_TOKENS)} special tokens")
    tokenizer = wordpiece(SPECIAL_TOKENS, profile)
    words: Counter[str] = Counter()
    for paragraph in read_paragraphs(corpus):
        normal = tokenizer.normalizer.normalize_str(paragraph)
        words.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal))
    alphabet: Counter[str] = Counter()
    for word, count in words.items():
        for place, character in enumerate(word):
            alphabet["##" * (place > 0) + character] += count
    ranked = sorted(alphabet, key=lambda piece: (-alphabet[piece], piece))
    given = SPECIAL_TOKENS + ranked[: size - len(SPECIAL_TOKENS)]
    if kind == "characters":
        return given
    known = set(given)
    whole = {w: c for w, c in words.items() if all("##" * (i > 0) + ch in known for i, ch in enumerate(w))}
    repeated = (word for word in sorted(whole) for _ in range(whole[word]) if len(word) > 1)
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=given, min_frequency=2, show_progress=False)
    tokenizer.train_from_iterator(repeated, trainer)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    return sorted(ids, key=ids.__getitem__)[:size]


def train_bpe(corpus: Path | str, size: int) -> str:
    """A `tokenizer.json` of byte-level BPE: it decodes any text unchanged, no character is unknown; `<s> text </s>`.

    Raises:
        UserError: a bad corpus, or a size too small for the 256 bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    least = len(alphabet) + len(BPE_SPECIAL_TOKENS)
    if size < least:
        raise UserError(f"--size {size} is too small for --kind bpe: bytes and special tokens alone are {least}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=BPE_SPECIAL_TOKENS,
        initial_alphabet=alphabet,
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(read_paragraphs(corpus), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    )
    return tokenizer.to_str(pretty=True) + "\n"
