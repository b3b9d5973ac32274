"""An index over Dynamo's indexer: blocks by machine, registrations, and answers that are none."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from fake_services import (
    ANSWERS_THAT_ARE_LATE,
    ANSWERS_THAT_ARE_NONE,
    ANSWERS_THAT_END,
    FakeIndexer,
    FakeSelectionService,
)

from kvtrie import ConfigError
from kvtrie.cluster import DynamoIndex, Held, Index

TOKENS = list(range(100))
EVENTS = "tcp://10.0.0.1:5557"
QUICK_S = 0.1


@pytest.fixture
def service(closing):
    return closing(FakeIndexer())


@pytest.fixture
def index(service, closing, clock):
    return closing(DynamoIndex(service.url, clock=clock))


def match(index, seconds=5.0):
    return index.match(TOKENS, deadline_s=seconds)


def test_a_match_is_in_blocks_of_each_machine(index, service):
    assert isinstance(index, Index)
    assert match(index) == {}
    index.add(1, events=EVENTS, replay="tcp://10.0.0.1:5558")
    index.add(2, events="tcp://[fd00::2]:5557")
    service.held = {1: (32, 80, 96), 2: (0, 31, 0)}
    assert match(index) == {1: Held(gpu=2, host=5, disk=6), 2: Held(gpu=0, host=1, disk=1)}
    assert service.workers[1] == {
        "instance_id": 1,
        "model_name": "default",
        "block_size": 16,
        "endpoint": EVENTS,
        "replay_endpoint": "tcp://10.0.0.1:5558",
    }
    assert service.calls[-1] == ("POST", "/query", {"token_ids": TOKENS, "model_name": "default"})
    assert index.stats().calls == {"ok": 3}


@pytest.mark.parametrize("tokens", [np.arange(100, dtype=np.uint32), tuple(TOKENS), range(100)])
def test_a_prompt_is_any_sequence_of_integers(tokens, index, service):
    index.add(1, events=EVENTS)
    index.match(tokens, deadline_s=5)
    assert service.calls[-1][2]["token_ids"] == TOKENS
    assert index.match([], deadline_s=5) == {}


def test_a_machine_that_left_is_not_matched_though_the_service_has_it(index, service):
    index.add(1, events=EVENTS)
    index.add(2, events=EVENTS)
    service.held = {1: (16, 16, 16), 2: (16, 16, 16), 7: (16, 16, 16)}
    index.remove(1)
    assert 1 not in service.workers
    service.held[1] = (16, 16, 16)
    assert set(match(index)) == {2}


def test_adding_again_keeps_a_registration_with_the_same_endpoint(index, service):
    index.add(1, events=EVENTS)
    service.held = {1: (16, 16, 16)}
    index.add(1, events=EVENTS)
    assert match(index) == {1: Held(1, 1, 1)}
    index.add(1, events="tcp://10.0.0.9:1")
    assert service.workers[1]["endpoint"] == "tcp://10.0.0.9:1"
    assert match(index) == {}


def test_a_service_that_restarts_gets_the_machines_again(index, service, clock):
    index.add(1, events=EVENTS)
    index.add(2, events=EVENTS)
    match(index)
    service.kill()
    assert match(index) == {}
    index.remove(2)  # does not raise: the service is told later
    assert index.stats().calls["unreachable"] == 2
    service.start()
    clock.seconds(10)
    assert match(index) == {}
    assert set(service.workers) == {1}
    service.held = {1: (16, 16, 16)}
    assert match(index) == {1: Held(1, 1, 1)}


def test_a_service_that_lost_its_machines_gets_them_with_the_second_call(index, service):
    index.add(1, events=EVENTS)
    service.forget()
    assert match(index) == {}  # 404: it knows no such model
    assert index.stats().calls["refused"] == 1
    assert match(index) == {}
    assert set(service.workers) == {1}
    before = len(service.calls)
    match(index)
    assert len(service.calls) == before + 1  # no further question


def test_a_removal_that_failed_is_made_up_for(index, service, clock):
    index.add(1, events=EVENTS)
    index.add(2, events=EVENTS)
    service.stop()
    index.remove(2)
    service.start()
    clock.seconds(10)
    match(index)
    assert set(service.workers) == {1}


def test_a_machine_added_while_the_service_is_away_is_registered_later(service, closing, clock):
    service.stop()
    index = closing(DynamoIndex(service.url, clock=clock))  # a warning, no error
    index.add(1, events=EVENTS)
    service.start()
    clock.seconds(10)
    match(index)
    assert set(service.workers) == {1}


@pytest.mark.parametrize("name", ANSWERS_THAT_ARE_NONE)
def test_a_wrong_answer_is_a_counted_miss_while_running(name, index, service):
    index.add(1, events=EVENTS)
    service.held = {1: (16, 16, 16)}
    service.hostile = ANSWERS_THAT_ARE_NONE[name]
    assert match(index) == {}
    assert index.stats().calls == {"ok": 1, "invalid": 1}
    service.hostile = None
    assert match(index) == {1: Held(1, 1, 1)}


@pytest.mark.parametrize("name", ANSWERS_THAT_ARE_NONE)
def test_a_wrong_answer_is_an_error_at_construction(name, service):
    service.hostile = ANSWERS_THAT_ARE_NONE[name]
    with pytest.raises(ConfigError, match="is not Dynamo's indexer"):
        DynamoIndex(service.url)


@pytest.mark.parametrize("name", ANSWERS_THAT_ARE_LATE | ANSWERS_THAT_END)
def test_an_answer_that_does_not_come_is_a_counted_miss(name, index, service):
    index.add(1, events=EVENTS)
    service.hostile = (ANSWERS_THAT_ARE_LATE | ANSWERS_THAT_END)[name]
    assert match(index, QUICK_S) == {}
    outcome = "late" if name in ANSWERS_THAT_ARE_LATE else "unreachable"
    assert index.stats().calls[outcome] == 1


@pytest.mark.parametrize(
    "counts",
    [
        {"gpu": -16, "cpu": 0, "disk": 0},
        {"gpu": 101, "cpu": 101, "disk": 101},  # more than the prompt has
        {"gpu": 1.5, "cpu": 0, "disk": 0},
        {"gpu": True, "cpu": 0, "disk": 0},
        {"gpu": "16", "cpu": 0, "disk": 0},
        {"gpu": 16},
        [],
        None,
    ],
)
def test_counts_that_cannot_be_are_a_counted_miss(counts, index, service):
    index.add(1, events=EVENTS)
    service.answer = lambda *_: (200, {"instances": {"1": counts}})
    assert match(index) == {}
    assert index.stats().calls["invalid"] == 1


@pytest.mark.parametrize("key", ["", "-1", "x", "9" * 400, "²"])
def test_a_machine_that_is_no_number_is_a_counted_miss(key, index, service):
    index.add(1, events=EVENTS)
    service.answer = lambda *_: (200, {"instances": {key: {"gpu": 0, "cpu": 0, "disk": 0}}})
    assert match(index) == {}
    assert index.stats().calls["invalid"] == 1


def test_after_three_failures_the_service_is_asked_once_a_second(index, service, clock):
    index.add(1, events=EVENTS)
    service.stop()
    for _ in range(5):
        match(index)
    assert index.stats().calls == {"ok": 1, "unreachable": 3, "open": 2}
    assert index.stats().breaker == "open"
    service.start()
    clock.seconds(1)
    service.held = {1: (16, 16, 16)}
    assert match(index) == {1: Held(1, 1, 1)}
    assert index.stats().breaker == "closed"


def test_an_older_indexer_is_refused(service):
    service.answer = lambda *_: (404, {"error": "no indexer for model=default tenant_id=default"})
    with pytest.raises(ConfigError, match=r"is not Dynamo's indexer.*tenant_id"):
        DynamoIndex(service.url)


def test_the_selection_service_is_no_indexer(closing):
    other = closing(FakeSelectionService())
    with pytest.raises(ConfigError, match="is not Dynamo's indexer: POST /query: 404"):
        DynamoIndex(other.url)


def test_a_block_size_that_the_service_refuses_is_an_error(service, closing):
    index = closing(DynamoIndex(service.url, block_tokens=32))
    with pytest.raises(ConfigError, match=r"refuses machine 1: .*block_size mismatch: 32"):
        index.add(1, events=EVENTS)
    assert match(index) == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"machine": -1}, "machine is -1, 0 to"),
        ({"machine": "a"}, "machine is 'a'"),
        ({"events": "10.0.0.1:5557"}, "events is '10.0.0.1:5557', tcp://HOST:PORT wanted"),
        ({"events": "tcp://*:5557"}, "tcp://HOST:PORT wanted"),
        ({"events": "tcp://host:0"}, "tcp://HOST:PORT wanted"),
        ({"events": "tcp://host:²"}, "tcp://HOST:PORT wanted"),
        ({"replay": 3}, "replay is 3"),
    ],
)
def test_a_bad_machine_is_an_error_and_is_not_added(arguments, said, index, service):
    given = {"machine": 1, "events": EVENTS, **arguments}
    with pytest.raises(ConfigError, match=said):
        index.add(given.pop("machine"), **given)
    assert "/register" not in service.paths()


def test_bad_arguments_are_errors(index, service):
    for wrong in (0, -1, float("nan"), "1", None, 1e9):
        with pytest.raises(ConfigError, match="deadline_s is"):
            index.match(TOKENS, deadline_s=wrong)
    for wrong in ("abc", 3, [1.5], [-1], [2**32], [[1]], ["a"], [2**70], iter([1]), [True, False]):
        with pytest.raises(ConfigError, match="tokens"):
            index.match(wrong, deadline_s=1)
    with pytest.raises(ConfigError, match="machine is 3, which was not added"):
        index.remove(3)
    for wrong in ({"model": 3}, {"block_tokens": 0}, {"block_tokens": 1.5}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            DynamoIndex(service.url, **wrong)


def test_threads_get_their_own_answers(index, service):
    index.add(1, events=EVENTS)
    answer = service.answer

    def by_tokens(method, path, body):
        if path == "/query":
            service.held = {}
            counts = {"gpu": body["token_ids"][0], "cpu": 0, "disk": 0}
            return 200, {"instances": {"1": counts}}
        return answer(method, path, body)

    service.answer = by_tokens
    wrong = []

    def ask(thread):
        for at in range(20):
            size = 16 * (thread + 8 * at + 1)
            found = index.match([size] * size, deadline_s=5)
            if found != {1: Held(*[size // 16] * 3)}:
                wrong.append((thread, at, found))

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
