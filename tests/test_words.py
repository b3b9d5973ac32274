"""The count of marked words reads what people read, and no code."""

from __future__ import annotations

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
        found += [(line + at, word) for at, word in words.marked(prose)]
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
    assert [word for _, word in words.marked(text)] == expected


def test_questions_and_labels_are_no_openings():
    text = (
        "What is a tier? What\n\nA block. Where it is not, it moves.\n\nwhat: one argument's name"
    )
    openings = [sentence for _, sentence in words.sentences(text) if words.OPENING.match(sentence)]
    assert openings == ["Where it is not, it moves."]


def test_a_page_is_a_row_and_decisions_share_one():
    assert words.row_of("docs/guide.md") == "docs/guide.md"
    assert words.row_of("docs/decisions/0001-a.md") == "docs/decisions"
    assert words.row_of("rust/core/src/manager/evict.rs") == "rust/core/src/manager"
