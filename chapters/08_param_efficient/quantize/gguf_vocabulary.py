"""The vocabulary as keys of a GGUF file, for llama.cpp's tokenizers.

    WordPiece (vocab.txt)     tokenizer "bert": the beginning of a word has the mark U+2581, a continuation has no ##
    byte-level BPE            tokenizer "gpt2", with the list of merges
    others                    tokenizer "no_vocab": prompts must be given as ids

A prompt is best given as ids, from `Vocabulary.encode_prompt`. llama.cpp's tokenizer "bert" splits Chinese text as this
project does, but always adds the separator behind it (llama-vocab.cpp, the case of WPM), which here is the end of a
document; and it keeps digits together, while the profile gpt2_chinese splits them.
"""

from __future__ import annotations

from typing import Any

from gpt2_chinese.vocabulary.profiles import OWN
from gpt2_chinese.vocabulary.vocabulary import Vocabulary

NORMAL, UNKNOWN, CONTROL, UNUSED = 1, 2, 3, 5  # enum llama_token_type
_WORD_BEGINS = "\u2581"


def vocabulary_keys(vocabulary: Vocabulary) -> dict[str, tuple[str, Any]]:
    """Keys of the tokenizer: key -> (type, value), as `quantize.gguf.metadata` has them."""
    model = (vocabulary.file.content or {}).get("model", {})
    kind = model.get("type", "WordPiece") if vocabulary.profile == OWN else "WordPiece"
    if kind not in ("WordPiece", "BPE"):
        return {"tokenizer.ggml.model": ("str", "no_vocab")}
    tokens, types = _tokens(vocabulary, kind)
    found: dict[str, tuple[str, Any]] = {
        "tokenizer.ggml.model": ("str", "bert" if kind == "WordPiece" else "gpt2"),
        "tokenizer.ggml.pre": ("str", "default" if kind == "WordPiece" else "gpt-2"),
        "tokenizer.ggml.tokens": ("[str]", tokens),
        "tokenizer.ggml.token_type": ("[i32]", types),
        "tokenizer.ggml.bos_token_id": ("u32", vocabulary.begin_id),
        "tokenizer.ggml.eos_token_id": ("u32", vocabulary.end_id),
        "tokenizer.ggml.add_bos_token": ("bool", True),  # a prompt is the begin mark and the text
        "tokenizer.ggml.add_eos_token": ("bool", False),
        "tokenizer.ggml.seperator_token_id": ("u32", vocabulary.end_id),  # ggml's spelling
    }
    for key, token in (("unknown", vocabulary.unk_id), ("padding", vocabulary.pad_id)):
        if token is not None:
            found[f"tokenizer.ggml.{key}_token_id"] = ("u32", token)
    if kind == "BPE":
        merges = model.get("merges", [])
        found["tokenizer.ggml.merges"] = ("[str]", [m if isinstance(m, str) else " ".join(m) for m in merges])
    return found


def _tokens(vocabulary: Vocabulary, kind: str) -> tuple[list[str], list[int]]:
    """The text and the type of each id. Ids without an entry, and all but the last of equal entries, get a name."""
    last = {entry: i for i, entry in enumerate(vocabulary.entries)}
    tokens, types = [], []
    for i, entry in enumerate(vocabulary.entries):
        if not entry or last[entry] != i:
            tokens.append(f"[unused id {i}]")
            types.append(UNUSED)
            continue
        special = i in vocabulary.special_ids
        tokens.append(entry if special or kind == "BPE" else _marked(entry))
        types.append(UNKNOWN if i == vocabulary.unk_id else CONTROL if special else NORMAL)
    return tokens, types


def _marked(entry: str) -> str:
    return entry[2:] if entry.startswith("##") and len(entry) > 2 else _WORD_BEGINS + entry
