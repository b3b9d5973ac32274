"""Chunkers: nothing is lost, and borders are where they are said to be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtrie.errors import ConfigError
from kvtrie.fuse.chunker import BySeparator, BySize, Given

TEXT = st.lists(st.integers(0, 4), max_size=60)


@given(TEXT, st.lists(st.integers(0, 4), min_size=1, max_size=3))
def test_pieces_between_separators_are_the_text_and_what_a_search_from_the_left_finds(text, mark):
    pieces = [piece.tolist() for piece in BySeparator(tuple(mark))(text)]
    assert [token for piece in pieces for token in piece] == text
    assert all(pieces)
    expected, start, at = [], 0, 0
    while at + len(mark) <= len(text):
        if text[at : at + len(mark)] == mark:
            at += len(mark)
            expected.append(text[start:at])
            start = at
        else:
            at += 1
    expected += [text[start:]] if text[start:] else []
    assert pieces == expected


@given(TEXT, st.integers(1, 9), st.frozensets(st.integers(0, 4), max_size=2))
def test_pieces_by_size_end_with_a_sentence_where_one_ends(text, size, ends):
    pieces = [piece.tolist() for piece in BySize(size, ends)(text)]
    assert [token for piece in pieces for token in piece] == text
    assert all(0 < len(piece) <= size for piece in pieces)
    for piece in pieces[:-1]:
        assert piece[-1] in ends or (len(piece) == size and not ends.intersection(piece))


def test_given_pieces_are_taken_as_they_are():
    assert [piece.tolist() for piece in Given()([[1, 2], [], np.array([3])])] == [[1, 2], [3]]


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="0 tokens"):
        BySeparator(())
    with pytest.raises(ConfigError, match="size is 0, 1 to"):
        BySize(0)
    for make in (
        lambda: BySize(2.5),
        lambda: BySize("2"),
        lambda: BySize(2, {"."}),
        lambda: BySeparator("ab"),
        lambda: BySeparator((1.5,)),
        lambda: BySize(2)([[1, 2], [3, 4]]),
        lambda: BySeparator((1,))([0.5]),
        lambda: Given()([[[1]]]),
        lambda: Given()(7),
    ):
        with pytest.raises(ConfigError):
            make()
