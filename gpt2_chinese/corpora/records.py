"""Takes the texts out of a JSON record, by the fields of each corpus. Pure functions.

    wiki2019zh          text, with its title in front when it does not begin with it; runs of line breaks become one
    news2016zh          title, content
    baike2018qa         title, desc (if any and not the title), answer
    webtext2019zh       title, desc, content without HTML; only answers with at least --star stars
    translation2019zh   chinese, with --both also english
    clue-task           sentence, or text, or sentence1 and sentence2 (two items)
    json-lines          a string, or an object's text or content, or the field that --field names
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any, NamedTuple


class BadRecord(Exception):
    """A record that breaks its format; the message is printed after the item's place: `has no field "answer"`."""


class LeftOut(Exception):
    """A record that a rule drops; the message is the rule."""


class Choices(NamedTuple):
    """The flags that decide what is taken from a record: --star, --both, --field."""

    star: int = 3
    both: bool = False
    field: str = ""


def record_texts(form: str, record: Any, choices: Choices) -> list[str]:
    """The texts of one record of the format `form`, a key of FORMATS. Raises BadRecord, LeftOut."""
    if form in ("array-json", "json-lines") and isinstance(record, str):
        return [record]
    if not isinstance(record, dict):
        raise BadRecord("is no object" if form not in ("array-json", "json-lines") else "is neither a string nor an object")
    return FORMATS[form](record, choices)


def record_format(record: Any, array: bool) -> str | None:
    """The format that the fields of a record belong to, None when no format has such fields."""
    if isinstance(record, str):
        return "array-json" if array else "json-lines"
    if not isinstance(record, dict):
        return None
    has = record.keys().__contains__
    if has("english") and has("chinese"):
        return "translation2019zh"
    if has("content") and (has("star") or has("answer_id")):
        return "webtext2019zh"
    if has("answer") and (has("qid") or has("title")):
        return "baike2018qa"
    if has("news_id") and has("content"):
        return "news2016zh"
    if has("text") and has("title"):
        return "wiki2019zh"
    if has("sentence") or (has("sentence1") and has("sentence2")):
        return "clue-task"
    if has("text") or has("content"):
        return "json-lines"
    return None


def _text(record: dict[str, Any], field: str, default: str | None = None) -> str:
    """A field that must be text; `default` replaces a missing or null field where the format allows that."""
    value = record.get(field, default)
    if value is None:
        if default is not None:
            return default
        raise BadRecord(f'has no field "{field}"')
    if not isinstance(value, str):
        raise BadRecord(f'has a field "{field}" that is no text')
    return value


def _plain_text(record: dict[str, Any], choices: Choices) -> list[str]:
    fields = [choices.field] if choices.field else ["text", "content"]
    return [_text(record, next((field for field in fields if field in record), fields[0]))]


def _single_breaks(text: str) -> str:
    return "\n".join(line.strip() for line in text.split("\n") if line.strip())


def _wiki(record: dict[str, Any], choices: Choices) -> list[str]:
    title, text = _text(record, "title", "").strip(), _single_breaks(_text(record, "text"))
    begins = text.partition("\n")[0].strip() == title
    return [text if begins or not title else f"{title}\n{text}"]


def _news(record: dict[str, Any], choices: Choices) -> list[str]:
    return [_stacked(_text(record, "title", ""), _text(record, "content"))]


def _baike(record: dict[str, Any], choices: Choices) -> list[str]:
    title, desc, answer = _text(record, "title", ""), _text(record, "desc", ""), _text(record, "answer")
    return [_stacked(title, "" if desc.strip() == title.strip() else desc, _single_breaks(answer.replace("\r", "\n")))]


def _webtext(record: dict[str, Any], choices: Choices) -> list[str]:
    star = record.get("star", 0)
    try:
        stars = int(star)
    except (TypeError, ValueError, OverflowError):
        raise BadRecord('has a field "star" that is no number') from None
    content = _without_html(_text(record, "content"))
    if stars < choices.star:
        raise LeftOut("too few stars (--star)")
    title, desc = _text(record, "title", ""), _without_html(_text(record, "desc", ""))
    return [_stacked(title, "" if desc.strip() == title.strip() else desc, content)]


def _translation(record: dict[str, Any], choices: Choices) -> list[str]:
    chinese = _text(record, "chinese")
    return [_stacked(chinese, _text(record, "english"))] if choices.both else [chinese]


def _task(record: dict[str, Any], choices: Choices) -> list[str]:
    if "sentence1" in record or "sentence2" in record:
        return [_text(record, "sentence1"), _text(record, "sentence2")]
    return [_text(record, "text" if "text" in record and "sentence" not in record else "sentence")]


def _stacked(*parts: str) -> str:
    return "\n".join(part.strip() for part in parts if part.strip())


_LINE_TAG = re.compile(r"(?i)<\s*(?:br|/p|/div|/li)\s*/?\s*>")
# known names with nothing but attributes after them, because "a<b and c>d" is no tag
_NAMES = "a|b|i|u|p|br|hr|em|ul|ol|li|td|tr|th|h[1-6]|div|img|pre|sub|sup|span|code|font|table|tbody|figure|strong|noscript"
_TAG = re.compile(rf"(?i)</?(?:{_NAMES}|video|blockquote|figcaption)(?:\s*/?>|\s+[a-z-]+\s*=[^<>]{{0,500}}>)")


def _without_html(text: str) -> str:
    """Turns line tags into breaks and removes other tags before it decodes entities, so that a written `&lt;b&gt;` stays."""
    if "<" in text:
        text = _TAG.sub("", _LINE_TAG.sub("\n", text))
    return html.unescape(text) if "&" in text else text


FORMATS: dict[str, Callable[[dict[str, Any], Choices], list[str]]] = {
    "array-json": _plain_text,
    "json-lines": _plain_text,
    "wiki2019zh": _wiki,
    "news2016zh": _news,
    "baike2018qa": _baike,
    "webtext2019zh": _webtext,
    "translation2019zh": _translation,
    "clue-task": _task,
}
