"""Causes of computed tokens: each token is counted once, and nothing waits for a comparison."""

import random
import threading

import numpy as np
import pytest

from kvtrie import BlockManager, ModelShape, Scope, Tier
from kvtrie.engines.server import why as module
from kvtrie.engines.server.why import Admitted, MissCounter

SIZE = 16
TEXT = np.arange(1000, 1400, dtype=np.uint32)
SECOND = 10**9


def make_manager(blocks=256):
    shape = ModelShape(layers=1, kv_heads=1, head_dim=4)
    return BlockManager(shape, [Tier("gpu", blocks=blocks)], block_tokens=SIZE, explain=True)


def make_counter(manager=None, min_tokens=0, per_second=20):
    return MissCounter(manager or make_manager(), min_tokens=min_tokens, per_second=per_second)


def store(manager, tokens, now=1, scope=None, session=None):
    with manager.acquire(tokens, now=now, scope=scope, session=session, keep=0) as lease:
        lease.commit(tokens[lease.matched :], now=now)
        lease.release(now=now)


def request(name, tokens, start=0, **more):
    return Admitted(name, tokens, more.pop("scope", Scope()), **more), start


def inserted(at, token):
    return np.insert(TEXT, at, token).astype(np.uint32)


def new_after(at):
    return np.concatenate([TEXT[:at], np.arange(9000, 9300)]).astype(np.uint32)


def test_a_break_and_a_new_conversation_differ_in_their_cause():
    manager = make_manager()
    store(manager, TEXT, session="chat")
    why = make_counter(manager)
    why.admitted(*request("break", inserted(37, 7), 32, session="chat"), SECOND)
    why.admitted(*request("new", new_after(37), 32), SECOND)
    why.drain()
    assert why.tokens == {"diverged": 368, "not cacheable": 1 + 1, "new": 304}
    (first,) = why.summary()["breakers"]
    assert (first["position"], first["recurring"], first["requests"]) == (37, 363, 1)
    assert first["before"] == TEXT[:37].tolist()
    assert first["cached"] == TEXT[37:101].tolist()
    assert first["asked"] == [7, *TEXT[37:100].tolist()]
    assert (first["session"], first["cached_session"]) == ("chat", "chat")
    assert why.line() == "top breaker: 363 recurring tokens computed after token 37 by 1 requests"
    why.close()


def test_requests_beyond_the_rate_get_the_last_class_of_their_divergence_point():
    manager = make_manager()
    store(manager, TEXT)
    why = make_counter(manager, per_second=1)
    why.admitted(*request("other point", new_after(80), 80), SECOND)  # takes the rate
    why.drain()
    before = why.tokens.copy()
    why.admitted(*request("unknown point", inserted(37, 7), 32), SECOND)
    assert why.tokens - before == {"unclassified": 368, "not cacheable": 1}
    why.admitted(*request("compared", inserted(37, 8), 32), 2 * SECOND)
    why.drain()
    before = why.tokens.copy()
    why.admitted(*request("same point", inserted(37, 9), 32), 2 * SECOND)
    assert why.tokens - before == {"diverged": 368, "not cacheable": 1}
    assert why.answer("same point")["causes"] == [
        [32, 400, "diverged"],
        [400, 401, "not cacheable"],
    ]
    assert why.answer("unknown point")["causes"][0] == [32, 400, "unclassified"]
    why.close()


def test_small_requests_are_not_compared_unless_they_ask():
    manager = make_manager()
    store(manager, TEXT)
    why = make_counter(manager, min_tokens=400, per_second=10)
    why.admitted(*request("small", inserted(37, 7), 32), SECOND)
    assert why.tokens["unclassified"] == 368
    why.admitted(*request("asks", inserted(37, 7), 32, asked=True), SECOND)
    why.drain()
    assert why.tokens["diverged"] == 368
    assert why.answer("asks")["branches"][0]["recurring"] == 363
    assert why.answer("small")["branches"] == []
    why.close()


def test_a_full_queue_drops_comparisons_and_counts_every_token(monkeypatch):
    manager, let_go, begun = make_manager(), threading.Event(), threading.Event()
    store(manager, TEXT)
    why, compare = make_counter(manager, per_second=1000), MissCounter._compare

    def slow(self, explained, spans):
        begun.set()
        assert let_go.wait(60)
        compare(self, explained, spans)

    monkeypatch.setattr(MissCounter, "_compare", slow)
    for at in range(100):
        why.admitted(*request(str(at), inserted(37, at), 32), SECOND)
    assert begun.wait(60)
    assert why.answer("0") == {"state": "pending"}
    assert why.answer("99")["state"] == "explained"
    assert why.tokens["unclassified"] == 368 * why.dropped
    assert 66 <= why.dropped <= 68  # 32 wait, and one or none is being compared
    let_go.set()
    why.drain()
    assert sum(why.tokens.values()) == 369 * 100
    assert why.tokens["diverged"] == 368 * (100 - why.dropped)
    why.close()


