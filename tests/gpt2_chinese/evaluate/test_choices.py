"""Questions with several answers: their files, and their scores against a reference that takes one token at a time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt2_chinese.errors import UserError
from gpt2_chinese.evaluate.choices import WORDS, read_set, set_files
from gpt2_chinese.evaluate.likelihood import answer_set
from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from gpt2_chinese.vocabulary.vocabulary import Vocabulary

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ROOT / "data" / "choices"
FORMS = {"cloze": "chid", "inference": "cmnli", "reading": "c3"}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.load(ROOT / "cache" / "vocab.txt")


def model_of(vocabulary: Vocabulary, context: int) -> GPT2LMHeadModel:
    """A model of random weights, large enough for answers to differ."""
    torch.manual_seed(3)
    config = ModelConfig(2, 32, 2, context, vocabulary.size, initializer_range=0.3)
    return GPT2LMHeadModel(config).eval()


# ---- the shipped sets


@pytest.mark.parametrize("name", FORMS)
def test_the_shipped_questions_are_what_the_table_of_the_data_says(name: str) -> None:
    found = read_set(SHIPPED / f"{name}.json")
    assert found.form == FORMS[name] and found.skipped == 0
    table = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    assert f"| `choices/{name}.json` | {found.form} | {len(found.items)} |" in table
    places = np.bincount([item.answer for item in found.items], minlength=len(found.items[0].options))
    assert places.min() >= 0.6 * places.mean(), "no place is right so often that guessing it would help"
    texts = [item.before + item.options[item.answer] + item.after for item in found.items]
    assert len(set(texts)) == len(texts)
    for text in texts:
        assert not re.search(r"[,;?!#_]|\s", text), f"half-width punctuation or a blank: {text}"


def test_the_shipped_vocabulary_knows_the_shipped_questions(vocabulary: Vocabulary) -> None:
    ids = [i for name in FORMS for item in read_set(SHIPPED / f"{name}.json").items
           for i in vocabulary.encode(item.before + "".join(item.options) + item.after)]  # fmt: skip
    assert ids.count(vocabulary.unk_id) < 0.01 * len(ids)


def test_cloze_answers_are_as_long_as_each_other() -> None:
    for item in read_set(SHIPPED / "cloze.json").items:
        assert len({len(option) for option in item.options}) == 1, item


# ---- the forms, as CLUE's files have them


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return path


def test_chid_with_several_texts_and_blanks_takes_its_answers_from_the_file_beside(tmp_path: Path) -> None:
    records = [{"groupName": "1", "candidates": ["甲乙", "丙丁", "戊己"],
                "content": ["前#idiom000001#中#idiom000002#后。", "没有空。", "又#idiom000003#。"]},
               {"groupName": "2", "candidates": ["庚辛", "壬癸"], "content": ["#idiom000004#！"]}]  # fmt: skip
    write(tmp_path / "dev.json", "\n".join(json.dumps(record, ensure_ascii=False) for record in records))
    answers = {"#idiom000001#": 2, "#idiom000002#": 0, "#idiom000003#": 1, "#idiom000004#": 1}
    write(tmp_path / "dev_answer.json", answers)
    assert set_files(tmp_path) == [tmp_path / "dev.json"]
    items = read_set(tmp_path / "dev.json").items
    assert [(item.before, item.after, item.answer) for item in items] == [
        ("前", "中……后。", 2), ("前……中", "后。", 0), ("又", "。", 1), ("", "！", 1)]  # fmt: skip
    assert len(read_set(tmp_path / "dev.json", 2).items) == 2


def test_c3_joins_the_passage_and_finds_the_answer_by_its_text(tmp_path: Path) -> None:
    question = {"question": "几点？", "choice": ["九点", "两点"], "answer": "两点"}
    other = {"question": "谁？", "choice": ["男的", "女的", "孩子"], "answer": "男的"}
    file = write(tmp_path / "c3-d-dev.json", [[["女：早。", "男：早。"], [question, other], "14-1"], [[], [other], "14-2"]])
    found = read_set(file)
    assert found.form == "c3" and [item.answer for item in found.items] == [1, 0, 0]
    assert found.items[0].before == "女：早。男：早。问题：几点？答案：" and found.items[2].before == "问题：谁？答案："


def test_cmnli_puts_a_word_between_the_sentences_and_leaves_out_undecided_pairs(tmp_path: Path) -> None:
    pairs = [{"sentence1": "下雨了。", "sentence2": "天是湿的。", "label": label} for label in [*WORDS, "-"]]
    found = read_set(write(tmp_path / "dev.json", "\n".join(json.dumps(pair, ensure_ascii=False) for pair in pairs) + "\n"))
    assert found.form == "cmnli" and found.skipped == 1 and [item.answer for item in found.items] == [0, 1, 2]
    assert [found.items[0].before + option + found.items[0].after for option in found.items[0].options] == [
        "下雨了？对，天是湿的。", "下雨了？错，天是湿的。", "下雨了？可能，天是湿的。"]  # fmt: skip


GOOD = '{"content": "a#idiom#b", "candidates": ["x", "y"], "answer": 0}\n'
WRONG = {  # content -> the line after the path
    "empty": ("", r" holds no item: give a file in the form of"),
    "no JSON": (GOOD + "{\n", r", line 2: not valid JSON: .*one object a line"),
    "another form": (GOOD + '{"sentence1": "a"}', r", line 2: not in the form of the first one, chid"),
    "no form": ('{"text": "a"}', r", line 1: neither the form of CHID"),
    "half a character": ('{"content": "\\ud800#idiom#", "candidates": ["x", "y"], "answer": 0}', ", line 1: not valid"),
    "no blank": (GOOD.replace("#idiom#", ""), r', line 1: no "content" has a blank like #idiom000378#'),
    "content": (GOOD.replace('"a#idiom#b"', "3"), r', line 1: "content" must be a list of at least 1 texts'),
    "one candidate": (GOOD.replace(', "y"', ""), r', line 1: "candidates" must be a list of at least 2 texts'),
    "twice": (GOOD.replace('"y"', '"x"'), r', line 1: "candidates" has an empty answer, or the same answer twice'),
    "answer": (GOOD.replace(": 0", ": 2"), r", line 1: the answer of #idiom# is 2: give a number from 0 to 1"),
    "true": (GOOD.replace(": 0", ": true"), r", line 1: the answer of #idiom# is True"),
    "no answer": (GOOD.replace(', "answer": 0', ""), r", line 1: the answer of #idiom# is None: .*NAME_answer\.json"),
    "two blanks": (GOOD.replace("b", "#idiom#"), r', line 1: "answer" is for one blank, there are 2'),
    "c3: short": ("[[[]]]", r", item 1: give \[\[lines of the passage\], \[questions\], id\]"),
    "c3: passage": ('[["a", [1], "0"]]', r', item 1: "passage" must be a list of at least 0 texts'),
    "c3: question": ('[[["a"], [{"choice": []}], "0"]]', r', item 1, question 1: give an object with "question"'),
    "c3: answer": ('[[["a"], [{"question": "b", "choice": ["x", "y"], "answer": "z"}], "0"]]',
                   r""", item 1, question 1: "answer" is 'z', which is none of its choices"""),
    "cmnli: sentence": ('{"sentence1": "", "sentence2": "b", "label": "neutral"}', r', line 1: "sentence1" and "sentence2"'),
    "cmnli: label": ('{"sentence1": "a", "sentence2": "b", "label": 1}', r', line 1: "label" is 1: give entailment'),
    "cmnli: none": ('{"sentence1": "a", "sentence2": "b", "label": "-"}', r": no pair has a label that was agreed on"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_malformed_set_is_one_line_with_file_and_place(case: str, tmp_path: Path) -> None:
    content, line = WRONG[case]
    with pytest.raises(UserError, match=rf"^{re.escape(str(tmp_path / 'x.json'))}{line}"):
        read_set(write(tmp_path / "x.json", content))


def test_wrong_paths_and_answer_files(tmp_path: Path) -> None:
    for path, line in ((tmp_path / "none", "does not exist: give a file"), (tmp_path, "holds no .json and no .jsonl file")):
        with pytest.raises(UserError, match=line):
            set_files(path)
    write(tmp_path / "x.json", GOOD.replace(', "answer": 0', ""))
    write(tmp_path / "x_answer.json", "[1]")
    with pytest.raises(UserError, match="x_answer.json is no object of answers"):
        read_set(tmp_path / "x.json")


# ---- scores


def slow_scores(model: GPT2LMHeadModel, vocabulary: Vocabulary, item, context: int) -> list[float]:
    """One forward pass for each token, in float64; no padding, no batch, no windows."""
    texts = [item.before + option + item.after for option in item.options]
    whole = [[vocabulary.begin_id, *vocabulary.encode(text), vocabulary.end_id] for text in texts]
    shared = 0
    prompt = [vocabulary.begin_id, *vocabulary.encode(item.before)]
    while shared < len(prompt) and all(shared < len(ids) and ids[shared] == prompt[shared] for ids in whole):
        shared += 1
    tail = min(max(len(ids) for ids in whole) - shared, context - 1)
    scores = []
    for ids in whole:
        kept = ids[max(0, shared - (context - tail)) : shared]
        total = 0.0
        for token in ids[shared : shared + tail]:
            with torch.no_grad():
                logits = model(torch.tensor([kept]))[0, -1].double().numpy()
            total += logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            kept = [*kept, token]
        scores.append(total)
    return scores


@pytest.mark.parametrize("context, batch_size", [(128, 5), (24, 1), (9, 64)])
@pytest.mark.parametrize("name", FORMS)
def test_scores_equal_a_reference_that_takes_a_token_at_a_time(vocabulary, name: str, context: int, batch_size: int) -> None:
    """Also with a context shorter than most texts, and shorter than what counts."""
    model, found = model_of(vocabulary, context), read_set(SHIPPED / f"{name}.json", 6)
    result = answer_set(model, vocabulary, found, batch_size)
    right = per_character = cut = 0
    for item, row in zip(found.items, result["scores"], strict=True):
        slow = slow_scores(model, vocabulary, item, context)
        # float32 logits of up to 20 have errors of 1e-6; up to 60 of them are added up
        assert row["scores"] == pytest.approx(slow, abs=2e-4) and row["answer"] == item.answer and row["where"] == item.where
        right += int(np.argmax(slow)) == item.answer
        each = [score / len(option + item.after) for score, option in zip(slow, item.options, strict=True)]
        per_character += int(np.argmax(each)) == item.answer
        cut += any(len(vocabulary.encode(item.before + o + item.after)) + 2 > context for o in item.options)
    number = len(found.items)
    assert (result["accuracy"], result["accuracy_per_character"]) == (right / number, per_character / number)
    assert result["cut"] == cut and (cut > 0) == (context < 128)
    assert result["standard_error"] == pytest.approx(np.sqrt(right / number * (1 - right / number) / number))
    assert result["chance"] == pytest.approx(1 / len(found.items[0].options))


def test_an_answer_that_begins_another_one_is_not_free(vocabulary, tmp_path: Path) -> None:
    question = {"question": "多久？", "choice": ["三年", "三年半"], "answer": "三年"}
    found = read_set(write(tmp_path / "x.json", [[["a"], [question], "0"]]))
    (row,) = answer_set(model_of(vocabulary, 64), vocabulary, found)["scores"]
    assert max(row["scores"]) < -1.0, "both pay for all of their tokens and for the end"


def test_a_model_that_knows_the_answers_is_right() -> None:
    """A stand-in for a model: it finds the tokens of the right texts likely, whatever comes before them."""
    vocabulary = Vocabulary.load(ROOT / "cache" / "vocab.txt")
    for name in FORMS:
        found = read_set(SHIPPED / f"{name}.json")

        class Knows:
            config = ModelConfig(n_positions=200)
            texts = [[*vocabulary.encode_prompt(i.before + i.options[i.answer] + i.after), vocabulary.end_id]
                     for i in found.items]  # fmt: skip

            def __call__(self, ids: torch.Tensor) -> torch.Tensor:
                logits = torch.zeros(*ids.shape, vocabulary.size)
                for row, prefix in enumerate(ids.tolist()):
                    for text in self.texts:
                        for place in range(1, min(len(text), len(prefix) + 1)):
                            if prefix[:place] == text[:place]:
                                logits[row, place - 1, text[place]] = 20.0
                return logits

        if name == "inference":  # three pairs share a premise, and all three answers are right for one of them
            continue
        assert answer_set(Knows(), vocabulary, found)["accuracy"] == 1.0
