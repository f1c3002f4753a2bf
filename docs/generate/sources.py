"""File names on the pages link to their source: to the repository if it has an address, else to a copy in the site.

A copy is a plain page with numbered lines, which needs nothing else: source/pstar/chunks/step.py.html.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "cache", "chapters", "data", "docs/programs", "docs/generate", "durable", "gpt2_chinese", "pstar",
           "scripts", "tests")  # fmt: skip
KINDS = (".py", ".sh", ".sbatch", ".toml", ".yml", ".txt", ".md", ".cpp", ".json")
LARGEST_BYTES = 200_000  # of a copy; data are larger
SKIPPED = re.compile(r"(<a\b.*?</a>|<pre\b.*?</pre>|<h[1-6]\b.*?</h[1-6]>|<summary\b.*?</summary>)", re.DOTALL)
NAMED = re.compile(r'<code>([\w./-]+)</code>|<span class="filename">([\w./-]+)</span>')
STYLE = """:root { color-scheme: light dark }
body { margin: 1rem; font: 14px/1.5 Menlo, Consolas, "DejaVu Sans Mono", monospace }
h1 { font-size: 1.1rem }
pre { counter-reset: line; overflow-x: auto }
pre span { counter-increment: line }
pre span::before {
  content: counter(line); display: inline-block; width: 3em; padding-right: 1em; text-align: right; opacity: .7
}
"""
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{name}</title>
<link rel="icon" href="data:,"><style>{style}</style><h1>{name}</h1><pre>{lines}</pre></html>
"""


def file_of(name: str, page: str) -> Path | None:
    """The file of the repository that a name on a page means; None if it is none.

    Args:
        name: as in inline code, from the root of the repository or, on a chapter's page, from the chapter's folder.
        page: the page's address without its language: `chapters/02_ddp/`.
    """
    if name.startswith("/"):  # a file of the system, such as /etc/hosts
        return None
    chapter = re.match(r"chapters/\w+", page)
    for base in ([chapter[0]] if chapter else []) + [""]:
        path = REPO / base / name
        inside = path.relative_to(REPO).as_posix()
        ours = inside.startswith(tuple(f"{folder}/" for folder in FOLDERS)) or "/" not in inside
        if ours and path.suffix in KINDS and ".." not in name and path.is_file() and path.stat().st_size < LARGEST_BYTES:
            return path
    return None


def linked(content: str, page: str, root: str, found: set[Path]) -> str:
    """A page's HTML in which file names are links; adds the files to `found`.

    Args:
        root: the way from the page to the site's root, `../../`.
    """

    def link(name: re.Match[str]) -> str:
        path = file_of(name[1] or name[2], page)
        if path is None:
            return name[0]
        found.add(path)
        inside = path.relative_to(REPO).as_posix()
        there = os.environ.get("REPO_URL", "").rstrip("/")
        address = f"{there}/blob/HEAD/{inside}" if there else f"{root}source/{inside}.html"
        if name[1]:
            return f'<a class="source" href="{address}">{name[0]}</a>'
        return f'<span class="filename"><a class="source" href="{address}">{name[2]}</a></span>'

    parts = SKIPPED.split(content)
    # Odd parts are links, listings and headings. A listing's own file name is outside of its <pre>.
    return "".join(part if number % 2 else NAMED.sub(link, part) for number, part in enumerate(parts))


def write(site: Path, found: set[Path]) -> None:
    """Writes a page for each file into source/ of a built site, unless they are in a repository with an address."""
    if os.environ.get("REPO_URL"):
        return
    for path in found:
        inside = path.relative_to(REPO).as_posix()
        lines = "".join(f"<span>{html.escape(line)}\n</span>" for line in path.read_text(encoding="utf-8").splitlines())
        target = site / "source" / f"{inside}.html"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(PAGE.format(name=inside, style=STYLE, lines=lines), encoding="utf-8")
