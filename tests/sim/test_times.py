"""`readers.times`: the unit of a trace's times is that of the first one, or as given."""

import pytest
from trace_files import rows, write

from kvtrie.cli import main
from kvtrie.errors import ConfigError
from kvtrie.sim.readers.hashes import Reading
from kvtrie.sim.readers.times import moment
from kvtrie.sim.trace import iter_trace

SECOND = 10**9
GMI = 1753780607550317897  # a time of the GMI trace, in ns since 1970


def arrivals(tmp_path, *times, unit="auto", name="trace"):
    line = {"input_length": 9, "output_length": 1, "hash_ids": [1]}
    folder = tmp_path / name
    folder.mkdir()
    path = rows(folder, *({"timestamp": time, **line} for time in times))
    return [each.at for each in iter_trace(path, reading=Reading(time_unit=unit))]


@pytest.mark.parametrize(
    ("times", "wanted", "named"),
    [
        ([0, 5, 7.5], [0, 5_000_000, 7_500_000], None),
        ([10**9, 10**9 + 1], [10**9, 10**9 + 1], "s"),
        ([str(GMI), str(GMI + 1), GMI + 2], [0, 1, 2], "ns"),
        ([GMI // 1000, GMI // 1000 + 3], [0, 3_000], "us"),
        ([GMI // 10**6, GMI // 10**6 + 3], [0, 3_000_000], "ms"),
        (["1753780607.5", "1753780608.250000001"], [0, 750_000_001], "s"),
        ([1753780607.5, 1753780608], [0, SECOND // 2], "s"),
        (["1500", "1502"], [1_500_000_000, 1_502_000_000], "ms"),
        (
            ["2026-09-24T10:00:00Z", "2026-09-24T12:00:00.000000001+01:00"],
            [0, 3600 * SECOND + 1],
            None,
        ),
        (["2026-09-24 10:00:00,5", "20260924T100001Z"], [0, SECOND // 2], None),
    ],
)
def test_the_first_time_decides_the_unit_which_is_named_once(
    tmp_path, caplog, times, wanted, named
):
    if named == "s" and wanted[0]:
        wanted = [0, SECOND]  # 10^9 is a time of the year 2001
    assert arrivals(tmp_path, *times) == wanted
    assert arrivals(tmp_path, *times, name="again") == wanted
    units = [line.partition("read in ")[2].partition(",")[0] for line in caplog.messages]
    assert units == [named, named] if named else not units  # each file names its own


@pytest.mark.parametrize(
    ("unit", "times", "wanted"),
    [
        ("s", [0.0, 0.25, 10**9], [0, SECOND // 4, 10**18]),
        ("ns", ["12", 15], [12, 15]),
        ("us", [7, "8.5"], [7_000, 8_500]),
        ("ms", [10**9, 10**9 + 1], [10**15, 10**15 + 10**6]),
        ("ns", [GMI, GMI + 5], [0, 5]),
    ],
)
def test_a_given_unit_is_taken_in_silence(tmp_path, caplog, unit, times, wanted):
    assert arrivals(tmp_path, *times, unit=unit) == wanted
    assert not caplog.messages


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([GMI, GMI // 1000], "the time is one in us, but those above are in ns"),
        ([5, GMI], "in ns, but those above are in ms"),
        ([5, "2026-09-24T10:00:00Z"], "in dates, but those above are in ms"),
        (["2026-09-24T10:00:00Z", 5], "in ms, but those above are in dates"),
        ([GMI, GMI - 1], "before the"),
        ([0, -5], "timestamp is -5, a number from 0 to"),
        ([0, "-5"], "timestamp is '-5', a date and time wanted"),
        ([0, float("nan")], "timestamp is nan, a number from 0"),
        ([0, True], "timestamp is True"),
        ([0, None], "timestamp is None"),
        ([0, [1]], r"timestamp is \[1\]"),
        ([0, "2026-13-24T10:00:00Z"], "'2026-13-24T10:00:00Z', a date and time wanted"),
        ([0, 2**70], f"timestamp is {2**70}, a number from 0 to 9223372036854"),
    ],
)
def test_a_time_that_cannot_be_is_named_with_its_line(tmp_path, times, message):
    with pytest.raises(ConfigError, match=f"line 2: .*{message}"):
        arrivals(tmp_path, *times)


def test_arrival_ns_is_taken_as_it_is_and_alone(tmp_path):
    line = {"input_length": 9, "output_length": 1, "hash_ids": [1]}
    path = rows(tmp_path, {"arrival_ns": 5, **line}, {"arrival_ns": GMI, **line})
    assert [each.at for each in iter_trace(path)] == [5, GMI]
    for second, message in (
        ({"timestamp": 9}, "one in ms, but those above are in arrival_ns"),
        ({"timestamp": 9, "arrival_ns": 9}, "both given"),
        ({"arrival_ns": -1}, "arrival_ns is -1"),
        ({"arrival_ns": 1.5}, "arrival_ns is 1.5"),
        ({"arrival_ns": 4}, "before the 5"),
    ):
        path = rows(tmp_path, {"arrival_ns": 5, **line}, {**second, **line})
        with pytest.raises(ConfigError, match=f"line 2: .*{message}"):
            list(iter_trace(path))


def test_a_line_that_is_left_out_decides_no_unit(tmp_path):
    from kvtrie.sim.readers.lines import Skipped

    bad = {"timestamp": GMI, "input_length": 9, "output_length": -1, "hash_ids": [1]}
    good = {**bad, "timestamp": 3, "output_length": 1}
    skipped = Skipped()
    assert [each.at for each in iter_trace(rows(tmp_path, bad, good), skipped)] == [3_000_000]
    assert skipped.lines == 1


@pytest.mark.parametrize("option", ["--time-unit", "trace.time_unit"])
def test_commands_take_the_unit(tmp_path, capsys, option):
    rows(
        tmp_path,
        *(
            {"timestamp": at, "input_length": 16, "output_length": 1, "hash_ids": [1]}
            for at in (2, 4)
        ),
    )
    if option == "--time-unit":
        command = ["replay", str(tmp_path / "trace"), "--block-tokens", "16", option]
        assert main([*command, "s"]) == 0
        assert main([*command, "h"]) == 2
        assert "--time-unit is one of auto, s, ms, us, ns, not 'h'" in capsys.readouterr().err
        assert main([*command[:-1], "--format", "azure", option, "s"]) == 2
        assert "the format azure have one unit" in capsys.readouterr().err
        return
    config = write(
        tmp_path,
        'trace = {path="trace", format="mooncake", hash_tokens=16}\n'
        'model = {layers=4, kv_heads=1, head_dim=64, dtype="float16"}\n'
        'manager = {block_tokens=16}\ntiers = [{kind="gpu", blocks=9}]\n',
        "sim.toml",
    )
    lines = tmp_path / "lines"
    for more in (["--set", f"{option}=s"], ["--time-unit", "s"]):
        assert main(["sim", "run", str(config), *more, "--requests", str(lines)]) == 0
        assert '"arrival_ns": 2000000000' in lines.read_text().splitlines()[0]


def test_moments_are_nanoseconds_since_1970():
    assert moment("t", "1970-01-02T00:00:00.123456789Z") == 86_400 * SECOND + 123_456_789
    assert moment("t", "1970-01-01T02:00+02:00") == 0
