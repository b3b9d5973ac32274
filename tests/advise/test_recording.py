"""A recording gives the same requests, and says nothing of prompts unless it is asked to."""

import json
import stat

import pytest

from kvtrie.advise.recording import Recorder, is_recording, read_recording
from kvtrie.advise.window import Window
from kvtrie.advise.wire import Batch, Part, Stored
from kvtrie.errors import ConfigError

# Lists, as they are read.
PARTS = [
    Part(3, "sliding_window", 128, 4, [21, b"\xef"], []),
    Part(3, "", None, 0, [], [21]),
    Part(4, "mamba", None, 4, [], []),
]
BATCHES = [
    Batch(
        5,
        10.0,
        [Stored([11, b"\xab\xcd"], None, 2, "chat", [901, 902, 903, 904])],
        [],
        rank=0,
        parts=[],
    ),
    Batch(6, 11.0, [Stored([13], b"\xab\xcd", 2, "chat", [905, 906])], [11], rank=0, parts=[]),
    Batch(7, 50.0, [Stored([14, 15], 13, 2, None, [907, 908, 909, 910])], [], rank=0, parts=[]),
    Batch(8, 51.0, [], [], cleared=True, rank=0, parts=PARTS),
]


def recorded(path, **more):
    recorder = Recorder(path, **more)
    recorder.metrics({"prompt_tokens": 1.0})
    for batch in BATCHES:
        recorder.batch(batch)
    recorder.close()
    return path


def window_of(rows):
    window = Window()
    window.add_all(rows)
    return window


def paths(window):
    return [
        (one.at, one.blocks.tolist(), one.answer is not None and one.answer.tolist())
        for one in window.rebuilt.requests()
    ]


@pytest.mark.parametrize("keep_tokens", [False, True])
def test_a_recording_gives_the_same_requests(tmp_path, keep_tokens):
    path = recorded(tmp_path / "rec", keep_tokens=keep_tokens)
    assert is_recording(path)
    heard, read = window_of(BATCHES), window_of(read_recording(path))
    assert paths(read) == paths(heard)
    assert read.before == {"prompt_tokens": 1.0}
    for name in ("stored", "distinct", "unknown", "cleared", "resident", "lost", "size"):
        assert getattr(read.rebuilt, name) == getattr(heard.rebuilt, name)


def test_with_tokens_a_recording_is_what_was_heard(tmp_path):
    rows = list(read_recording(recorded(tmp_path / "rec", keep_tokens=True)))
    assert repr([row for row in rows if isinstance(row, Batch)]) == repr(BATCHES)


def test_a_recording_is_for_its_owner_only_and_says_nothing_of_prompts(tmp_path):
    one, two = recorded(tmp_path / "one"), recorded(tmp_path / "two")
    assert stat.S_IMODE(one.stat().st_mode) == 0o600
    text = one.read_text()
    assert not any(str(token) in text.split('"at"', 1)[0] for token in range(901, 911))
    assert "tokens" not in json.loads(text.splitlines()[2])["stored"][0]
    assert "chat" not in text
    assert "abcd" not in text
    # Another key: names of two recordings cannot be compared.
    assert text != two.read_text()


def test_an_existing_file_is_not_written(tmp_path):
    path = tmp_path / "rec"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="a new file wanted"):
        Recorder(path)
    assert path.read_text() == "mine"


def test_a_file_cut_in_a_line_is_named_with_its_line(tmp_path):
    path = recorded(tmp_path / "rec")
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ConfigError, match="line 6: no JSON object: the file is cut"):
        list(read_recording(path))


BATCH = {"number": 100, "at": 100.0}


def stored(**values):
    """A line with one event, some of whose values are given."""
    return json.dumps(BATCH | {"stored": [{"blocks": [1], "size": 2, **values}]})


def part(**values):
    """A line with blocks of another group, some of whose values are given."""
    return json.dumps(BATCH | {"parts": [{"group": 1, **values}]})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{}", "KeyError"),
        ("[]", "not a line of a recording"),
        ('{"number": 1, "at": 2, "stored": [{"blocks": [1.5], "size": 2}]}', "no name of a block"),
        ('{"number": 1, "at": 2, "stored": [{"blocks": ["xy"], "size": 2}]}', "ValueError"),
        ('{"metrics": 3}', "metrics is 3, a dict wanted"),
        *((json.dumps(BATCH | {"number": one}), "number is") for one in (-1, 2**64, 0.5, None)),
        *((json.dumps(BATCH | {"at": one}), "at is") for one in (-1.0, 1e300, "1", float("nan"))),
        *((json.dumps(BATCH | {"rank": one}), "rank is") for one in (-1, "0", 2**64, [])),
        *((json.dumps(BATCH | {"stored": one}), "stored is") for one in (None, {}, "x", 5)),
        *((json.dumps(BATCH | {"removed": one}), "removed is") for one in (None, {}, "ab", 5)),
        *((json.dumps(BATCH | {"cleared": one}), "cleared is") for one in (None, 1, "yes")),
        *((stored(size=one), "size is") for one in (0, -1, 2**20 + 1, 0.5, None, "2", 10**400)),
        *((stored(session=one), "session") for one in (5, [], "\ud800", "x" * 70_000)),
        *((stored(tokens=one), "tokens") for one in (None, [1], [1, 2**32], [1, -1], [1, 1.5])),
        *((part(group=one), "group is") for one in (-1, 2**16, "1", None)),
        *((part(size=one), "size is") for one in (-1, 2**20 + 1, "2")),
        *((part(window=one), "window is") for one in (0, -1, "2")),
        *((part(kind=one), "kind") for one in (5, "\ud800")),
        *((part(blocks=one), "blocks is") for one in (None, {}, 5)),
        *((stored(blocks=one), "blocks is") for one in (None, {}, "ab", 5)),
        ('{"metrics": {"prompt_tokens": -1}}', "prompt_tokens is -1"),
        ('{"metrics": {"prompt_tokens": 1e999}}', "prompt_tokens is inf"),
        ("[" * 10**5, "no JSON object"),
        ("1" * 5000, "no JSON object"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_line_that_cannot_be_is_named(tmp_path, line, said):
    path = recorded(tmp_path / "rec")
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(ConfigError, match=f"line 7: .*{said}"):
        list(read_recording(path))


def test_another_version_is_refused(tmp_path):
    path = tmp_path / "rec"
    path.write_text('{"recording": "kvtrie events", "version": 9}\n')
    with pytest.raises(ConfigError, match="version 9, 1 wanted"):
        list(read_recording(path))


def test_a_window_without_a_stored_block_is_refused():
    with pytest.raises(ConfigError, match="no block was stored"):
        window_of([Batch(0, 0.0)])
