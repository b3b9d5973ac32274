"""The mutations of the core still say where they belong. Whether tests notice takes minutes."""

from __future__ import annotations

import pytest
from mutations import CORE, MUTATIONS, ROOT, SUITES


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.title)
def test_the_text_that_a_mutation_replaces_stands_once(mutation):
    source = (ROOT / CORE / "src" / mutation.file).read_text()
    assert source.count(mutation.old) == 1
    assert mutation.new != mutation.old
    assert mutation.suite in SUITES


def test_the_docs_list_every_mutation():
    rows = (ROOT / "docs" / "mutations.md").read_text().splitlines()
    listed = [row.split(" | ")[1] for row in rows if row.startswith("| ") and row[2].isdigit()]
    assert listed == [mutation.title for mutation in MUTATIONS]
