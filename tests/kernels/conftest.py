"""Fixtures of kernels' tests: hosts of the attention kernels."""

from __future__ import annotations

import pytest
from onhost import Host

from kvtrie.kernels.formats import ROWS


@pytest.fixture(scope="session")
def hosts(tmp_path_factory):
    """Hosts by format, width and sanitizer, built when first asked for."""
    folder, made = tmp_path_factory.mktemp("flash"), {}

    def host(dtype, width, sanitizer="none"):
        key = (dtype, width, sanitizer)
        if key not in made:
            name = ROWS[dtype]
            made[key] = Host(folder, name, name, sanitizer=sanitizer, width=width)
        return made[key]

    yield host
    for each in made.values():
        each.close()
