"""Fixtures of a clock and of services that are closed with the test."""

from __future__ import annotations

import pytest


class Clock:
    """Nanoseconds that pass by `seconds` only."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now

    def seconds(self, seconds):
        self.now += int(seconds * 1e9)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def closing():
    """Close what it is given at the end of the test, the latest first."""
    opened = []

    def keep(one):
        opened.append(one)
        return one

    yield keep
    for one in reversed(opened):
        one.close()
