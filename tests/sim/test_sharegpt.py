"""`readers.sharegpt`: conversations become requests in the order of time."""

import json

import pytest
from trace_files import CHATS, SECOND, chat, letters, plain, write

from kvtrie.errors import ConfigError
from kvtrie.sim.arrivals import Arrivals
from kvtrie.sim.readers.lines import Skipped
from kvtrie.sim.readers.sharegpt import in_turns, sharegpt_requests, words


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(CHATS),
        json.dumps(CHATS, indent=2),
        "\n".join(map(json.dumps, CHATS)),
    ],
)
def test_conversations_become_turns(tmp_path, text):
    path = write(tmp_path, text)
    arrivals = Arrivals("fixed", per_s=1).times(0)
    rows = plain(sharegpt_requests(path, arrivals, tokenize=letters, think_s=0))
    a, b, c, d, e, f, g, s = map(ord, "abcdefgs")
    assert rows == [
        (1 * SECOND, [a, b], 2, 3, "one"),
        (2 * SECOND, [a, b], 2, 3, "two"),
        (2 * SECOND, [a, b, c, d, e, f, g], 7, 1, "two"),
        (3 * SECOND, [s, s, a], 3, 1, None),
    ]


def test_turns_come_in_order_of_time(tmp_path):
    path = write(tmp_path, json.dumps([chat(str(n), *"abcdefgh") for n in range(50)]))
    rows = list(sharegpt_requests(path, Arrivals(per_s=1).times(3), think_s=20, seed=3))
    assert len(rows) == 200
    times = [each[0] for each in rows]
    assert times == sorted(times)
    assert times != [each[0] for each in sharegpt_requests(path, Arrivals().times(4), seed=4)]
    for session in {each[4] for each in rows}:
        lengths = [each[2] for each in rows if each[4] == session]
        assert lengths == sorted(lengths)
        assert len(lengths) == 4


def test_a_bad_conversation_is_named_with_its_line(tmp_path):
    good, bad = json.dumps(CHATS[0]), '{"conversations": [{"from": "human"}]}'
    path = write(tmp_path, f"[{good},\n{bad},\n{good}]")
    arrivals = Arrivals().times(0)
    with pytest.raises(ConfigError, match=r"line 2: conversations\[0\]\.value is None"):
        list(sharegpt_requests(path, arrivals))
    skipped = Skipped()
    assert len(list(sharegpt_requests(path, arrivals, skipped=skipped))) == 2
    assert skipped.lines == 1
    with pytest.raises(ConfigError, match="line 2: no JSON"):
        list(sharegpt_requests(write(tmp_path, f"[{good},\n{{"), arrivals, skipped=skipped))
    with pytest.raises(ConfigError, match="holds no request"):
        list(sharegpt_requests(write(tmp_path, "[]"), arrivals))


def test_words_are_equal_where_texts_are():
    assert words("Tell me more.") == words("Tell me more.")
    assert words("Tell me more.")[:3] == words("Tell me more, please")[:3]
    assert len(words("internationalisation of it")) == 6
    assert all(0 <= token < 2**32 for token in words("Grüße, 你好!"))


def test_conversations_without_a_name_are_distinct():
    turns = [(0, None, 1, 1, None), (0, None, 2, 1, None)]
    rows = in_turns(iter([turns, turns]), None, 0.0, 0)
    assert [session for *_, session in rows] == ["0", "0", "1", "1"]
