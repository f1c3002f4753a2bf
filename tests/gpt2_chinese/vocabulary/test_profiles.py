"""The two conventions that share the format of vocab.txt, held against transformers' BertTokenizer; and foreign files."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from pathlib import Path

import pytest

from gpt2_chinese.checkpoint import step_folder
from gpt2_chinese.corpus import read_paragraphs
from gpt2_chinese.errors import UserError
from gpt2_chinese.run.resolve import resolve
from gpt2_chinese.settings import Settings
from gpt2_chinese.vocabulary.__main__ import main
from gpt2_chinese.vocabulary.fit import measure
from gpt2_chinese.vocabulary.profiles import read_vocabulary, vocabulary_size
from gpt2_chinese.vocabulary.training import train, train_bpe
from gpt2_chinese.vocabulary.vocabulary import SPECIAL_TOKENS, Vocabulary

ROOT = Path(__file__).resolve().parents[3]
TEXTS = ["2019年，A4纸1,000张。", "Ｈｅｌｌｏ Café 3.14 ①½Ⅷ", "𠮷野家 \u3000半角 ｶﾅ 🙂", "[MASK]不是标记[SEP]", "", " \n\t "]


def texts() -> list[str]:
    return [*read_paragraphs(ROOT / "data/train"), *read_paragraphs(ROOT / "data/valid"), *TEXTS[:3]]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped vocabulary and entries of Google's: whole numbers, and digits that continue a word."""
    shipped = (ROOT / "cache/vocab.txt").read_text(encoding="utf-8")
    more = ["2019", "1918", "10", "18", "##年", *(f"##{digit}" for digit in range(10)), "##99"]
    path = tmp_path_factory.mktemp("numbers") / "vocab.txt"
    path.write_text(shipped + "".join(entry + "\n" for entry in more), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def bert(numbers: Path):
    return pytest.importorskip("transformers").BertTokenizer(str(numbers), do_lower_case=True)


def test_uer_is_bert_tokenizer(numbers: Path, bert) -> None:
    vocabulary = Vocabulary.load(numbers, "uer")
    ours = vocabulary.encode_documents(texts())
    assert ours == bert(texts()).input_ids
    assert {vocabulary.entries.index("2019"), vocabulary.entries.index("1918")} & {i for ids in ours for i in ids}


def test_gpt2_chinese_is_bert_tokenizer_with_blanks_around_digits_and_its_own_marks(numbers: Path, bert) -> None:
    """Each of Unicode's numbers is split off: those of str.isdigit(), and also ½, Ⅷ and 〇 (as in 二〇〇〇)."""
    vocabulary = Vocabulary.load(numbers, "gpt2_chinese")
    spaced = ["".join(f" {c} " if unicodedata.category(c)[0] == "N" else c for c in text) for text in texts()]
    mask, cls = (vocabulary.entries.index(token) for token in ("[MASK]", "[CLS]"))
    theirs = bert(spaced, add_special_tokens=False).input_ids
    assert vocabulary.encode_documents(texts()) == [[mask, *ids, cls] for ids in theirs]
    assert theirs != bert(texts(), add_special_tokens=False).input_ids, "the rule is at work"


@pytest.mark.parametrize("kind", ["gpt2_chinese", "uer", "bpe"])
def test_an_exported_vocabulary_gives_all_readers_equal_ids(kind: str, numbers: Path, corpus: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if kind == "bpe":
        (tmp_path / "tokenizer.json").write_text(train_bpe(corpus, 400), encoding="utf-8")
        vocabulary = Vocabulary.load(tmp_path / "tokenizer.json")
    else:
        vocabulary = Vocabulary.load(numbers, kind)
    final = tmp_path / "final"
    final.mkdir()
    vocabulary.save(final)
    again, theirs = Vocabulary.load(final), transformers.AutoTokenizer.from_pretrained(final)
    given = texts()[::7] + TEXTS[:3]
    assert again.file.facts() == vocabulary.file.facts(), "no flag has to name the profile"
    assert again.encode_documents(given) == vocabulary.encode_documents(given) == theirs(given).input_ids
    assert [again.encode_prompt(text) for text in given] == [ids[:-1] for ids in theirs(given).input_ids]
    assert (theirs.bos_token_id, theirs.eos_token_id) == (vocabulary.begin_id, vocabulary.end_id)
    assert (theirs.pad_token_id, theirs.unk_token_id) == (vocabulary.pad_id, vocabulary.unk_id)
    config = json.loads((final / "tokenizer_config.json").read_text())
    assert config.get("do_lower_case", False) == (kind != "bpe")
    if kind == "uer":
        assert transformers.BertTokenizer.from_pretrained(final)(given).input_ids == theirs(given).input_ids
    alone = Vocabulary.load(final / "tokenizer.json")
    assert alone.encode_documents(given) == vocabulary.encode_documents(given), "its template has the marks"


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "files, profile",
    [
        ({}, "gpt2_chinese"),
        ({"tokenizer_config.json": {"layout_profile": "uer", "tokenizer_class": "PreTrainedTokenizerFast"}}, "uer"),
        ({"tokenizer_config.json": {"layout_profile": "gpt2_chinese", "tokenizer_class": "BertTokenizer"}}, "gpt2_chinese"),
        ({"tokenizer_config.json": {"do_lower_case": False, "tokenizer_class": "BertTokenizer"}}, "uer"),
        ({"tokenizer_config.json": {}, "config.json": {"tokenizer_class": "BertTokenizerFast"}}, "uer"),
        ({"config.json": {"model_type": "gpt2"}}, "gpt2_chinese"),
    ],
)
def test_auto_is_the_profile_that_the_folder_records(tmp_path: Path, numbers: Path, files: dict, profile: str) -> None:
    write(tmp_path / "vocab.txt", numbers.read_text(encoding="utf-8"))
    for name, content in files.items():
        write(tmp_path / name, content)
    for path in (tmp_path, tmp_path / "vocab.txt"):
        assert read_vocabulary(path).profile == profile
    assert read_vocabulary(tmp_path, "uer").profile == "uer", "an explicit profile has priority"


def test_special_tokens_in_a_text_are_text(numbers: Path) -> None:
    for profile in ("gpt2_chinese", "uer"):
        vocabulary = Vocabulary.load(numbers, profile)
        assert not set(vocabulary.encode(TEXTS[3])) & (vocabulary.special_ids - {vocabulary.unk_id})


# -- files as people have them ----------------------------------------------------------------------------------------


def test_ids_are_lines_whatever_the_line_ends(tmp_path: Path) -> None:
    """As in vocab_guwen.txt: two empty lines, special tokens in another order; CRLF and no line break at the end, too."""
    lines = ["[UNK]", "[CLS]", "", "[SEP]", "[PAD]", "[MASK]", "天", "", "地", "天", "\u2028", "人"]
    plain = write(tmp_path / "plain.txt", "")
    digests = set()
    for text in ("\n".join(lines), "\n".join(lines) + "\n", "\r\n".join(lines) + "\r\n", "\ufeff" + "\n".join(lines)):
        plain.write_bytes(text.encode())
        vocabulary = Vocabulary.load(plain)
        assert vocabulary.size == vocabulary_size(plain) == 12
        assert vocabulary.encode_documents(["天 地人 \n 火"]) == [[5, 9, 8, 11, 0, 1]], "the last of two lines counts"
        assert vocabulary.decode([9, 8, 11]) == "天地人"
        digests.add(vocabulary.digest)
        (tmp_path / "out").mkdir(exist_ok=True)
        vocabulary.save(tmp_path / "out")
        assert Vocabulary.load(tmp_path / "out").entries == lines
    assert len(digests) == 1
    assert Vocabulary.load(plain, "uer").digest not in digests


def test_a_digest_depends_on_everything_that_decides_the_ids(tmp_path: Path, corpus: Path) -> None:
    source = write(tmp_path / "tokenizer.json", train_bpe(corpus, 300))
    first = Vocabulary.load(source)
    (tmp_path / "final").mkdir()
    first.save(tmp_path / "final")
    assert Vocabulary.load(tmp_path / "final").digest == first.digest
    content = json.loads(source.read_text())
    content["model"]["merges"] = content["model"]["merges"][:-1]
    assert Vocabulary.load(write(source, content)).digest != first.digest


BPE = {"model": {"type": "BPE", "vocab": {"<s>": 0, "</s>": 1}, "merges": []}}
WRONG = {
    "no MASK": ("vocab.txt", "[UNK]\n[CLS]\n[SEP]\n", "auto", "lacks [MASK]: profile gpt2_chinese needs"),
    "no SEP": ("vocab.txt", "[UNK]\n[CLS]\n[MASK]\n", "uer", "lacks [SEP]: profile uer needs"),
    "not UTF-8": ("vocab.txt", b"\xd6\xd0", "auto", "vocab.txt: it is not UTF-8 text"),
    "profile of a tokenizer.json": ("tokenizer.json", BPE, "uer", "--vocab-profile uer: "),
    "no model": ("tokenizer.json", {"model": 3}, "auto", "is not a tokenizer.json"),
    "deep": ("tokenizer.json", "[" * 100_000, "auto", "is not a tokenizer.json"),
    "huge id": ("tokenizer.json", {"model": {"vocab": {"<s>": 10**15}}}, "auto", "its vocabulary is broken"),
    "negative id": ("tokenizer.json", {"model": {"vocab": {"<s>": -1}}}, "auto", "its vocabulary is broken"),
    "id as text": ("tokenizer.json", {"model": {"vocab": {"<s>": "0"}}}, "auto", "its vocabulary is broken"),
    "no marks": ("tokenizer.json", {"model": {"vocab": {"a": 0}}}, "auto", "has none of [CLS], <s>,"),
    "no known model": ("tokenizer.json", {"model": {"vocab": {"<s>": 0, "</s>": 1}}}, "auto", "is not a tokenizer.json"),
    "broken record": ("tokenizer_config.json", "[]", "auto", "tokenizer_config.json is no JSON object"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_one_line(case: str, tmp_path: Path, vocab: Path) -> None:
    name, content, profile, line = WRONG[case]
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        write(tmp_path / name, content)
    if name == "tokenizer_config.json":
        write(tmp_path / "vocab.txt", vocab.read_text(encoding="utf-8"))
    with pytest.raises(UserError) as error:
        Vocabulary.load(tmp_path, profile)
    assert line in str(error.value) and str(tmp_path) in str(error.value) and "\n" not in str(error.value)


# -- the commands -----------------------------------------------------------------------------------------------------


def test_check_prints_the_numbers_of_a_count_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vocab = write(tmp_path / "vocab.txt", "".join(f"{t}\n" for t in [*SPECIAL_TOKENS, "天", "地", "a", "##b", "1", "月"]))
    corpus = write(tmp_path / "c.json", ["天天地 鸟鸟", "ab 11 兽鸟", "abc"])
    fit = measure(Vocabulary.load(vocab), corpus)
    assert (fit.documents, fit.characters, fit.tokens, fit.unknown) == (3, 17, 12, 5)
    assert fit.unknown_characters == Counter({"鸟": 3, "兽": 1, "a": 1, "b": 1, "c": 1})
    main(["check", "--vocab", str(vocab), "--corpus", str(corpus)])
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    said = {name.strip(): value.strip() for name, value in rows.items()}
    assert said["entries"] == "11" and said["profile"] == "gpt2_chinese: [MASK] text [CLS]"
    assert said["characters per token"] == f"{17 / 12:.3f}" and said["unknown"] == f"{5 / 12:.2%} of the tokens"
    assert said["unused entries"] == "1 (16.7%)" and said["most often unknown"].startswith("鸟 3, ")
    assert "[MASK] 4" in said["special"]


def test_training_by_command_writes_the_vocabulary_of_the_function(tmp_path: Path, corpus: Path, capsys) -> None:
    for kind, name in (("characters", "vocab.txt"), ("wordpiece", "vocab.txt"), ("bpe", "tokenizer.json")):
        out = tmp_path / kind / name
        main(["train", "--kind", kind, "--corpus", str(corpus), "--size", "300", "--output", str(out)])
        made = train_bpe(corpus, 300) if kind == "bpe" else "".join(f"{e}\n" for e in train(corpus, 300, kind))
        assert out.read_text(encoding="utf-8") == made
        assert "characters per token" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["train", "--kind", "bpe", "--corpus", str(corpus), "--output", str(tmp_path / "vocab.txt")])
    assert stop.value.code == 2 and "makes a tokenizer.json, name it so" in capsys.readouterr().err


# -- runs and checkpoints ---------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_vocabulary_or_profile_is_refused(tmp_path: Path, vocab: Path, capsys) -> None:
    torch = pytest.importorskip("torch")
    program = str(ROOT / "chapters" / "00_single" / "train.py")

    def parse(*flags: object) -> Settings:
        return resolve(Settings.from_command_line(program, None, ["--output-dir", str(tmp_path / "run"), *map(str, flags)]))

    settings = parse()
    assert settings.vocab_profile == "gpt2_chinese" and settings.values()["vocab_profile"] == "gpt2_chinese"
    state = {"model": settings.model.to_dict(), "vocabulary": settings.vocabulary.facts()}
    folder = tmp_path / "run" / "checkpoints"
    step_folder.save(folder, 3, {"a": torch.zeros(1)}, {}, state)
    copy = write(tmp_path / "same" / "vocab.txt", vocab.read_text(encoding="utf-8"))
    assert parse("--vocab", copy).resume_from == folder / "step_000003", "content counts, not place"
    lines = vocab.read_text(encoding="utf-8").splitlines()
    lines[100], lines[101] = lines[101], lines[100]
    other = write(tmp_path / "other" / "vocab.txt", "\n".join(lines))
    for flags, said in (
        (("--vocab", other), f"was trained with another vocabulary, this run has --vocab {other}"),
        (("--vocab-profile", "uer"), "was trained with profile gpt2_chinese, this run has"),
    ):
        with pytest.raises(SystemExit) as stop:
            parse(*flags)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and said in error and error.count("\n") == 1
    step_folder.save(folder, 4, {"a": torch.zeros(1)}, {}, {"model": settings.model.to_dict()})
    assert parse("--vocab-profile", "uer").resume_from == folder / "step_000004", "it records no profile: accepted"
