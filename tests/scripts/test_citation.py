"""CITATION.cff: what the Citation File Format 1.2.0 requires, and the version and license of the package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
# https://github.com/citation-file-format/citation-file-format, schema of 1.2.0: all keys of the file's top, those required
KNOWN = {"abstract", "authors", "cff-version", "commit", "contact", "date-released", "doi", "identifiers", "keywords",
         "license", "license-url", "message", "preferred-citation", "references", "repository", "repository-artifact",
         "repository-code", "title", "type", "url", "version"}  # fmt: skip
REQUIRED = {"authors", "cff-version", "message", "title"}


@pytest.fixture(scope="module")
def citation() -> dict:
    return pytest.importorskip("yaml").safe_load((REPO / "CITATION.cff").read_text(encoding="utf-8"))


def test_the_citation_has_the_version_and_the_license_of_the_package(citation: dict) -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["version"] == project["version"] and citation["license"] == project["license"]
    changelog = (REPO / "CHANGELOG.md").read_text(encoding="utf-8")
    assert project["version"] in re.findall(r"^## .*?(\d+\.\d+\.\d+)", changelog, re.MULTILINE)


def test_the_citation_is_in_the_format(citation: dict) -> None:
    assert set(citation) <= KNOWN and set(citation) >= REQUIRED and citation["cff-version"] == "1.2.0"
    assert citation["type"] in ("software", "dataset") and all(isinstance(word, str) for word in citation["keywords"])
    names = {"name", "given-names", "family-names"}
    assert citation["authors"] and all(set(author) <= names for author in citation["authors"])
    for reference in citation["references"]:
        assert {"type", "title", "authors"} <= set(reference) and reference["type"] == "article"
        assert all({"family-names", "given-names"} == set(author) for author in reference["authors"])
        for identifier in reference["identifiers"]:
            assert identifier["type"] in ("doi", "url", "swh", "other") and identifier["value"]