def test_the_first_request_of_a_salt_says_so():
    manager = make_manager()
    store(manager, TEXT)
    why = make_counter(manager)
    for at, salt in enumerate([b"", b"a", b"a", b"b"]):
        why.admitted(*request(str(at), TEXT, 0, scope=Scope(tenant=salt)), SECOND)
    why.drain()
    details = [why.answer(str(at)).get("detail") for at in range(4)]
    assert details == [None, "first request of this salt", None, "first request of this salt"]
    assert why.first_salts == 2
    assert why.answer("1")["causes"] == [[0, 400, "new"]]
    why.close()


def test_the_last_256_requests_are_answered_by_id():
    why = make_counter(per_second=0)
    for at in range(300):
        why.admitted(*request(f"chatcmpl-{at}-0a1b2c3d", TEXT), SECOND)
    assert why.answer("chatcmpl-43-0a1b2c3d") is None
    assert why.answer("chatcmpl-44-0a1b2c3d")["computed"] == 400
    assert why.answer("chatcmpl-299")["computed"] == 400
    assert why.answer("chatcmpl-2999") is None


def test_names_of_any_length_take_a_bounded_memory():
    manager, long = make_manager(), "x" * 60_000
    why = make_counter(manager, per_second=0)
    for at in range(4):
        salt = f"{at}{long}".encode()
        why.admitted(*request(f"{at}{long}", TEXT, scope=Scope(tenant=salt, lora=long)), SECOND)
    assert why.answer(f"0{long}")["computed"] == 400
    assert why.first_salts == 4
    kept = [why._requests, why._salts, why._classes]
    assert max(len(name) for each in kept for name in each) <= 256
    why._classify(module._point(why.explain(request("", TEXT)[0], 400, SECOND)), "new")
    assert sum(map(len, *why._classes)) <= 64


@pytest.mark.parametrize("seed", range(8))
def test_every_computed_token_has_one_cause(seed):
    draw, manager = random.Random(seed), make_manager(blocks=40)
    why, computed, prompts = make_counter(manager, 40, 3), 0, [TEXT]
    for at in range(60):
        tail = [draw.randrange(9) for _ in range(draw.randint(0, 99))]
        base = TEXT[: draw.choice([0, 20, 64, 160])].tolist()
        tokens = np.array([*base, *tail] or [1], dtype=np.uint32)
        prompts.append(tokens if draw.random() < 0.6 else draw.choice(prompts))
        tokens = prompts[-1]
        found = manager.lookup(tokens, now=at, keep=1).tokens
        start = draw.randrange(found // SIZE + 1) * SIZE  # some requests do not wait for the rest
        why.admitted(*request(str(at), tokens, start, asked=draw.random() < 0.1), at * SECOND // 4)
        computed += len(tokens) - start
        store(manager, tokens, now=at)
        why.drain()
        last, answer = start, why.answer(str(at))
        assert answer["state"] == "explained"
        for first, end, _ in answer["causes"]:
            assert first == last < end
            last = end
        assert last == len(tokens)
    assert sum(why.tokens.values()) == computed
    assert {"not cacheable", "recomputed", "evicted"} <= set(why.tokens)
    why.close()


@pytest.mark.parametrize("polls", [0, 1200])
def test_all_threads_requests_are_counted_however_often_the_comparing_thread_ends(
    monkeypatch, polls
):
    monkeypatch.setattr(module, "_IDLE_POLLS", polls)
    manager = make_manager()
    store(manager, TEXT)
    why = make_counter(manager, per_second=10**6)

    def ask(first):
        for at in range(first, first + 50):
            why.admitted(*request(str(at), inserted(37, at), 32), SECOND)

    threads = [threading.Thread(target=ask, args=(1000 * at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    why.close()
    why.admitted(*request("after the close", inserted(37, 7), 32), SECOND)
    why.drain()
    assert sum(why.tokens.values()) == 369 * 201
    assert why.tokens["diverged"] + why.tokens["unclassified"] == 368 * 201
    assert why.tokens["unclassified"] <= 368 * why.dropped
    why.close()
    assert why._thread is None


def test_a_comparison_that_fails_ends_its_thread_and_not_the_next_comparison(monkeypatch):
    manager, compare = make_manager(), MissCounter._compare
    store(manager, TEXT)
    why, failures = make_counter(manager), []

    def fail(self, explained, spans):
        if not failures:
            raise MemoryError("injected")
        compare(self, explained, spans)

    monkeypatch.setattr(threading, "excepthook", failures.append)
    monkeypatch.setattr(MissCounter, "_compare", fail)
    why.admitted(*request("one", inserted(37, 7), 32), SECOND)
    why.close()
    why.admitted(*request("two", inserted(37, 7), 32), SECOND)
    why.drain()
    assert [failure.exc_type for failure in failures] == [MemoryError]
    assert why.tokens["diverged"] == 368
    why.close()
