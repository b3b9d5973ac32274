"""A share of a grid's cells has each value of each parameter."""

from __future__ import annotations

import itertools

from grids import covering
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_a_full_grid_needs_as_many_cells_as_its_longest_parameter_has_values(sizes):
    cells = [dict(enumerate(cell)) for cell in itertools.product(*map(range, sizes))]
    assert len(covering(cells)) == max(sizes)


@given(st.lists(st.fixed_dictionaries({"a": st.integers(0, 3), "b": st.integers(0, 3)})))
def test_each_value_of_each_parameter_is_in_a_chosen_cell(cells):
    chosen = covering(cells)
    for name in "ab":
        assert {cells[at][name] for at in chosen} == {cell[name] for cell in cells}
