"""Decisions are few, and each is linked from the page or module that it explains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
DECISIONS = sorted(ROOT.glob("docs/decisions/*.md"))
LISTS = {ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "CHANGELOG.md"}
"""Pages whose links only list pages, or record what changed."""


def places() -> str:
    """Text of all pages and sources that can explain themselves by a decision."""
    sources = [*ROOT.glob("python/**/*.py"), *ROOT.glob("rust/*/src/**/*.rs")]
    return "\n".join(
        file.read_text()
        for file in (*PAGES, *sources, ROOT / "pyproject.toml", ROOT / "docs" / "hooks.py")
        if file not in {*LISTS, *DECISIONS}
    )


def test_decisions_are_few_and_each_is_named_by_its_topic():
    assert len(DECISIONS) <= 45
    topic = re.compile(r"\d{4}(-[a-z0-9]+){2,4}")
    assert [page.stem for page in DECISIONS if not topic.fullmatch(page.stem)] == []


def test_each_decision_is_linked_from_what_it_explains():
    linked = set(re.findall(r"(?:\bdecisions/|[Dd]ecision )(\d{4})\b", places()))
    assert [page.name for page in DECISIONS if page.name[:4] not in linked] == []


def test_references_to_decisions_lead_to_files():
    numbers = {page.name[:4] for page in DECISIONS}
    text = "\n".join([places(), *(page.read_text() for page in DECISIONS)])
    assert set(re.findall(r"[Dd]ecisions?[ /](\d{4})\b", text)) <= numbers


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_its_number_and_a_title_that_says_it(page):
    number, title = re.fullmatch(r"# (\d{4}): (.*)", page.read_text().splitlines()[0]).groups()
    assert page.name.startswith(f"{number}-")
    assert not title.startswith(("What", "Who", "Where", "How"))
    assert not title.endswith(".")
