"""Back ends by the scheme of a URL: those of other packages, missing extras, unknown schemes."""

from __future__ import annotations

import sys

import pytest
from test_folder_store import PROMPT, compute, fetch, world

from kvtrie import ConfigError
from kvtrie.tiers.remote import schemes

PACKAGE = """
from kvtrie.tiers.remote import Result

VALUES = {}


class Shelf:
    def __init__(self, url, form):
        url.only(("shelf",))
        self.values = VALUES.setdefault((url.host, url.options.get("shelf")), {})

    def exists_many(self, names, deadline):
        return [Result("ok" if name in self.values else "missing") for name in names]

    def get_many(self, rows, deadline):
        for row in rows:
            if row.name in self.values:
                header, layers = self.values[row.name]
                row.header[:], row.memory[:] = header, layers[slice(*row.layers)]
        return self.exists_many([row.name for row in rows], deadline)

    def put_many(self, rows, deadline):
        for row in rows:
            header = memoryview(row.header)
            self.values.setdefault(row.name, (header, row.memory.copy()))
        return self.exists_many([row.name for row in rows], deadline)

    def remove_many(self, names, deadline):
        return [Result("ok") for name in names if self.values.pop(name, True)]

    def close(self):
        pass


def broken(url, form):
    return "no store"
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that registers the schemes `shelf` and `broken`."""
    about = tmp_path / "shelves-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shelves\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[kvtrie.remote]\nshelf = shelves:Shelf\nbroken = shelves:broken\n"
    )
    (tmp_path / "shelves.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("shelves", None)


@pytest.mark.usefixtures("package")
def test_a_package_adds_a_scheme():
    assert {"shelf", "broken", "folder", "redis", "s3"} <= set(schemes())
    with world("shelf://left?shelf=3") as executor:
        compute(executor, PROMPT)
    with world("shelf://left?shelf=3") as executor:
        assert executor.prefetch(PROMPT, deadline_s=30.0).found == 6
        executor.drain()
        assert fetch(executor, PROMPT) == len(PROMPT)
    with world("shelf://left?shelf=4") as executor:
        assert executor.prefetch(PROMPT, deadline_s=30.0).found == 0
    with pytest.raises(ConfigError, match="shelf: has no option 'row': shelf, strict are known"):
        world("shelf://left?row=4")
    with pytest.raises(ConfigError, match="the back end of broken: is no RemoteStore"):
        world("broken://left")


def test_an_unknown_scheme_names_those_that_are_known():
    with pytest.raises(ConfigError, match=r"shelf://left: unknown scheme, one of az:, folder:"):
        world("shelf://left")


@pytest.mark.parametrize(
    ("scheme", "extra"),
    [("redis", "redis"), ("rediss", "redis"), ("s3", "object"), ("gs", "object")],
)
def test_a_missing_extra_is_named(scheme, extra, monkeypatch):
    module = {"redis": "redis", "object": "obstore"}[extra]
    monkeypatch.setitem(sys.modules, module, None)
    for name in ("redis", "redis_nodes", "object"):
        monkeypatch.delitem(sys.modules, f"kvtrie.tiers.remote.{name}", raising=False)
    with pytest.raises(ConfigError, match=rf"{scheme}: needs: pip install 'kvtrie\[{extra}\]'"):
        world(f"{scheme}://host/0")
