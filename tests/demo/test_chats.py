"""The chats of the demo are of ordinary length."""

import pytest

from kvtrie.demo.chats import CHATS, SYSTEM

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def test_the_chats_are_of_ordinary_length():
    assert len(CHATS) == 12
    assert all(len(chat) == 3 for chat in CHATS)
    assert len(SYSTEM.split()) > 90
    assert all(40 <= len(question.split()) <= 70 for chat in CHATS for question in chat)
