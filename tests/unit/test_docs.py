"""The documents: every promise names a test that exists, every link leads somewhere, every default is the real one."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from dcp_s3 import S3Config

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TEST_NAME = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
LINK = re.compile(r"\]\((?!https?://)([^)#]+)\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_tests_exist(document: Path) -> None:
    """A test that a document names is there."""
    for path, name in TEST_NAME.findall(document.read_text()):
        assert (ROOT / path).is_file(), f"{document.name} names {path}"
        if name:
            assert f"def {name}(" in (ROOT / path).read_text(), f"{document.name} names {path}::{name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    """A relative link names a file or folder of the repository."""
    for target in LINK.findall(document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_guarantee_names_its_test() -> None:
    """No row of the guarantees is without a test."""
    section = (ROOT / "README.md").read_text().split("## What is guaranteed")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 10
    for row in rows:
        assert TEST_NAME.search(row), f"no test is named: {row}"


def test_every_setting_is_documented() -> None:
    """Each field of S3Config is in the README's table."""
    section = (ROOT / "README.md").read_text().split("## Configuration")[1].split("\n## ")[0]
    for field in dataclasses.fields(S3Config):
        assert f"`{field.name}" in section, f"{field.name} is not documented"


def test_the_package_index_shows_no_broken_link() -> None:
    """The README of a built package has no link into the repository, which is not there."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]
    text = (ROOT / "README.md").read_text()
    assert LINK.search(text)
    for substitution in settings["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    assert not LINK.search(text)
    assert "docs/architecture.md" in text
