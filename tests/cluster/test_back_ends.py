"""Services by name, this package's and others by entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
from fake_services import FakeIndexer, FakeSelectionService

from kvtrie import ConfigError
from kvtrie.cluster import DynamoIndex, DynamoSelector, open_index, open_selector


class OtherIndex:
    def __init__(self, url, *, size=1):
        self.url, self.size = url, size

    def add(self, machine, *, events, replay=None):
        pass

    def remove(self, machine):
        pass

    def match(self, tokens, *, deadline_s):
        return {}, tokens, deadline_s


class NoIndex:
    def __init__(self, url):
        pass


@pytest.fixture
def others(monkeypatch):
    points = {
        "kvtrie.index": {
            "other": "test_back_ends:OtherIndex",
            "none": "test_back_ends:NoIndex",
            "broken": "no_such_module:Index",
        }
    }

    def found(group):
        rows = points.get(group, {})
        return [EntryPoint(name, at, group) for name, at in rows.items()]

    monkeypatch.setattr("kvtrie.cluster.back_ends.entry_points", found)


def test_dynamo_is_there_by_name(closing):
    index = closing(open_index("dynamo", closing(FakeIndexer()).url, block_tokens=32))
    assert isinstance(index, DynamoIndex)
    url = closing(FakeSelectionService()).url
    assert isinstance(closing(open_selector("dynamo", url, deadline_s=1)), DynamoSelector)


@pytest.mark.usefixtures("others")
def test_another_service_is_found_by_its_entry_point():
    index = open_index("other", "http://x", size=3)
    assert isinstance(index, OtherIndex)
    assert (index.url, index.size) == ("http://x", 3)


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("nothing", {}, "kind is 'nothing', one of broken, dynamo, none, other wanted"),
        ("none", {}, "kvtrie.index none: is no Index"),
        ("broken", {}, "kvtrie.index broken: No module named 'no_such_module'"),
        ("other", {"nosuch": 1}, "kvtrie.index other: .*nosuch"),
        ("dynamo", {"nosuch": 1}, "kvtrie.index dynamo: .*nosuch"),
        (3, {}, "kind is 3"),
    ],
)
def test_a_service_that_cannot_be_opened_is_an_error(kind, options, said):
    with pytest.raises(ConfigError, match=said):
        open_index(kind, "http://127.0.0.1:1", **options)


def test_an_unknown_selector_is_an_error():
    with pytest.raises(ConfigError, match="kind is 'x', one of dynamo wanted"):
        open_selector("x", "http://127.0.0.1:1")
