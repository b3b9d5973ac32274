"""`PassTable`: times between the measured cells, which never fall."""

import pytest

from kvtrie.errors import ConfigError
from kvtrie.fuse.passes import PassTable


def test_passes_are_linear_between_cells_and_never_fall():
    table = PassTable.of([(0, 1, 10.0), (0, 5, 50.0), (100, 1, 9.0), (100, 5, 90.0)])
    assert table.ns == ((10.0, 50.0), (10.0, 90.0))
    assert table.pass_ns(3, 0) == 30
    assert table.pass_ns(5, 50) == 70
    assert table.pass_ns(0.5, 0) == table.pass_ns(1, 0) == 10
    assert table.pass_ns(0, 50) == 0
    assert table.pass_ns(9, 0) == 90
    assert table.pass_ns(5, 200) == 130
    assert PassTable((0,), (4,), ((8.0,),)).pass_ns(8, 0) == 16
    for contexts, tokens, ns in (
        ((0,), (1, 1), ((1.0, 2.0),)),
        ((0,), (1, 2), ((2.0, 1.0),)),
        ((0,), (0,), ((1.0,),)),
        ((0,), (1,), ((0.0,),)),
        ((0, 1), (1,), ((1.0,),)),
    ):
        with pytest.raises(ConfigError):
            PassTable(contexts, tokens, ns)
    with pytest.raises(ConfigError, match="no time"):
        PassTable.of([(0, 1, 1.0), (1, 2, 1.0)])
