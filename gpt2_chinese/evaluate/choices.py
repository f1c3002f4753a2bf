"""Reads sets of items with several answers, one of them right, in the forms of CLUE.

    chid    {"content": "… #idiom000378# …" or a list of such texts, "candidates": [idiom, …], "answer": 3} a line; without
            "answer" the file NAME_answer.json has {"#idiom000378#": 3, …} (CHID: Zheng et al. 2019; CLUE's files)
    c3      [[["a line of the passage", …], [{"question": …, "choice": [answer, …], "answer": answer}, …], id], …]
            (C3: Sun et al. 2020)
    cmnli   {"sentence1": …, "sentence2": …, "label": "entailment", "neutral" or "contradiction"} a line; "-" is left out

A language model answers without training: it takes the answer with which the whole text is likeliest (likelihood.py). So
every item becomes texts that differ in the answer alone:

    chid    the content with the idiom in its place; other blanks of the same content are ……
    c3      passage 问题：question 答案：answer
    cmnli   sentence1？对，sentence2    错 for a contradiction, 可能 for neutral
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2_chinese.errors import UserError
from gpt2_chinese.files import kind, read_json, read_text

FORMS = ("chid", "c3", "cmnli")
WORDS = {"entailment": "对", "contradiction": "错", "neutral": "可能"}  # what is said between the two sentences
BLANK = re.compile(r"#idiom\d*#")
OTHER_BLANK = "……"
UNDECIDED = "-"  # the label of pairs on which CMNLI's annotators did not agree


@dataclass
class Item:
    """One question.

    Attributes:
        where: file and line or item, for messages and --json.
        before, after: the text before and after the answer.
        options: the answers.
        answer: index of the right one.
    """

    where: str
    before: str
    options: list[str]
    after: str
    answer: int


@dataclass
class ChoiceSet:
    """A file of items.

    Attributes:
        path: the file.
        form: one of FORMS.
        items: the questions.
        skipped: number of pairs without an agreed label.
    """

    path: Path
    form: str
    items: list[Item]
    skipped: int = 0


def set_files(path: Path) -> list[Path]:
    """The files of a set: the file itself, or all .json and .jsonl of a folder but NAME_answer.json. Raises UserError."""
    found = kind(path, f"--choices {path}")
    if found == "missing":
        raise UserError(f"--choices {path} does not exist: give a file in the form of CHID, C3 or CMNLI, or a folder")
    if found == "file":
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in (".json", ".jsonl") and file.is_file())
    files = [file for file in files if not file.stem.endswith("_answer")]
    if not files:
        raise UserError(f"--choices {path} holds no .json and no .jsonl file: give a file in the form of CHID, C3 or CMNLI")
    return files


def read_set(path: Path, limit: int | None = None) -> ChoiceSet:
    """Reads a file; its first record tells the form.

    Args:
        path: the file.
        limit: only so many items; None for all.

    Raises:
        UserError: names the file, and the line or the item, that is not in the form.
    """
    records = list(_records(path))
    if not records:
        raise UserError(f"{path} holds no item: give a file in the form of CHID, C3 or CMNLI")
    form = _form_of(records[0][1])
    if form is None:
        raise UserError(f'{records[0][0]}: neither the form of CHID ("candidates"), nor of C3 (a list), nor of CMNLI '
                        '("sentence1")')  # fmt: skip
    found = ChoiceSet(path, form, [])
    answers = _answers_beside(path) if form == "chid" else {}
    for where, record in records:
        if _form_of(record) != form:
            raise UserError(f"{where}: not in the form of the first one, {form}")
        read = {"chid": _chid, "c3": _c3, "cmnli": _cmnli}[form]
        items = list(read(where, record, answers))
        found.skipped += form == "cmnli" and not items
        found.items += items
        if limit is not None and len(found.items) >= limit:
            found.items = found.items[:limit]
            break
    if not found.items:
        raise UserError(f"{path}: no pair has a label that was agreed on")
    return found


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """(file and line or item, content) of each record: of an array, or a line."""
    text = read_text(path, f"--choices {path}")
    if text.lstrip().startswith("["):
        content = read_json(path, f"--choices {path}")
        for number, record in enumerate(content, start=1):
            yield f"{path}, item {number}", record
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
            json.dumps(record, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not valid JSON: {error}; a set is an array, or one object a line") from None
        yield where, record


def _form_of(record: Any) -> str | None:
    if isinstance(record, list):
        return "c3"
    if isinstance(record, dict):
        return "chid" if "candidates" in record else "cmnli" if "sentence1" in record else None
    return None


def _texts(where: str, value: Any, name: str, least: int = 1) -> list[str]:
    """A list of texts. Raises UserError."""
    if not isinstance(value, list) or len(value) < least or not all(isinstance(text, str) for text in value):
        raise UserError(f'{where}: "{name}" must be a list of at least {least} texts')
    return value


def _options(where: str, value: Any, name: str) -> list[str]:
    options = _texts(where, value, name, 2)
    if len(set(options)) < len(options) or not all(option.strip() for option in options):
        raise UserError(f'{where}: "{name}" has an empty answer, or the same answer twice')
    return options


def _answers_beside(path: Path) -> dict[str, Any]:
    file = path.with_name(f"{path.stem}_answer.json")
    if not file.is_file():
        return {}
    answers = read_json(file, f"the answers {file}")
    if not isinstance(answers, dict):
        raise UserError(f'{file} is no object of answers like {{"#idiom000378#": 3}}')
    return answers


def _chid(where: str, record: dict[str, Any], answers: dict[str, Any]) -> Iterator[Item]:
    options = _options(where, record["candidates"], "candidates")
    content = record.get("content")
    texts = [content] if isinstance(content, str) else _texts(where, content, "content")
    blanks = [(text, match) for text in texts for match in BLANK.finditer(text)]
    if not blanks:
        raise UserError(f'{where}: no "content" has a blank like #idiom000378#')
    if "answer" in record and len(blanks) > 1:
        raise UserError(f'{where}: "answer" is for one blank, there are {len(blanks)}; name them in NAME_answer.json')
    for text, match in blanks:
        answer = record.get("answer", answers.get(match[0]))
        if type(answer) is not int or not 0 <= answer < len(options):
            raise UserError(f"{where}: the answer of {match[0]} is {answer!r}: give a number from 0 to {len(options) - 1} "
                            'in "answer", or in the file NAME_answer.json')  # fmt: skip
        before, after = (BLANK.sub(OTHER_BLANK, part) for part in (text[: match.start()], text[match.end() :]))
        yield Item(f"{where}, {match[0]}", before, options, after, answer)


def _c3(where: str, record: list[Any], _: dict[str, Any]) -> Iterator[Item]:
    if len(record) < 2 or not isinstance(record[1], list) or not record[1]:
        raise UserError(f"{where}: give [[lines of the passage], [questions], id]")
    passage = "".join(_texts(where, record[0], "passage", 0))
    for number, question in enumerate(record[1], start=1):
        at = f"{where}, question {number}"
        if not isinstance(question, dict) or not isinstance(question.get("question"), str):
            raise UserError(f'{at}: give an object with "question", "choice" and "answer"')
        options = _options(at, question.get("choice"), "choice")
        if question.get("answer") not in options:
            raise UserError(f'{at}: "answer" is {question.get("answer")!r}, which is none of its choices')
        before = f"{passage}问题：{question['question']}答案："
        yield Item(at, before, options, "", options.index(question["answer"]))


def _cmnli(where: str, record: dict[str, Any], _: dict[str, Any]) -> Iterator[Item]:
    pair = [record.get("sentence1"), record.get("sentence2")]
    if not all(isinstance(text, str) and text.strip() for text in pair):
        raise UserError(f'{where}: "sentence1" and "sentence2" must be texts')
    label = record.get("label")
    if label == UNDECIDED:
        return
    if label not in WORDS:
        raise UserError(f'{where}: "label" is {label!r}: give entailment, neutral or contradiction, or - for none')
    options = [f"？{word}，" for word in WORDS.values()]
    yield Item(where, pair[0].rstrip("。！？!?. "), options, pair[1], list(WORDS).index(label))
