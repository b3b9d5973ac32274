"""The window of a layer: columns that queries see, that blocks get, and that rows bring along."""

import torch

from kvtrie.engines.transformers.windows import WindowLayer

WINDOW, BLOCK = 4, 3


def columns(first, last, rows=1):
    """K and V `(rows, heads, columns, dim)` whose numbers are those of their columns."""
    row = torch.arange(first, last, dtype=torch.float32)[None, None, :, None]
    keys = row.expand(rows, 2, -1, 1).clone()
    return keys, -keys


def seen(pair):
    keys, values = pair
    assert torch.equal(keys, -values)
    return keys[0, 0, :, 0].tolist()


def test_queries_see_the_window_before_them_and_themselves():
    layer = WindowLayer(WINDOW, BLOCK)
    assert seen(layer.update(*columns(0, 6), past=0)) == [0, 1, 2, 3, 4, 5]
    assert layer.visible(6) == 3
    assert seen(layer.update(*columns(6, 7), past=6)) == [3, 4, 5, 6]


def test_a_trimmed_window_has_what_a_query_and_a_commit_need():
    layer = WindowLayer(WINDOW, BLOCK)
    layer.update(*columns(0, 20), past=0)
    layer.trim()
    assert layer.keys.shape[2] == max(WINDOW - 1, BLOCK)
    assert seen(layer.update(*columns(20, 21), past=20)) == [17, 18, 19, 20]


def test_a_block_is_copied_from_its_columns():
    layer = WindowLayer(WINDOW, BLOCK)
    layer.update(*columns(0, 8), past=0)
    keys, values = torch.zeros(BLOCK, 2, 1), torch.zeros(BLOCK, 2, 1)
    layer.block(0, -5, BLOCK, (keys, values))
    assert keys[:, 0, 0].tolist() == [3, 4, 5]
    assert torch.equal(keys, -values)


def test_rows_of_shorter_windows_get_zeros_in_front():
    long, short, empty = (WindowLayer(WINDOW, BLOCK) for _ in range(3))
    long.update(*columns(0, 5, rows=2), past=0)
    short.update(*columns(3, 5), past=0)
    made = WindowLayer(WINDOW, BLOCK)
    made.take([long, empty, short], [[1, 0], [0], [0]])
    assert made.keys.shape[:3] == (4, 2, 5)
    assert made.keys[2:, 0, :, 0].tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 3, 4]]
