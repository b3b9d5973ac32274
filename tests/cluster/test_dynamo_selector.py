"""A selector over Dynamo's selection service: live machines, own counts, probes, reservations."""

from __future__ import annotations

import threading

import pytest
from fake_services import (
    ANSWERS_THAT_ARE_LATE,
    ANSWERS_THAT_ARE_NONE,
    ANSWERS_THAT_END,
    FakeIndexer,
    FakeSelectionService,
    silent,
)

from kvtrie import ConfigError, KvtrieError, NoMachineError
from kvtrie.cluster import DynamoSelector, Held, Index, Load, Selector

TOKENS = list(range(40))
QUICK_S = 0.1


@pytest.fixture
def service(closing):
    return closing(FakeSelectionService(2, 1, 3))


@pytest.fixture
def selector(service, closing, clock):
    return closing(DynamoSelector(service.url, deadline_s=5, clock=clock))


def events(machine):
    return f"tcp://10.0.0.{machine}:5557"


def with_machines(selector, *machines):
    for machine in machines:
        selector.add(machine, events=events(machine))
    return selector


def test_the_service_chooses_and_gets_each_step_of_a_request(selector, service):
    assert isinstance(selector, Selector)
    with_machines(selector, 1, 2, 3)
    assert selector.pick("a", TOKENS, expected_output=7) == 2
    method, path, body = service.calls[-1]
    name = body.pop("selection_id")
    assert (method, path) == ("POST", "/select_and_reserve")
    assert body == {
        "token_ids": TOKENS,
        "model_name": "default",
        "expected_output_tokens": 7,
        "allowed_worker_ids": [1, 2, 3],
    }
    assert service.reserved == {name: 2}
    selector.prefilled("a")
    assert service.calls[-1] == ("POST", f"/reservations/{name}/prefill_complete", None)
    selector.done("a")
    assert service.calls[-1] == ("DELETE", f"/reservations/{name}", None)
    assert service.reserved == {}
    stats = selector.stats()
    assert stats.picks == {"selected": 1}
    assert stats.requests == {1: 0, 2: 0, 3: 0}
    assert stats.calls == {"ok": 6}


def test_a_machine_is_registered_with_its_endpoints(selector, service):
    selector.add(4, events=events(4), replay="tcp://10.0.0.4:5558")
    found = service.workers[4]
    assert found["kv_events_endpoint"] == events(4)
    assert found["replay_endpoint"] == "tcp://10.0.0.4:5558"
    assert (found["block_size"], found["endpoint"]) == (16, "machine:4")
    selector.remove(4)
    assert service.workers == {}


def test_the_service_is_an_index_with_loads_too(selector, service):
    assert isinstance(selector, Index)
    assert selector.match(TOKENS, deadline_s=5) == {}
    with_machines(selector, 1, 2)
    service.held = {1: (1, 2, 2), 2: (0, 0, 1), 9: (2, 2, 2)}
    assert selector.match(TOKENS, deadline_s=5) == {1: Held(1, 2, 2), 2: Held(0, 0, 1)}
    assert service.calls[-1][:2] == ("POST", "/overlap_scores")
    selector.pick("a", TOKENS)
    selector.pick("b", TOKENS)
    assert selector.loads(deadline_s=5) == {1: Load(0, 7, 3), 2: Load(2, 7, 3)}
    service.held = {1: (3, 3, 3)}  # more blocks than the prompt has
    assert selector.match(TOKENS, deadline_s=5) == {}
    service.hostile = silent
    assert selector.loads(deadline_s=QUICK_S) == {}
    calls = selector.stats().calls
    assert (calls["invalid"], calls["late"]) == (1, 1)
    for wrong in (0, "1"):
        with pytest.raises(ConfigError, match="deadline_s is"):
            selector.loads(deadline_s=wrong)


def test_a_machine_that_left_is_not_picked_though_the_service_has_it(selector, service):
    with_machines(selector, 1, 2)
    selector.remove(2)
    service.workers[2] = service.workers[1] | {"worker_id": 2}
    assert selector.pick("a", TOKENS) == 1
    service.answer = lambda *call: (200, {"selection_id": call[2]["selection_id"], "worker_id": 2})
    assert selector.pick("b", TOKENS) == 1
    assert selector.stats().picks == {"selected": 1, "invalid": 1}


