"""A listener gets each batch once and in order, and says what is wrong with a stream."""

from itertools import islice

import pytest
from publishing import message, publishing, stored

from kvtrie.advise.listen import Listener, listening
from kvtrie.errors import ConfigError


def one(number):
    return message(number, float(number), [stored([number], None)])


def numbers(batches, most):
    return [batch.number for batch in islice(batches, most)]


class Script:
    """A socket that has some messages and then none."""

    def __init__(self, *messages):
        self.messages = list(messages)

    def poll(self, _):
        return bool(self.messages)

    def recv_multipart(self):
        return self.messages.pop(0)


class History(Script):
    """A replay socket of a server that has published some messages."""

    def __init__(self, *messages):
        super().__init__()
        self.all = messages
        self.asked = []

    def send_multipart(self, frames):
        first = int.from_bytes(frames[1], "big")
        self.asked.append(first)
        self.messages += [[b"", *row] for row in self.all if int.from_bytes(row[1], "big") >= first]
        self.messages.append([b"", b"", b"\xff" * 8, b""])


def ticks():
    return iter(range(1000)).__next__


def listener(script, history=None, **more):
    return Listener(script, history, "tcp://host:5557", clock=ticks(), **more)


def test_history_then_stream_without_repeats(tmp_path):
    history = [one(number) for number in range(3)]
    with (
        publishing(tmp_path, history) as (events, replay, stream),
        listening(events, replay, patience_s=30) as heard,
    ):
        stream.recv()
        for number in range(2, 5):
            stream.send_multipart(one(number))
        history += [one(3)]
        found = numbers(heard.history(), 9)
        found += numbers(heard.live(30), 5 - len(found))
    assert found == [0, 1, 2, 3, 4]
    assert heard.lost == 0


def test_a_gap_is_filled_from_the_history():
    history = History(*(one(number) for number in range(8)))
    heard = listener(Script(one(1), one(5), one(6), one(7), one(8)), history)
    assert numbers(heard.live(9), 9) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert history.asked == [2]
    assert heard.lost == 0


def test_a_gap_without_history_shows_in_the_numbers():
    heard = listener(Script(one(1), one(5)))
    assert numbers(heard.live(5), 9) == [1, 5]
    assert heard.lost == 3


def test_a_stream_that_published_nothing_is_named():
    with pytest.raises(ConfigError, match=r"tcp://host:5557 published nothing in 10 s.*tcp://\*"):
        numbers(listener(Script()).live(None), 1)


def test_a_quiet_stream_after_a_history_ends_in_time():
    heard = listener(Script(), History(one(0)))
    assert numbers(heard.history(), 9) == [0]
    assert numbers(heard.live(50), 9) == []


def test_a_listener_that_loses_too_much_is_named():
    with pytest.raises(ConfigError, match="high-water mark"):
        numbers(listener(Script(one(0), one(500))).live(9), 9)


def test_a_replay_endpoint_that_does_not_answer_is_named():
    class Silent(Script):
        def send_multipart(self, _):
            pass

    with pytest.raises(ConfigError, match="did not answer in 10 s"):
        numbers(listener(Script(), Silent()).history(), 1)


@pytest.mark.parametrize("address", ["tcp://host", "host:5557", "udp://host:5557"])
def test_an_address_that_cannot_be_is_refused(address):
    with pytest.raises(ConfigError, match="cannot connect to"), listening(address):
        pass
