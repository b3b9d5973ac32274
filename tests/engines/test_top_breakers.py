"""The sketch of divergence points, compared with exact counts."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvtrie.engines.server.top_breakers import TopBreakers


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 50)), max_size=200))
def test_large_points_are_present_and_counts_are_within_their_error(rows):
    sketch, exact = TopBreakers(8), Counter()
    for point, tokens in rows:
        sketch.add(point, tokens, {"point": point})
        exact[point] += tokens
    ranked = sketch.first(99)
    assert len(ranked) == min(8, len(exact))
    assert [one.tokens for one in ranked] == sorted((one.tokens for one in ranked), reverse=True)
    for one in ranked:
        true = exact[one.example["point"]]
        assert one.tokens - one.error <= true <= one.tokens
    least = ranked[-1].tokens if len(ranked) == 8 else 0
    present = {one.example["point"] for one in ranked}
    assert all(point in present for point, count in exact.items() if count > least)


def test_an_example_is_that_of_the_first_request():
    sketch = TopBreakers()
    for at in range(3):
        sketch.add("a", 10, {"at": at})
    (one,) = sketch.first(5)
    assert (one.tokens, one.requests, one.example) == (30, 3, {"at": 0})
    assert sketch.first(0) == []
