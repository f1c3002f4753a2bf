"""The program of the engine's page that fine-tunes a BERT runs; both languages show the same one.

tests/chapters/test_accelerate.py starts it with Accelerate's launcher.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.docs.pages import example
from tests.pstar.test_from_pretrained import CHARACTERS, HEADLINES, SMALL


def prepare(folder: Path, repeats: int = 8) -> None:
    """my-bert with a tokenizer whose tokens are characters, and tnews/train.json of the test's own headlines."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *CHARACTERS]
    config = transformers.BertConfig(vocab_size=len(tokens), **SMALL)
    torch.manual_seed(1)
    transformers.BertModel(config).bfloat16().save_pretrained(folder / "my-bert")
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(tokens), encoding="utf-8")
    transformers.BertTokenizer(str(vocabulary)).save_pretrained(folder / "my-bert")
    (folder / "tnews").mkdir()
    lines = [json.dumps(line, ensure_ascii=False) for line in HEADLINES * repeats]
    (folder / "tnews/train.json").write_text("\n".join(lines) + "\n", encoding="utf-8")


def check(folder: Path, said: str, steps: int) -> None:
    """Asserts that each step printed a loss, that the model learnt, and that transformers reads what it wrote, in fp32."""
    import transformers

    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", said)]
    assert len(losses) == steps and losses[-1] < losses[0] - 0.3, said
    tuned = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "tuned").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tuned")
    assert tuned.dtype == torch.float32 and tuned.classifier.weight.abs().sum() > 0
    ids = tokenizer([HEADLINES[0]["sentence"]], return_tensors="pt")
    assert ids["input_ids"].shape == (1, len(HEADLINES[0]["sentence"]) + 2) and tuned(**ids).logits.shape == (1, 4)


def test_the_program_runs_learns_and_leaves_a_folder_for_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:  # fmt: skip
    code = example("hugging-face")
    prepare(tmp_path, repeats=40)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    exec(compile(code.replace("5e-5", "1e-2"), "page", "exec"), {})    # few steps, so larger ones
    check(tmp_path, capsys.readouterr().out, 10)
