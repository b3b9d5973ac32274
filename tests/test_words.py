"""The count of marked words reads what people read, and no code."""

from __future__ import annotations

from collections import Counter

import pytest
import words

PYTHON = '''"""Whoever reads."""
HOST = "who stands here is data, not prose"
x = 1  # nobody


def f(parser):
    """A function."""
    # A block
    # is told.
    parser.add_argument("--x", help="so many blocks")
    raise ValueError(f"{x} of its own: `stood` is code")
'''
RUST = """//! Heeds the lock.
/// What it holds is
/// told once.
fn f() { call("who"); let c = '"'; } // mend
/* lies */
fn g() { err("a sentence that stands \\
              on two lines") }
"""
PAGE = """# Who is asked

Blocks stand here. `told` is code.

```sh
echo nobody
```

| Where the blocks are | so few |
"""


@pytest.mark.parametrize(
    ("name", "text", "hits", "openings"),
    [
        (
            "a.py",
            PYTHON,
            [(1, "whoever"), (3, "nobody"), (9, "told"), (10, "so many"), (11, "of its own")],
            0,
        ),
        ("a.rs", RUST, [(1, "heeds"), (3, "told"), (4, "mend"), (5, "lies"), (6, "stands")], 1),
        ("a.md", PAGE, [(1, "who"), (3, "stand"), (9, "so few")], 1),
        ("Makefile", "a: b ## lies\n\tgrep '#who'\n", [(1, "lies")], 0),
    ],
)
def test_prose_of_each_kind_of_file_is_counted(name, text, hits, openings):
    found, opened = [], 0
    for line, prose in words.prose(name, text):
        found += [(line + at, word) for at, word in words.hits_of(prose, words.MARKED)]
        opened += sum(bool(words.OPENING.match(sentence)) for _, sentence in words.sentences(prose))
    assert sorted(found) == hits
    assert opened == openings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a manager behind one mutex", []),
        ("the write runs behind the step", ["behind"]),
        ("behind: a key", []),
        ("laid out by page, standalone, a stand-in", []),
        ("so\n    much of its\n    own", ["so much", "of its own"]),
    ],
)
def test_right_uses_are_not_marked(text, expected):
    assert [word for _, word in words.hits_of(text, words.MARKED)] == expected


def test_questions_and_labels_are_no_openings():
    text = (
        "What is a tier? What\n\nA block. Where it is not, it moves.\n\nwhat: one argument's name"
    )
    openings = [sentence for _, sentence in words.sentences(text) if words.OPENING.match(sentence)]
    assert openings == ["Where it is not, it moves."]


CONSTRUCTED = """A block whose slot is another one's;
of which `one` is code; the others are those that
stay, such as blocks which it reads.
"""


@pytest.mark.parametrize("name", ["docs/a.md", "python/kvtrie/a.md", "rust/core/src/a.md"])
def test_pronouns_relatives_and_semicolons_are_counted_in_the_product(name):
    found = {
        kind: [word for _, word in hits] for kind, hits in words.hits(name, CONSTRUCTED).items()
    }
    pronouns = ["whose", "another", "one", "of which", "others", "those", "such"]
    assert found["pronouns"] == pronouns
    assert found["relatives"] == ["which", "that", "which"]
    assert found["semicolons"] == [";", ";"]
    assert words.hits("tests/a.md", CONSTRUCTED).keys() == {"marked", "openings"}


def test_figures_are_per_1000_words_and_per_100_sentences():
    row = Counter(words=2000, sentences=50, openings=1, pronouns=4)
    assert words.figures(row) == {
        "marked": 0,
        "openings": 2,
        "pronouns": 2,
        "relatives": 0,
        "semicolons": 0,
    }


def test_a_page_is_a_row_and_decisions_share_one():
    assert words.row_of("docs/guide.md") == "docs/guide.md"
    assert words.row_of("docs/decisions/0001-a.md") == "docs/decisions"
    assert words.row_of("rust/core/src/manager/evict.rs") == "rust/core/src/manager"
