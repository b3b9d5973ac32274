"""Memory that processes of a machine share, and pools over memory that is there already."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvtrie import ConfigError, ModelShape
from kvtrie.engines.vllm.shared_memory import Address, SharedMemory, machine
from kvtrie.model.layout import Layout
from kvtrie.tiers import Pool

OTHER = """
import sys
from kvtrie.engines.vllm.shared_memory import Address, SharedMemory
process, file, size, mark = sys.argv[1:]
opened = SharedMemory.open(Address(int(process), int(file), int(size), bytes.fromhex(mark)))
assert opened.bytes[:3].tolist() == [1, 2, 3]
opened.bytes[-3:] = 9
"""


def test_another_process_has_the_very_memory():
    made = SharedMemory.make(10_000)
    assert not made.bytes.any()
    made.bytes[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    process, file, size, mark = made.address
    arguments = [str(process), str(file), str(size), mark.hex()]
    subprocess.run([sys.executable, "-c", OTHER, *arguments], check=True)
    assert made.bytes[-4:].tolist() == [0, 9, 9, 9]
    opened = SharedMemory.open(made.address)
    made.close()
    opened.close()
    opened.close()
    made.bytes[5] = 7
    assert opened.bytes[5] == 7
    with pytest.raises(ConfigError, match="cannot be opened"):
        SharedMemory.open(made.address)


def test_memory_that_is_not_there_or_another_one_is_refused():
    made, other = SharedMemory.make(100), SharedMemory.make(100)
    at = made.address
    with pytest.raises(ConfigError, match="has the mark of different memory"):
        SharedMemory.open(Address(at.process, other.address.file, at.size, at.mark))
    with pytest.raises(ConfigError, match="has 132 bytes, 232 wanted"):
        SharedMemory.open(at._replace(size=200))
    with pytest.raises(ConfigError, match="cannot be opened"):
        SharedMemory.open(at._replace(process=2**22 + 1))
    with pytest.raises(ConfigError, match="of 0 bytes"):
        SharedMemory.make(0)
    with pytest.raises(ConfigError, match="no room for"):
        SharedMemory.make(2**62)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ConfigError, match="has 132 bytes"):
        SharedMemory.open(at._replace(size=2**40))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert machine() == machine()


def test_a_pool_takes_memory_that_is_there():
    model, layout = ModelShape(2, 1, 8, latent=True), Layout(latent=True)
    memory = torch.arange(3 * 2 * 4 * 8 * 4, dtype=torch.int64).to(torch.uint8)
    pool = Pool(model, 3, 4, layout=layout, memory=memory)
    assert pool.planes[0].shape == (6, 128)
    assert torch.equal(pool.planes[0].reshape(-1), memory)
    pool.planes[0][0, 0] = 77
    assert memory[0] == 77
    with pytest.raises(ConfigError, match=r"768 bytes of .* one plane of 1024"):
        Pool(model, 4, 4, layout=layout, memory=memory)
    with pytest.raises(ConfigError, match="one plane"):
        Pool(model, 3, 4, layout=layout, memory=memory.view(torch.int8))
    two = ModelShape(2, 1, 4)
    with pytest.raises(ConfigError, match="the layout has 2"):
        Pool(two, 3, 4, layout=Layout(kv="split"), memory=memory)