def test_without_an_answer_the_least_loaded_machine_is_picked(selector, service):
    with_machines(selector, 3, 1, 2)
    service.stop()
    assert [selector.pick(str(at), TOKENS) for at in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    selector.done("1")
    selector.done("4")
    assert selector.pick("x", TOKENS) == 2
    assert selector.stats().picks == {"unreachable": 3, "open": 5}
    assert selector.stats().requests == {1: 3, 2: 1, 3: 2}


@pytest.mark.parametrize("name", ANSWERS_THAT_ARE_LATE | ANSWERS_THAT_END)
def test_an_answer_that_does_not_come_is_counted(name, service, closing, clock):
    selector = closing(DynamoSelector(service.url, deadline_s=QUICK_S, clock=clock))
    with_machines(selector, 1, 2)
    service.hostile = (ANSWERS_THAT_ARE_LATE | ANSWERS_THAT_END)[name]
    assert selector.pick("a", TOKENS) == 1
    outcome = "late" if name in ANSWERS_THAT_ARE_LATE else "unreachable"
    assert selector.stats().picks == {outcome: 1}
    service.hostile = None
    assert selector.pick("b", TOKENS) == 2
    selector.done("a")  # the service may have reserved it
    selector.done("b")
    assert service.reserved == {}


@pytest.mark.parametrize("name", ANSWERS_THAT_ARE_NONE)
def test_a_wrong_answer_is_counted_while_running(name, selector, service):
    with_machines(selector, 1, 2)
    service.hostile = ANSWERS_THAT_ARE_NONE[name]
    assert selector.pick("a", TOKENS) == 1
    assert selector.stats().picks == {"invalid": 1}


@pytest.mark.parametrize("name", ANSWERS_THAT_ARE_NONE)
def test_a_wrong_answer_is_an_error_at_construction(name, service):
    service.hostile = ANSWERS_THAT_ARE_NONE[name]
    with pytest.raises(ConfigError, match="is not Dynamo's selection service"):
        DynamoSelector(service.url, deadline_s=1)


@pytest.mark.parametrize(
    "answer",
    [
        {"selection_id": "another", "worker_id": 2},
        {"worker_id": 2},
        {"selection_id": True},
        {"selection_id": True, "worker_id": "2"},
        {"selection_id": True, "worker_id": 2.0},
        {"selection_id": True, "worker_id": 9},
        [],
        None,
    ],
)
def test_a_choice_that_cannot_be_is_counted(answer, selector, service):
    with_machines(selector, 1, 2)

    def answered(_, __, body):
        own = isinstance(answer, dict) and answer.get("selection_id") is True
        return 200, answer | {"selection_id": body["selection_id"]} if own else answer

    service.answer = answered
    assert selector.pick("a", TOKENS) == 1
    assert selector.stats().picks == {"invalid": 1}


def test_no_live_machine_is_an_error(selector, clock):
    with pytest.raises(NoMachineError, match="the last request failed on each of 0"):
        selector.pick("a", TOKENS)
    with_machines(selector, 1)
    selector.pick("a", TOKENS)
    selector.done("a", failed=True)
    with pytest.raises(KvtrieError, match="the last request failed on each of 1"):
        selector.pick("b", TOKENS)
    clock.seconds(1)
    assert selector.pick("b", TOKENS) == 1
    selector.done("b")
    assert selector.stats().picks == {"selected": 1, "probe": 1}


def test_a_machine_whose_last_request_failed_gets_one_probe_at_a_time(selector, service, clock):
    with_machines(selector, 1, 2, 3)
    assert selector.pick("a", TOKENS) == 2
    assert selector.pick("b", TOKENS) == 2
    selector.done("a", failed=True)
    assert [selector.pick(f"c{at}", TOKENS) for at in range(3)] == [1, 1, 1]
    assert service.calls[-1][2]["allowed_worker_ids"] == [1, 3]
    clock.seconds(1)
    assert selector.pick("probe", TOKENS) == 2
    assert selector.pick("d", TOKENS) == 1
    selector.done("probe", failed=True)
    clock.seconds(1)
    assert selector.pick("e", TOKENS) == 1  # the next probe is after 2 s
    clock.seconds(1)
    assert selector.pick("second", TOKENS) == 2
    selector.done("second")
    assert selector.pick("f", TOKENS) == 2
    assert selector.stats().picks == {"selected": 8, "probe": 2}


def test_a_request_in_flight_that_ends_well_makes_its_machine_live(selector):
    with_machines(selector, 1, 2)
    assert (selector.pick("a", TOKENS), selector.pick("b", TOKENS)) == (2, 2)
    selector.done("a", failed=True)
    assert selector.pick("c", TOKENS) == 1
    selector.done("b")
    assert selector.pick("d", TOKENS) == 2


def test_a_request_does_not_probe_the_machine_that_it_failed_on(selector, clock):
    with_machines(selector, 1, 2)
    assert selector.pick("a", TOKENS) == 2
    assert selector.pick("b", TOKENS) == 2
    selector.done("b", failed=True)
    clock.seconds(1)
    selector.done("a", failed=True)
    assert selector.pick("a", TOKENS) == 1  # its second attempt
    assert selector.pick("b", TOKENS) == 1
    selector.done("a")
    assert selector.pick("a", TOKENS) == 2  # it ended well since


def test_a_machine_that_is_added_again_is_live(selector):
    with_machines(selector, 1)
    selector.pick("a", TOKENS)
    selector.done("a", failed=True)
    with_machines(selector, 1)
    assert selector.pick("b", TOKENS) == 1
    selector.pick("old", TOKENS)
    selector.remove(1)
    with_machines(selector, 1)
    selector.done("old", failed=True)  # of the engine before
    assert selector.pick("c", TOKENS) == 1


def test_unknown_requests_are_ignored_and_counted(selector, service):
    with_machines(selector, 1)
    selector.done("a")
    selector.done("a", failed=True)
    selector.prefilled("a")
    selector.pick("a", TOKENS)
    selector.done("a")
    selector.done("a", failed=True)
    assert selector.stats().unknown == 4
    assert selector.pick("b", TOKENS) == 1
    assert len(service.reserved) == 1


def test_an_id_in_flight_is_an_error(selector):
    with_machines(selector, 1)
    selector.pick("a", TOKENS)
    with pytest.raises(ConfigError, match="request_id 'a' is in flight: call done first"):
        selector.pick("a", TOKENS)
    selector.done("a")
    assert selector.pick("a", TOKENS) == 1


def test_more_requests_than_are_kept_count_as_ended(selector, service, monkeypatch):
    monkeypatch.setattr("kvtrie.cluster.machines.MOST_REQUESTS", 3)
    with_machines(selector, 1)
    for at in range(10):
        selector.pick(str(at), TOKENS)
    stats = selector.stats()
    assert (stats.forgotten, stats.requests) == (7, {1: 3})
    selector.done("9")
    selector.done("0")
    assert selector.stats().unknown == 1
    assert len(service.reserved) == 2


def test_a_probe_that_is_never_done_does_not_end_the_machine(selector, clock, monkeypatch):
    monkeypatch.setattr("kvtrie.cluster.machines.MOST_REQUESTS", 2)
    with_machines(selector, 1, 2)
    selector.pick("a", TOKENS)
    selector.done("a", failed=True)
    clock.seconds(1)
    assert selector.pick("lost", TOKENS) == 2
    assert [selector.pick(name, TOKENS) for name in "bcd"] == [1, 1, 2]


def test_releases_reach_the_service_after_it_was_away(selector, service, clock):
    with_machines(selector, 1, 2)
    for at in range(20):
        selector.pick(str(at), TOKENS)
    service.stop()
    for at in range(20):
        selector.prefilled(str(at))
        selector.done(str(at))
    assert len(service.reserved) == 20
    service.start()
    clock.seconds(10)
    for _ in range(6):
        selector.done("nothing")
    assert service.reserved == {}


def test_releases_that_wait_are_bounded_and_counted(selector, service, monkeypatch):
    monkeypatch.setattr("kvtrie.cluster.dynamo_selector._MOST_PENDING", 4)
    with_machines(selector, 1)
    for at in range(10):
        selector.pick(str(at), TOKENS)
    service.stop()
    for at in range(10):
        selector.done(str(at))
    assert selector.stats().unreleased == 6


def test_a_service_that_restarts_gets_the_machines_again(selector, service, clock):
    with_machines(selector, 1, 2)
    selector.pick("a", TOKENS)
    service.kill()
    assert selector.pick("b", TOKENS) == 1
    service.start()
    clock.seconds(10)
    assert selector.pick("c", TOKENS) == 2
    assert set(service.workers) == {1, 2}
    for name in "abc":
        selector.done(name)
    assert service.reserved == {}
    assert selector.stats().picks == {"selected": 2, "unreachable": 1}


def test_a_service_that_lost_its_machines_gets_them_with_the_second_call(selector, service):
    with_machines(selector, 1, 2)
    service.forget()
    assert selector.pick("a", TOKENS) == 1
    assert selector.pick("b", TOKENS) == 2
    assert selector.stats().picks == {"refused": 1, "selected": 1}


def test_one_thread_registers_again_and_the_others_go_on(service, closing, clock):
    selector = with_machines(
        closing(DynamoSelector(service.url, deadline_s=5, clock=clock)), 1, 2, 3
    )
    service.forget()
    selector.pick("first", TOKENS)
    picked = {}

    def pick(name):
        picked[name] = selector.pick(name, TOKENS)

    threads = [threading.Thread(target=pick, args=(str(at),)) for at in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(picked) == 16
    assert service.paths().count("/workers") == 6  # three at first, and three again
    assert selector.pick("last", TOKENS) == 2
    for name in [*picked, "first", "last"]:
        selector.done(name)
    assert selector.stats().requests == {1: 0, 2: 0, 3: 0}


def test_counts_are_exact_under_threads(service, closing, clock):
    selector = with_machines(
        closing(DynamoSelector(service.url, deadline_s=5, clock=clock)), 1, 2, 3
    )
    service.stop()

    refused = []

    def work(thread):
        for at in range(200):
            name = f"{thread}-{at}"
            try:
                selector.pick(name, TOKENS)
            except NoMachineError:
                refused.append(name)
                clock.seconds(100)
                continue
            selector.done(name, failed=at % 50 == 49)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = selector.stats()
    assert stats.requests == {1: 0, 2: 0, 3: 0}
    assert sum(stats.picks.values()) + len(refused) == 1200


def test_a_service_that_hangs_delays_no_request_for_long(service, closing, clock):
    selector = closing(DynamoSelector(service.url, deadline_s=QUICK_S, clock=clock))
    with_machines(selector, 1)
    service.hostile = silent
    for at in range(50):
        selector.pick(str(at), TOKENS)
        selector.done(str(at))
    stats = selector.stats()
    # The breaker opens at the third late call: a request for the workers was one of them.
    assert (stats.breaker, stats.picks) == ("open", {"late": 2, "open": 48})


def test_other_services_are_refused(closing):
    other = closing(FakeIndexer())
    with pytest.raises(ConfigError, match="is not Dynamo's selection service: GET /loads: 404"):
        DynamoSelector(other.url, deadline_s=1)
    other.answer = lambda *_: (200, [{"model_name": "default", "tenant_id": "x", "loads": []}])
    with pytest.raises(ConfigError, match="has no field routing_group"):
        DynamoSelector(other.url, deadline_s=1)


def test_a_machine_that_the_service_cannot_use_is_an_error(service, closing):
    selector = closing(DynamoSelector(service.url, deadline_s=1, block_tokens=32))
    with pytest.raises(ConfigError, match=r"refuses machine 1: .*block_size mismatch: 32"):
        selector.add(1, events=events(1))
    with pytest.raises(NoMachineError):
        selector.pick("a", TOKENS)


def test_bad_arguments_are_errors(selector, service):
    with_machines(selector, 1)
    for wrong in (0, -1, float("nan"), "1", None):
        with pytest.raises(ConfigError, match="deadline_s is"):
            DynamoSelector(service.url, deadline_s=wrong)
    for wrong in ("", 3, None, "\ud800", "x" * 70_000):
        with pytest.raises(ConfigError, match="request_id"):
            selector.pick(wrong, TOKENS)
        with pytest.raises(ConfigError, match="request_id"):
            selector.done(wrong)
    for wrong in (-1, 1.5, 2**32, "1"):
        with pytest.raises(ConfigError, match="expected_output"):
            selector.pick("a", TOKENS, expected_output=wrong)
    with pytest.raises(ConfigError, match="tokens"):
        selector.pick("a", "text")
    with pytest.raises(ConfigError, match="failed is 1"):
        selector.done("a", failed=1)
    with pytest.raises(ConfigError, match="machine is 9, which was not added"):
        selector.remove(9)
    assert selector.stats().picks == {}
