"""Calls over HTTP: one deadline for the whole call, bounded answers, kept connections."""

from __future__ import annotations

import threading
import time

import pytest
from fake_services import (
    ANSWERS_THAT_ARE_LATE,
    ANSWERS_THAT_END,
    FakeService,
    raw,
    with_body,
)

from kvtrie import ConfigError
from kvtrie.cluster.http_client import CallError, HttpClient
from kvtrie.cluster.service import seconds_from_now

LATE_S = 0.15


@pytest.fixture
def service(closing):
    return closing(FakeService())


@pytest.fixture
def client(service, closing):
    return closing(HttpClient(service.url))


def call(client, seconds=5.0):
    return client.call("POST", "/echo", {"a": [1, 2]}, seconds_from_now(seconds))


def test_a_call_sends_json_and_returns_json(client, service):
    assert call(client) == {"method": "POST", "path": "/echo", "body": {"a": [1, 2]}}
    until = seconds_from_now(5)
    assert client.call("GET", "/x?y=z", None, until)["body"] is None
    assert service.calls[-1] == ("GET", "/x?y=z", None)


def test_connections_are_kept_one_per_thread_that_calls_at_once(client, service):
    for _ in range(5):
        call(client)
    assert len(service.connections) == 1
    threads = [threading.Thread(target=call, args=(client,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made = len(service.connections)
    assert made <= 8
    call(client)
    assert len(service.connections) == made


@pytest.mark.parametrize("name", ANSWERS_THAT_ARE_LATE)
def test_a_call_ends_by_its_deadline_whatever_comes(name, client, service):
    service.hostile = ANSWERS_THAT_ARE_LATE[name]
    began = time.monotonic()
    with pytest.raises(CallError, match="late: POST /echo: no answer by the deadline") as caught:
        call(client, LATE_S)
    assert caught.value.outcome == "late"
    assert time.monotonic() - began >= LATE_S
    service.hostile = None  # its connection is not used again
    assert call(client)["path"] == "/echo"


def test_a_deadline_that_has_passed_makes_no_call(client, service):
    with pytest.raises(CallError, match="late"):
        call(client, -1)
    assert service.calls == []


@pytest.mark.parametrize("name", ANSWERS_THAT_END)
def test_an_answer_that_ends_early_is_unreachable(name, client, service):
    service.hostile = ANSWERS_THAT_END[name]
    with pytest.raises(CallError) as caught:
        call(client)
    assert caught.value.outcome == "unreachable"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (raw("hello\r\n\r\n"), "invalid: POST /echo: BadStatusLine"),
        (with_body("{"), "invalid: POST /echo: no JSON"),
        (with_body("[" * 100_000), "invalid: POST /echo: no JSON"),
        (with_body(b" " * (5 << 20)), "an answer of more than 4194304 bytes"),
        (with_body("no", "503 Busy"), "refused: POST /echo: 503 no"),
        (raw("HTTP/1.1 302 Found\r\nlocation: http://x\r\ncontent-length: 0\r\n\r\n"), "refused"),
    ],
)
def test_an_answer_without_success_is_named(answer, said, client, service):
    service.hostile = answer
    with pytest.raises(CallError, match=said):
        call(client)


def test_bytes_after_an_answer_are_not_the_next_answer(client, service):
    asked, sent = threading.Event(), threading.Event()

    def answered_twice(handler):
        one = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n"
        handler.wfile.write(one + b"1")
        asked.wait(30)
        handler.wfile.write(one + b"2")
        sent.set()
        return "keep"

    service.hostile = answered_twice
    assert call(client) == 1
    service.hostile = None
    asked.set()
    assert sent.wait(30)
    assert call(client)["path"] == "/echo"


def test_a_kept_connection_that_the_service_closed_is_replaced(client, service):
    call(client)
    service.stop()
    service.start()
    breaks = client.breaks
    assert call(client)["path"] == "/echo"
    assert client.breaks == breaks + 1  # it may have restarted


def test_a_service_that_is_gone_is_unreachable(client, service):
    service.stop()
    with pytest.raises(CallError) as caught:
        call(client)
    assert caught.value.outcome == "unreachable"
    service.start()
    assert call(client)["path"] == "/echo"


def test_a_name_that_resolves_slowly_is_late(monkeypatch, closing):
    over = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: over.wait(30) and [])
    client = closing(HttpClient("http://service.example:1"))
    with pytest.raises(CallError, match="late"):
        call(client, LATE_S)
    over.set()
    with pytest.raises(CallError, match=r"service\.example has no address"):
        call(client)


def test_a_path_of_the_url_goes_before_that_of_the_call(service, closing):
    client = closing(HttpClient(service.url + "/index/"))
    assert call(client)["path"] == "/index/echo"


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8090",
        "tcp://localhost:1",
        "http://",
        "http://user:secret@host:1",
        "http://host:1/?a=b",
        "http://host:1/#a",
        "http://host:99999",
        "http://host:1/a b",
        "http://host:1/\n",
        "http://höst:1",
        3,
        None,
    ],
)
def test_a_url_that_is_none_of_a_service_is_refused(url):
    with pytest.raises(ConfigError, match="url ") as caught:
        HttpClient(url)
    assert "secret" not in str(caught.value)
