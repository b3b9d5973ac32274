"""Fixtures of kernels' tests: hosts of the attention kernels."""

from __future__ import annotations

import os

import pytest
from onhost import Host

from kvtrie.kernels.formats import ROWS


@pytest.fixture(scope="session")
def objects(tmp_path_factory):
    """The folder of compiled kernels of a run of tests, the same one for all its workers."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "kernels"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def hosts(objects):
    """Hosts by format, width and sanitizer, built when first asked for."""
    made = {}

    def host(dtype, width, sanitizer="none"):
        key = (dtype, width, sanitizer)
        if key not in made:
            name = ROWS[dtype]
            made[key] = Host(objects, name, name, sanitizer=sanitizer, width=width)
        return made[key]

    yield host
    for each in made.values():
        each.close()
