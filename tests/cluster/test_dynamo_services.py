"""Index and selector over Dynamo's own services, in a network namespace."""

from __future__ import annotations

import subprocess

import pytest
from dynamo_services import PYTHON
from tests import namespace

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no Dynamo: make peers ARGS=dynamo"),
    pytest.mark.skipif(not namespace.possible(), reason="this user may make no network namespace"),
]


def test_index_and_selector_follow_dynamos_services():
    ended = namespace.run(
        "tests.cluster.dynamo_services", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
