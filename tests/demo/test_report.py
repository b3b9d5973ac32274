"""Reports name the tier of every block, and are read as they were written."""

import pytest

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.demo.report import capture, read_report, write_report
from kvtrie.errors import ConfigError


def test_a_report_names_the_tier_of_every_block(tmp_path):
    model = ModelShape(layers=3, kv_heads=1, head_dim=1)
    manager = BlockManager(model, [Tier("gpu", blocks=3), Tier("host", blocks=2)], block_tokens=2)
    for start in (0, 10):
        tokens = range(start, start + 5)
        lease = manager.acquire(tokens, now=start)
        manager.complete(manager.moves().id, now=start)
        lease.commit(tokens, now=start)
        lease.release()
    taken = capture(manager, "two", {"old": list(range(5)), "new": list(range(10, 15))}, 20)
    # Room for three blocks: the tail of the old one had to make way for the new one's open block.
    assert taken.sessions["old"].tolist() == [[1, 1]] * 3
    assert taken.sessions["new"].tolist() == [[0, 0]] * 3
    assert taken.tiers["gpu"]["evicted_dirty"] == 2
    path = tmp_path / "report.json"
    write_report(path, taken)
    read = read_report(path)
    assert (read.title, read.block_tokens, read.layers) == ("two", 2, 3)
    assert read.tiers == taken.tiers
    assert {name: where.tolist() for name, where in read.sessions.items()} == {
        name: where.tolist() for name, where in taken.sessions.items()
    }
    with pytest.raises(ConfigError, match="cannot write"):
        write_report(tmp_path / "nowhere" / "report.json", taken)
