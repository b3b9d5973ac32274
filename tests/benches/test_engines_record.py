"""The comparison of vLLM servers: which one counts, and what its rows show."""

from benches.engines.__main__ import (
    GOALS,
    KINDS,
    MOST,
    STEPS,
    TURNS,
    fastest,
    ratios_of,
    rows_of,
    rows_of_many,
)
from benches.tables import engines


def computed(*seconds):
    return {"what": "none", "computed_s": list(seconds), "found": []}


def loaded(*seconds):
    return {"what": "kvtrie", "computed_s": [], "found": [(took, 64) for took in seconds]}


def test_the_server_with_the_smallest_median_counts_and_one_that_failed_does_not():
    assert fastest([computed(2, 3), {"error": "no"}, computed(1, 9, 1)])["computed_s"] == [1, 9, 1]
    assert fastest([loaded(0.3), loaded(0.2)])["found"] == [(0.2, 64)]
    assert fastest([{"error": "no"}]) == {"error": "no"}


def test_steps_are_compared_by_mean_median_and_99th_percentile():
    ours = {"us": 80, "median_us": 20, "p99_us": 300}
    theirs = {"us": 160, "median_us": 100, "p99_us": 600}
    steps = {"kvtrie": [ours] * 3, "offload": [theirs] * 3}
    assert ratios_of({}, steps) == {
        "step, mean": 2,
        "step, median": 5,
        "step, 99th percentile": 2,
    }
    assert ("step of kvtrie, 99th percentile", "300 µs") in rows_of({}, steps)


def test_a_restarted_server_opens_the_folder_of_the_server_with_a_disk():
    assert list(KINDS).index("restart") == list(KINDS).index("disk") + 1
    servers = {"none": computed(2), "restart": loaded(0.25)}
    assert ("from restart", "250 ms") in rows_of(servers, {})
    assert not ratios_of(servers, {"kvtrie": [{"error": ""}], "offload": []})


def test_steps_that_explain_are_compared_with_those_that_do_not():
    took = dict(zip(TURNS, (103, 400, 100, 120), strict=True))
    steps = {name: [dict.fromkeys(STEPS.values(), took[name])] * 3 for name in TURNS}
    ratios = ratios_of({}, steps, {"explain_ms": 3, "hash_ms": 2})
    assert ratios == {
        **dict.fromkeys(STEPS, 400 / 103),
        "why sampling": 1.03,
        "why all": 1.2,
        "explain and hash": 1.5,
    }
    record = {"servers": {}, "ratios": ratios, "goals": GOALS, "most": MOST}
    assert "| why all | 1.2 | at most 1.1, **missed** |" in engines(record)
    assert "| why sampling | 1.03 | at most 1.03 |" in engines(record)


def test_answers_that_differ_are_shown():
    many = {"requests": 10_000, "at_once": 64, "different": 0, "ties": 3}
    many["bytes_per_request"] = {"none": 7.4, "kvtrie": 9}
    assert rows_of_many(many) == [
        ("answers of 10,000 requests, 64 at once, that differ", "0 (3 ties)"),
        ("memory that they leave, none", "7 bytes each"),
        ("memory that they leave, kvtrie", "9 bytes each"),
    ]
    assert rows_of_many({"error": "no"}) == [("many requests", "no")]
    record = {"servers": {}, "ratios": {}, "goals": {}, "many": many}
    row = "| answers that differ, of 10,000 with 64 at once | {} | 0{} |"
    assert row.format(0, "") in engines(record)
    assert row.format(2, ", **missed**") in engines(record | {"many": many | {"different": 2}})
