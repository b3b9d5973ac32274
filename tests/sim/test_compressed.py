"""`readers.compressed`: gzip and zstd are read as plain files; damage is one error."""

import gzip
import importlib
import json
import sys

import numpy as np
import pytest
from trace_files import AZURE, BURST, CHATS, plain, write

from kvtrie.errors import ConfigError
from kvtrie.sim.config import TraceSource
from kvtrie.sim.requests import trace_requests
from kvtrie.sim.trace import read_trace


def zstd_of(data):
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    return importlib.import_module(name).compress(data)


@pytest.mark.parametrize("pack", [gzip.compress, zstd_of])
@pytest.mark.parametrize(
    ("kind", "text"), [("azure", AZURE), ("sharegpt", json.dumps(CHATS)), ("burstgpt", BURST)]
)
def test_compressed_traces_are_read_as_they_are(tmp_path, pack, kind, text):
    plain, packed = write(tmp_path, text, "plain"), tmp_path / "packed"
    packed.write_bytes(pack(text.encode()[:70]) + pack(text.encode()[70:]))
    found, same = (plain_rows(TraceSource(path, kind)) for path in (plain, packed))
    assert found == same
    assert len(found) >= 3


def plain_rows(source):
    return plain(trace_requests(source, 16))


@pytest.mark.parametrize("pack", [gzip.compress, zstd_of])
@pytest.mark.parametrize("kind", ["mooncake", "sharegpt", "azure"])
@pytest.mark.parametrize("spoil", [lambda data: data[:-9], lambda data: data[:20] + b"?" * 90])
def test_damaged_compression_is_one_error(tmp_path, pack, kind, spoil):
    path = tmp_path / "packed"
    path.write_bytes(spoil(pack(np.random.default_rng(0).bytes(999))))
    with pytest.raises(ConfigError, match=r"cannot read the trace .*packed: "):
        list(trace_requests(TraceSource(path, kind), 16))


def test_zstd_without_its_module_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "backports.zstd", None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    path = tmp_path / "packed"
    path.write_bytes(b"\x28\xb5\x2f\xfd rest")
    with pytest.raises(ConfigError, match=r"pip install 'kvtrie\[cli\]'"):
        read_trace(path)
