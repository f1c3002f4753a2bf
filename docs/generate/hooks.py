"""What mkdocs calls while it builds the site: mkdocs.yml names this file under `hooks`.

Chinese is built first, English inside of that build, so module-level collections serve both.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.plugins import CombinedEvent, event_priority

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # mkdocs does not put the checkout on the path

from docs.generate import papers, search, sources  # noqa: E402

sections: list[dict[str, Any]] = []
files: set[Path] = set()
not_found: dict[str, str] = {}
NOT_FOUND = {
    "zh": ("没有这个页面", "网址可能写错了，页面也可能换了地方。请用上方的搜索框查找，或回到<a href=\"{home}\">首页</a>。",
           "This page does not exist: <a href=\"{other}\">in English</a>."),
    "en": ("There is no such page", "The address may be wrong, or the page has moved. Search above, or go to the "
           "<a href=\"{home}\">home page</a>.", "没有这个页面：<a href=\"{other}\" lang=\"zh\">中文</a>。"),
}  # fmt: skip


def on_pre_build(config: Any, **_: Any) -> None:
    """Forgets an earlier build in the same process: `mkdocs serve` builds again and again."""
    if config.theme["language"] == "zh":
        for collection in (sections, files, not_found):
            collection.clear()


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Links file names and papers to their source, shows figures for dark pages, keeps flags in one line and long tables out
    of the search."""
    root = "../" * page.url.count("/")
    html = sources.linked(html, page.url.removeprefix("en/"), root, files)
    html = with_whole_flags(for_both_schemes(papers.linked(html)))
    return search.without_repetitions(search.without_long_tables(html))


def with_whole_flags(html: str) -> str:
    """Flags in spans that site.css does not break, in inline code and in output whose lines wrap (`said`): a browser may end
    a line after the hyphens of --flag."""
    code = re.compile(r'(<div class="[^"]*\bsaid\b[^"]*"><pre\b.*?</pre>)|<pre\b.*?</pre>|(<code>.*?</code>)', re.DOTALL)
    flag = re.compile(r"(?<![\w/-])--?[A-Za-z][\w-]*")
    return code.sub(lambda found: flag.sub(r'<span class="flag">\g<0></span>', found[1] or found[2])
                    if found[1] or found[2] else found[0], html)    # fmt: skip


def for_both_schemes(html: str) -> str:
    """Every drawn figure twice: the theme shows one of them. docs/generate/pictures/dark.py writes the dark one."""
    drawn = re.compile(r'<img ([^>]*)src="([^"]*_generated/figures/\w+)\.svg"([^>]*?) ?/?>')
    both = (r'<img \1src="\2.svg#only-light"\3 loading="lazy"><img \1src="\2.dark.svg#only-dark"\3 loading="lazy">')
    return drawn.sub(both, html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Corrects two addresses in a page's HTML.

    The theme looks for the search index below `base`: English pages have a separate one. It takes a link to the same page in
    another language for the root of a site and requests `sitemap.xml` there, in vain; the switch works without that link.
    """
    output = without_alternates(output)
    if page.url == "en/" or page.url.startswith("en/"):
        output = re.sub(r'"base": "(?:\.\./?)?([^"]*)"', lambda found: f'"base": "{found[1] or "."}"', output, count=1)
    return output


def without_alternates(output: str) -> str:
    """A page's HTML without <link rel="alternate">."""
    return re.sub(r'\s*<link rel="alternate"[^>]*>', "", output)


def on_post_template(output_content: str, template_name: str, config: Any, **_: Any) -> str:
    """Keeps the page for wrong addresses in each language; both are written at the end."""
    if template_name == "404.html":
        not_found[config.theme["language"]] = without_alternates(output_content)
    return output_content


def _not_found_page(language: str, text: str) -> str:
    """The theme's page for wrong addresses with words, and with links that lead from every address to the right place."""
    root = re.search(r'"base": "([^"]*)"', text)[1]
    pages = {"zh": f"{root}404.html", "en": f"{root}en/404.html"}
    title, what, other = NOT_FOUND[language]
    home = f"{root}en/" if language == "en" else root
    said = f"{what.format(home=home)}</p><p>{other.format(other=pages['en' if language == 'zh' else 'zh'])}"
    before, after = re.split(r"<h1>404.*?</h1>", text, maxsplit=1)
    text = f"{before}<h1>{title}</h1><p>{said}</p>{after}"
    for one, page in pages.items():
        text = re.sub(rf'<a href="[^"]*" hreflang="{one}"', f'<a href="{page}" hreflang="{one}"', text)
    if language == "en":
        return text.replace(f'"base": "{root}"', f'"base": "{root}en/"', 1)
    go_on = f'if (location.pathname.startsWith("{root}en/")) location.replace("{pages["en"]}");'
    return text.replace("<head>", f"<head><script>{go_on}</script>", 1)


def _write_not_found(site: Path) -> None:
    """404.html, which servers send, is Chinese; for an address below en/ it goes on to en/404.html."""
    for language, text in not_found.items():
        target = site / ("en" if language == "en" else "") / "404.html"
        target.write_text(_not_found_page(language, text), encoding="utf-8")


@event_priority(-50)  # after the search, once for each language, and before i18n
def _keep_sections(config: Any, **_: Any) -> None:
    """Keeps this language's sections: i18n writes one index of all, without the sections that two languages share."""
    sections.extend(search.sections(Path(config.site_dir)))


@event_priority(-200)  # after i18n, first for the inner build of English, last for the whole site
def _write(config: Any, **_: Any) -> None:
    site = Path(config.site_dir)
    search.write(site, sections)
    sources.write(site, files)
    _write_not_found(site)


on_post_build = CombinedEvent(_keep_sections, _write)
