"""The digests of weights that processes of one server share."""

import pytest

from kvtrie.engines.vllm.board import Board

pytestmark = pytest.mark.engine


def test_digests_are_returned_once_every_rank_has_answered_the_last_question(tmp_path):
    mine, theirs = Board("e", 2, tmp_path), Board("e", 2, tmp_path)
    other = Board("f", 2, tmp_path)
    assert mine.read() is None
    theirs.answer(1, theirs.question, b"b" * 32)
    assert mine.read() is None
    theirs.answer(0, theirs.question, b"a" * 32)
    assert mine.read() == [b"a" * 32, b"b" * 32]
    mine.ask()
    assert theirs.question == 1
    assert mine.read() is None
    theirs.answer(0, 0, b"c" * 32)  # to the question before
    theirs.answer(1, 1, b"d" * 32)
    assert mine.read() is None
    theirs.answer(0, 1, b"e" * 32)
    assert mine.read() == [b"e" * 32, b"d" * 32]
    assert other.read() is None


def test_its_file_is_removed(tmp_path):
    board = Board("e", 1, tmp_path)
    board.close()
    board.close()
    assert not list(tmp_path.iterdir())


def test_the_file_of_a_successor_stays(tmp_path):
    first = Board("e", 1, tmp_path)
    (made,) = tmp_path.iterdir()
    made.unlink()
    second = Board("e", 1, tmp_path)
    first.close()
    assert [*tmp_path.iterdir()] == [made]
    second.close()
    assert not [*tmp_path.iterdir()]
