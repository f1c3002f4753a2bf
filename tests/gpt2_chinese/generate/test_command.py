"""`python -m gpt2_chinese.generate` on a Hugging Face folder: its flags, its output, its errors."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from gpt2_chinese.checkpoint.trained_model import load_model
from gpt2_chinese.generate.__main__ import main
from gpt2_chinese.generate.writer import Characters, continuation, read_prompts
from gpt2_chinese.vocabulary.vocabulary import Vocabulary

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
PROMPTS = ["今天天气", "这家小店的老板", "hello"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as it is downloaded, with weights large enough that its texts differ."""
    made = tmp_path_factory.mktemp("hf")
    vocab = Path(__file__).resolve().parents[3] / "cache" / "vocab.txt"
    size = Vocabulary.load(vocab).size
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=size, n_layer=2, n_embd=32, n_head=2, n_positions=32)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(made)
    shutil.copy(vocab, made)
    return made


@pytest.fixture
def say(folder: Path, capsys):
    """say(flags): what the command prints."""

    def said(*flags: object) -> str:
        main(["--model", str(folder), "--length", "20", *map(str, flags)])
        return capsys.readouterr().out

    return said


def flags_of(prompts: list[str]) -> list[str]:
    return [word for prompt in prompts for word in ("--prompt", prompt)]


def lines(said: str) -> list[dict]:
    return [json.loads(line) for line in said.splitlines()]


def without_rate(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "tokens_per_s"} for row in rows]


@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_greedy_on_a_folder_is_hugging_faces(folder: Path, say, penalty: float) -> None:
    rows = lines(say("--json", "--greedy", "--repetition-penalty", penalty, *flags_of(PROMPTS)))
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    vocabulary = Vocabulary.load(folder)
    for row, prompt in zip(rows, PROMPTS, strict=True):
        ids = torch.tensor([vocabulary.encode_prompt(prompt)])
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, repetition_penalty=penalty,
            eos_token_id=vocabulary.end_id, pad_token_id=0,
            suppress_tokens=sorted(vocabulary.special_ids - {vocabulary.end_id}),
        )  # fmt: skip
        wanted = out[0, ids.shape[1] :].tolist()
        assert row["ids"] == (wanted[: wanted.index(vocabulary.end_id)] if vocabulary.end_id in wanted else wanted)


def test_a_text_depends_on_seed_prompt_and_sample_alone(say) -> None:
    def texts(*flags: object) -> list[dict]:
        return without_rate(lines(say("--json", *flags)))

    all_flags = (*flags_of(PROMPTS), "--num", 3)
    together = texts(*all_flags)
    assert together == texts(*all_flags, "--batch-size", 1) == texts(*all_flags, "--batch-size", 4, "--no-cache")
    assert together != texts(*all_flags, "--seed", 43)
    assert [row for row in together if row["sample"] == 0] == texts(*flags_of(PROMPTS))
    assert together[:3] == texts(*flags_of(PROMPTS[:1]), "--num", 3)
    assert len({tuple(row["ids"]) for row in together}) == 9


def test_beyond_the_context_with_and_without_the_cache(say) -> None:
    flags = ("--json", "--length", 100, *flags_of(PROMPTS))
    assert without_rate(lines(say(*flags))) == without_rate(lines(say(*flags, "--no-cache")))


def test_json_lines_say_all_and_agree_with_the_text(folder: Path, say) -> None:
    vocabulary = Vocabulary.load(folder)
    rows = lines(say("--json", "--num", 6, "--length", 300, "--prompt", "今天", "--top-k", 0, "--temperature", 1))
    plain = say("--num", 6, "--length", 300, "--prompt", "今天", "--top-k", 0, "--temperature", 1)
    assert plain == "".join(f"今天{row['text']}\n\n" for row in rows)
    for row in rows:
        assert list(row) == ["prompt", "sample", "text", "ids", "finish_reason", "tokens_per_s"]
        assert row["text"] == continuation(vocabulary, vocabulary.encode_prompt("今天"), row["ids"]).rstrip()
        assert row["finish_reason"] == ("length" if len(row["ids"]) == 300 else "end") and row["tokens_per_s"] > 0
        assert not vocabulary.special_ids & set(row["ids"])
    assert {row["finish_reason"] for row in rows} >= {"length"}


