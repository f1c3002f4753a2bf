"""What pages link to: papers, sources, the other language, and the pages for wrong addresses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.generate import papers, sources
from tests.docs import pages
from tests.docs.browser import Browser, missing
from tests.docs.pages import ROOT

needs_browser = pytest.mark.skipif(bool(missing()), reason=missing())


def articles(site: Path) -> dict[str, str]:
    """Page -> the HTML of its article."""
    found = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("index.html")}
    return {name: text[text.index("<article") : text.index("</article")] for name, text in found.items()}


# ---- papers


def test_every_mention_of_a_paper_has_an_address(site: Path) -> None:
    missing_ones = {name: found for name, text in articles(site).items() if (found := papers.without_address(text))}
    assert not missing_ones, "add them to docs/papers.json"


def test_every_paper_is_mentioned_in_both_languages_and_has_a_lasting_address(site: Path) -> None:
    texts = articles(site)
    for language in pages.LANGUAGES:
        text = "".join(one for name, one in texts.items() if name.startswith("en/") == (language == "en"))
        assert not [one["title"] for one in papers.papers() if f'href="{one["url"]}"' not in text]
    lasting = ("https://arxiv.org/abs/", "https://doi.org/10.", "https://www.usenix.org/conference/",
               "https://papers.nips.cc/paper/", "https://cdn.openai.com/")  # fmt: skip
    assert all(one["url"].startswith(lasting) for one in papers.papers())
    for key in ("title", "url"):
        assert len({one[key] for one in papers.papers()}) == len(papers.papers())


@pytest.mark.parametrize("mention", [
    "Nobody et al. 2019", "Nobody and Else 2019", "Nobody 等人 2019", "(Nobody, 2019)", "（Nobody，2019"])  # fmt: skip
def test_an_unknown_paper_is_found(mention: str) -> None:
    assert papers.without_address(papers.linked(f"<p>as {mention} says</p>"))
    assert papers.without_address("<p>Papers:</p>\n<ul><li>Nobody: <em>A Title</em>, 2019.</li></ul>") == ["A Title"]
    known = "<p>as Hu et al., 2021 and (Belady，1966) and <em>Mixed Precision Training</em> say, in Python 2022</p>"
    assert papers.without_address(known) and not papers.without_address(papers.linked(known))
    assert papers.linked(known).count("<a href=") == 3
    code = "<pre>Hu et al., 2021</pre><code>Hu et al., 2021</code>"
    assert papers.linked(code) == code


# ---- sources


def test_file_names_link_to_their_source(site: Path) -> None:
    """Each link leads to a page with the file's lines."""
    names = set()
    for name, text in articles(site).items():
        for address in re.findall(r'class="source" href="([^"]+)"', text):
            target = (site / name).parent / address
            assert target.is_file(), f"{name}: {address}"
            names.add(target.resolve().relative_to((site / "source").resolve()).as_posix().removesuffix(".html"))
    assert {"pstar/chunks/step.py", "chapters/02_ddp/ddp.py", "constraints.txt"} <= names and len(names) > 60
    shown = (site / "source/chapters/02_ddp/ddp.py.html").read_text(encoding="utf-8")
    assert shown.count("\n</span>") == len((ROOT / "chapters/02_ddp/ddp.py").read_text().splitlines())
    assert sum(path.stat().st_size for path in (site / "source").rglob("*.html")) < 3_000_000


@pytest.mark.parametrize("name, page, file", [
    ("pstar/config.py", "engine/", "pstar/config.py"),
    ("train.py", "chapters/02_ddp/", "chapters/02_ddp/train.py"),
    ("train.py", "start/", None),
    ("../secret.py", "start/", None),
    ("docs/en/index.md", "start/", None),
    ("constraints.txt", "start/", "constraints.txt"),
    ("pstar/none.py", "engine/", None),
])  # fmt: skip
def test_a_name_means_a_file_of_the_repository(name: str, page: str, file: str | None) -> None:
    assert sources.file_of(name, page) == (ROOT / file if file else None)


def test_with_a_repository_s_address_names_link_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = "<code>pstar/config.py</code>"
    content = f'<p>{named} <a href="x">{named}</a></p><h2><code>pstar/cli.py</code></h2>'
    found: set[Path] = set()
    own = sources.linked(content, "engine/", "../", found)
    assert own.count('href="../source/pstar/config.py.html"') == 1 and "cli.py.html" not in own
    monkeypatch.setenv("REPO_URL", "https://git.example.org/course/")
    there = sources.linked(content, "engine/", "../", found)
    assert 'href="https://git.example.org/course/blob/HEAD/pstar/config.py"' in there
    sources.write(tmp_path, found)
    assert not list(tmp_path.iterdir())


@pytest.mark.deep
def test_a_build_with_addresses_links_to_the_repository(shell, tmp_path: Path) -> None:
    shell(f"bash docs/build.sh --site-dir '{tmp_path}/site'", REPO_URL="https://git.example.org/course",
          SITE_URL="https://pages.example.org/course/")  # fmt: skip
    start = (tmp_path / "site/en/start/index.html").read_text(encoding="utf-8")
    assert 'href="https://git.example.org/course"' in start and "https://git.example.org/course/blob/HEAD/" in start
    assert not (tmp_path / "site/source").exists()
    assert '"base": "/course/en/"' in (tmp_path / "site/en/404.html").read_text(encoding="utf-8")


# ---- the other language, and wrong addresses


@needs_browser
def test_the_language_switch_keeps_the_page_and_the_place(browser: Browser, address: str) -> None:
    browser.resize(1280)
    for start, link, end in (("/en/chapters/02_ddp/#run", "zh", "/chapters/02_ddp/#run"),
                             ("/tools/memory/#model=small&strategy=zero3&precision=bf16&ranks=8", "en", "/en/tools/memory/"),
                             ("/en/", "zh", "/")):  # fmt: skip
        browser.open(f"{address}{start}")
        browser.follow(f"a.md-select__link[hreflang={link}]")
        browser.wait_for(f"location.pathname + (location.hash.includes('=') ? '' : location.hash) === '{end}' && "
                         "document.readyState === 'complete'")  # fmt: skip
        if "=" in start:
            assert "strategy=zero3" in browser.evaluate("location.hash")
        assert not browser.complaints


@needs_browser
@pytest.mark.parametrize("wrong, language, title, question, page", [
    ("/no/such/page/", "zh", "没有这个页面", "流水线", "/chapters/05_model_parallel/"),
    ("/en/no/such/page/", "en", "There is no such page", "tensor parallel", "/en/chapters/05_model_parallel/"),
])  # fmt: skip
def test_a_wrong_address_gets_a_page_in_its_language_with_search(
    browser: Browser, address: str, wrong: str, language: str, title: str, question: str, page: str
) -> None:
    from tests.docs.test_browser import asked

    browser.resize(1280)
    browser.open(f"{address}{wrong}")
    browser.wait_for(f"document.documentElement.lang === '{language}' && document.readyState === 'complete'")
    assert browser.wait_for("document.querySelector('article h1').textContent").strip() == title
    assert page in asked(browser, question)[:3]
    other = browser.evaluate("document.querySelector('article p:nth-of-type(2) a').pathname")
    assert other == ("/404.html" if language == "en" else "/en/404.html")
    assert not [said for said in browser.complaints if "404 (File not found)" not in said and "404 (Not Found)" not in said]
