"""URLs of shared stores: no character of a path is lost, what a parser would drop is refused."""

from __future__ import annotations

import pytest

from kvtrie.errors import ConfigError
from kvtrie.tiers.remote.folder import folder_of
from kvtrie.tiers.remote.url import RemoteUrl

PATHS = {
    "folder:/kv": "/kv",
    "folder:/my kv/a": "/my kv/a",
    "folder:/a%20b": "/a b",
    "folder:/a%23b": "/a#b",
    "folder:/a%3Fb?ttl=9": "/a?b",
    "folder:/50%25": "/50%",
    "folder:/a%ff": "/a\udcff",
    "folder:/é": "/é",
    "folder:/a+b;c=d,e@f:g": "/a+b;c=d,e@f:g",
    "folder:relative/kv": "relative/kv",
}


@pytest.mark.parametrize("url", PATHS)
def test_a_folder_keeps_every_character(url):
    found = RemoteUrl.parse("url", url)
    assert folder_of(found) == PATHS[url]
    str(found).encode()
    assert RemoteUrl.parse("url", str(found)) == found


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("folder:/kv#1", "'#' is no part of .* write %23"),
        ("folder:/kv#", "write %23"),
        ("folder:/k\tv", "write %09"),
        ("folder:/k\nv", "write %0A"),
        ("folder:/k\0v", "write %00"),
        ("folder:/50%", "'%' is no part of .* write %25"),
        ("folder:/a%zz", "write %25"),
        ("redis://:pass#word@h", "write %23"),
        ("folder:/kv?x", "bad query field"),
        ("redis://h:99999", "Port out of range"),
        ("redis://[::1", "Invalid IPv6 URL"),
        ("folder:/kv?ttl=1&ttl=2", "names an option twice"),
        ("/kv", "a URL wanted: 'folder:/kv' is a folder"),
    ],
)
def test_what_a_parser_would_drop_is_refused(url, message):
    with pytest.raises(ConfigError, match=message) as error:
        RemoteUrl.parse("url", url)
    assert "pass" not in str(error.value)