def test_streamed_it_is_the_same_text(say) -> None:
    for flags in (flags_of(PROMPTS), ["--num", "2"]):
        assert say(*flags, "--stream") == say(*flags)


def test_a_stream_goes_out_piece_by_piece(folder: Path) -> None:
    class Pieces(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    pieces: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", Pieces())
        main(["--model", str(folder), "--length", "20", "--stream", "--prompt", "今天"])
    assert sum(bool(piece.strip()) for piece in pieces) > 10 and pieces[0].startswith("今天")


def byte_vocabulary(path: Path) -> Vocabulary:
    """A byte-level BPE, whose tokens may be parts of a character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    tokenizer.train_from_iterator(["今天天气很好，我们去河边走走。"] * 3, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    return Vocabulary.load(path / "tokenizer.json")


def test_streamed_text_never_changes_and_has_whole_characters(tmp_path: Path, vocab: Path) -> None:
    draw = random.Random(0)
    for vocabulary in (Vocabulary.load(vocab), byte_vocabulary(tmp_path)):
        texts = ["今天hello world, 3 天气。good-bye! a b c", "明天é下雨，𠮷野家", "  天 气 ", "new york city\n你好"]
        rows = [vocabulary.encode(text) for text in texts]
        if vocabulary.profile != "own":  # any characters in any order; any bytes in any order would be no characters
            rows += [[draw.randrange(vocabulary.size) for _ in range(30)] for _ in range(60)]
        for row in rows:
            prompt = vocabulary.encode_prompt("好")
            made = Characters(vocabulary, "好", prompt)
            pieces = [made.add(token) for token in row]
            assert "\ufffd" not in "".join(pieces)
            assert "".join(pieces) == ("好" + continuation(vocabulary, prompt, row).rstrip() if any(pieces) else "")


def test_prompts_from_files(say, tmp_path: Path) -> None:
    plain, rows = tmp_path / "plain.txt", tmp_path / "rows.jsonl"
    plain.write_text("\ufeff今天天气\n\n这家小店的老板\n", encoding="utf-8")
    rows.write_text('{"prompt": "今天天气", "id": 7}\n{"prompt": "这家小店的老板"}\n', encoding="utf-8")
    assert read_prompts(plain) == read_prompts(rows) == PROMPTS[:2]
    assert say("--prompt-file", plain) == say("--prompt-file", rows) == say(*flags_of(PROMPTS[:2]))


def test_output_to_a_file(say, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert say("--json", "--output", out, "--num", 2) == ""
    assert [row["sample"] for row in lines(out.read_text(encoding="utf-8"))] == [0, 1]
    streamed = say("--json", "--stream", "--output", out)
    assert lines(out.read_text(encoding="utf-8"))[0]["text"] in streamed
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_sample_that_ends_at_once_is_reported(folder: Path, tmp_path: Path, capsys) -> None:
    """A model that has learned nothing but the end of a document: the last layer norm points to the end's embedding."""
    model, vocabulary = load_model(folder)
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(model.transformer.wte.weight[vocabulary.end_id] * 10)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    shutil.copy(folder / "vocab.txt", tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    for flags in ((), ("--stream",)):
        main(["--model", str(tmp_path), "--prompt", "今天", "--repetition-penalty", "1", *flags])
        told = capsys.readouterr()
        assert told.out == "今天\n\n" and "nothing follows 「今天」 in sample 1: the model ended at once" in told.err
    main(["--model", str(tmp_path), "--prompt", "今天", "--repetition-penalty", "1", "--json"])
    row = json.loads(capsys.readouterr().out)
    assert (row["text"], row["ids"], row["finish_reason"]) == ("", [], "end")


def talk(say, monkeypatch: pytest.MonkeyPatch, text: str, *flags: object) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return say("--interactive", *flags)


def test_interactive_answers_prompt_after_prompt(say, monkeypatch) -> None:
    said = talk(say, monkeypatch, "今天天气\n这家小店的老板\n\n今天\n", "--json")
    assert without_rate(lines(said)) == without_rate(lines(say("--json", *flags_of(PROMPTS[:2])))), "an empty line ends"
    assert talk(say, monkeypatch, "今天天气\n这家小店的老板\n") == say(*flags_of(PROMPTS[:2])) + "\n", "so does EOF"


def test_interactive_commands_change_the_flags_that_stay(say, monkeypatch) -> None:
    said = talk(
        say, monkeypatch, "/set temperature 0.5\n/set top-k 3\n/set num 2\n/set length 7\n今天天气\n/show\n", "--json"
    ).splitlines()
    assert said[:4] == ["temperature is 0.5", "top_k is 3", "num is 2", "length is 7"]
    wanted = lines(say("--json", "--temperature", 0.5, "--top-k", 3, "--num", 2, "--length", 7, "--prompt", "今天天气"))
    assert without_rate(lines("\n".join(said[4:6]))) == without_rate(wanted)
    assert "length 7, num 2, seed 42, temperature 0.5, top_k 3" in said[6]


@pytest.mark.parametrize(
    "command, answer",
    [
        ("/set temperature 0", "error: --temperature 0.0 is out of range"),
        ("/set temperature warm", "error: temperature cannot be warm"),
        ("/set greedy maybe", "error: greedy cannot be maybe: on or off"),
        ("/set mood good", "error: /set mood good is no command: /set NAME VALUE"),
        ("/set length", "error: /set length is no command"),
        ("/dance", "error: /dance is no command"),
        ("/help", "/set NAME VALUE (length, num, seed"),
        ("/set greedy on", "greedy is True"),
    ],
)
def test_interactive_commands_that_are_wrong_change_nothing(say, monkeypatch, command: str, answer: str) -> None:
    said = talk(say, monkeypatch, f"{command}\n/show\n").splitlines()
    assert said[0].startswith(answer)
    assert ("temperature 0.8, " in said[1]) and "length 20" in said[1]


WRONG = {
    "no model": (["--model", "nowhere"], "no trained model in nowhere"),
    "flag": (["--promt", "x"], "unrecognized arguments: --promt"),
    "number": (["--length", "many"], "invalid int value: 'many'"),
    "length": (["--length", "0"], "--length 0 is out of range"),
    "num": (["--num", "-1"], "--num -1 is out of range"),
    "seed": (["--seed", "-1"], "--seed -1 is out of range"),
    "batch": (["--batch-size", "0"], "--batch-size 0 is out of range"),
    "temperature": (["--temperature", "nan"], "--temperature nan is out of range"),
    "two kinds": (["--prompt", "x", "--prompt-file", "y"], "--prompt and --prompt-file: give one of them"),
    "no file": (["--prompt-file", "nowhere"], "cannot read --prompt-file nowhere: it does not exist"),
    "talk": (["--interactive", "--prompt", "x"], "--interactive asks for prompts"),
    "stream": (["--json", "--stream"], "--json and --stream both write to the terminal"),
    "output": (["--output", "no/such/folder/x"], "--output no/such/folder/x cannot be written"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_are_one_line_and_status_2(folder: Path, capsys, case: str) -> None:
    flags, line = WRONG[case]
    with pytest.raises(SystemExit) as end:
        main(["--model", str(folder), *flags])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("error: ") and line in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "text, line",
    [
        ("\n \n", "holds no prompt"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "line 2: give a JSON object"),
        ('{"prompt": 3}\n', "line 1: give a JSON object"),
        ('{"prompt": "a"}\n\nplain\n', "line 3: give a JSON object"),
    ],
)
def test_prompt_files_that_are_wrong_are_told_with_the_line(tmp_path: Path, capsys, text: str, line: str) -> None:
    file = tmp_path / "prompts"
    file.write_text(text)
    with pytest.raises(SystemExit):
        main(["--model", "nowhere", "--prompt-file", str(file)])
    assert line in capsys.readouterr().err


def test_help_gives_every_default(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and said.count("(default: ") == 14 and "(default: 今天天气)" in said
