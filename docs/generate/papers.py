"""Papers on the pages become links: a title in italics, and a mention such as "Dettmers et al. 2022".

docs/papers.json has their addresses. A mention is a first author, perhaps others, and a year. The author and the year name
one paper; its `who` says which.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

STORE = Path(__file__).resolve().parents[1] / "papers.json"
SKIPPED = re.compile(r"(<a\b.*?</a>|<pre\b.*?</pre>|<code\b.*?</code>|<h[1-6]\b.*?</h[1-6]>)", re.DOTALL)
OTHERS = r"(?: et al\.?| and [A-Z]\w+| 等人?)?[,，]? ?"
# The same for any author. "Mar 2022" and "Python 2022" are none.
MENTION = re.compile(r"\b([A-Z][a-zé]+)(?: et al\.?| and [A-Z]\w+| 等人?)[,，]? ?((?:19|20)\d\d)\b|"
                     r"[(（]([A-Z][a-zé]+)[,，]? ?((?:19|20)\d\d)\b")  # fmt: skip


def papers() -> list[dict[str, str]]:
    """Each paper's `title`, `url`, and `who`: first author and year, '' if no text mentions it so."""
    return json.loads(STORE.read_text(encoding="utf-8"))


def linked(content: str) -> str:
    """A page's HTML in which papers are links."""
    for word, pattern, url in _links():  # one after the other: a new link is skipped from then on
        if word not in content or not pattern.search(content):
            continue
        parts = SKIPPED.split(content)
        parts[::2] = [pattern.sub(lambda found, url=url: f'<a href="{url}">{found[0]}</a>', part) for part in parts[::2]]
        content = "".join(parts)
    return content


@functools.cache
def _links() -> list[tuple[str, re.Pattern[str], str]]:
    """(a word of it, pattern, address) of each title and each mention."""
    links = [(one["title"], re.compile(f"<em>{re.escape(one['title'])}</em>"), one["url"]) for one in papers()]
    for author, year, url in [(*one["who"].split(), one["url"]) for one in papers() if one["who"]]:
        links.append((author, re.compile(rf"\b{author}{OTHERS}{year}\b"), url))
    return links


def without_address(content: str) -> list[str]:
    """The mentions and the titles of lists of papers that are no links."""
    prose = "".join(SKIPPED.split(content)[::2])
    named = [found[0].strip("(（") for found in MENTION.finditer(re.sub(r"<[^>]+>", "", prose))]
    lists = re.findall(r"<p>(?:Papers:|论文：)(.*?)(?:</p>\s*<ul>(.*?)</ul>|</p>)", content, re.DOTALL)
    titles = [title for one in lists for part in one for title in re.findall(r"<em>(.*?)</em>", SKIPPED.sub("", part))]
    return named + titles
