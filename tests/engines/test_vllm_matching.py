"""Waiting requests are looked up again only after a change, and get the answer of a lookup."""

import random

import pytest
from tests.engines.vllm_engine import SIZE, Engine, PlayedRequest


class Counting:
    """A manager whose lookups are counted."""

    def __init__(self, manager):
        self.manager, self.lookups = manager, 0

    def __getattr__(self, name):
        return getattr(self.manager, name)

    def lookup(self, *args, **kwargs):
        self.lookups += 1
        return self.manager.lookup(*args, **kwargs)


def naive(scheduler, request, local, layers=2):
    """Tokens after `local` in whole blocks on host, and those on any tier or in flight."""
    now = scheduler.cache.clock()
    match = scheduler.manager.manager.lookup(
        request.all_token_ids,
        now=now,
        scope=scheduler.requests.waiting[request.request_id].scope,
        keep=1,
    )
    blocks = match.blocks[local // SIZE :]

    def there(block):
        whole = [c for c in block.copies if c.tier == 1 and not c.leaving]
        return any((copy.layer_lo, copy.layer_hi) == (0, layers) for copy in whole)

    lacking = [at for at, block in enumerate(blocks) if not there(block)]
    host = lacking[0] if lacking else len(blocks)
    return host * SIZE, len(blocks) * SIZE


@pytest.mark.grid
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_the_answer_about_a_waiting_request_is_that_of_a_lookup(tmp_path, seed, ahead):
    draw = random.Random(seed)
    heads = [[draw.randrange(9) for _ in range(16)] for _ in range(3)]
    requests = 0
    for again in range(2):  # the second server finds the disk of the first
        engine = Engine(tmp_path, 1 + seed % 2, ahead, seed, host=8)
        scheduler = engine.scheduler
        scheduler.cache.manager = counting = Counting(scheduler.manager)
        watched = [
            PlayedRequest(f"w{at}", (one := [*draw.choice(heads), *range(at, at + 5)]), len(one), 1)
            for at in range(3)
        ]
        for at in range(12):
            tail = [draw.randrange(9) for _ in range(draw.randint(1, 9))]
            engine.add(f"{again}.{at}", draw.choice(heads) + tail, draw.randint(1, 6))
            for _ in range(draw.randint(1, 4)):
                engine.step()
                for request in watched:
                    local = draw.choice([0, 0, SIZE])
                    for _ in range(2):
                        answer = scheduler.match(request, local)
                        requests += 1
                        host, all_there = naive(scheduler, request, local)
                        # A request waits only for loads; an answer counts all tokens on host.
                        assert host < all_there if answer is None else answer == host
                    if draw.random() < 0.1:
                        request.all_token_ids.append(draw.randrange(9))
        for request in watched:
            scheduler.end(request)
        engine.drain()
        engine.close()
        assert engine.failed == 0
    assert counting.lookups < requests


def test_nothing_is_looked_up_while_nothing_changes():
    engine = Engine("", 1, 0, 0)
    engine.add("first", list(range(20)), 1)
    engine.drain()
    scheduler = engine.scheduler
    scheduler.cache.manager = counting = Counting(scheduler.manager)
    waits = PlayedRequest("second", list(range(20)), 20, 1)
    assert [scheduler.match(waits, 0) for _ in range(50)] == [16] * 50
    assert counting.lookups == 1
    assert scheduler.match(waits, SIZE) == 12  # vLLM has more of it by now
    waits.all_token_ids += [20, 21]
    assert scheduler.match(waits, 0) == 20 or scheduler.match(waits, 0) == 16
    before = counting.lookups
    scheduler.manager.manager.reset()
    assert scheduler.match(waits, 0) == 0
    assert counting.lookups == before + 1
    scheduler.end(waits)
    engine.close()


def test_a_wait_ends_although_nothing_changes(tmp_path):
    engine = Engine(tmp_path, 1, 0, 0, host=24)
    engine.add("first", list(range(20)), 1)
    engine.drain()
    engine.close()
    engine = Engine(tmp_path, 1, 0, 0, host=24)
    scheduler, now = engine.scheduler, [10**9]
    scheduler.cache.clock = lambda: now[0]
    waits = PlayedRequest("second", list(range(20)), 20, 1)
    assert [scheduler.match(waits, 0) for _ in range(3)] == [
        None
    ] * 3  # no step carries its moves out
    generation = scheduler.manager.generation
    now[0] += scheduler._matching._deadline_ns
    assert scheduler.match(waits, 0) == 0
    assert scheduler.manager.generation == generation
    scheduler.end(waits)
    engine.drain()
    engine.close()


def served_before(folder, prompt, **more):
    """A server that finds a prompt on its disk alone, and its clock."""
    engine = Engine(folder, 1, 0, 0, **more)
    engine.add("first", prompt, 1)
    engine.drain()
    engine.close()
    engine, now = Engine(folder, 1, 0, 0, **more), [10**9]
    engine.scheduler.cache.clock = lambda: now[0]
    return engine, now


def lost(scheduler):
    return {cause: count for cause, count in scheduler.cache.counters.lost.items() if count}


def changed(scheduler):
    """Have the manager's books change, so that no answer is reused."""
    other = PlayedRequest("other", [99] * 9, 9, 1)
    scheduler.match(other, 0)
    scheduler.admit(other, [[20, 21, 22]], 0)
    scheduler.end(other)
    scheduler._commits.release_leaving(scheduler.cache.clock())


def test_a_request_that_gives_up_is_counted_once_under_its_cause(tmp_path):
    engine, now = served_before(tmp_path, list(range(20)), host=24)
    scheduler = engine.scheduler
    waits = PlayedRequest("second", list(range(20)), 20, 1)
    assert scheduler.match(waits, 0) is None
    now[0] += scheduler._matching._deadline_ns
    for _ in range(9):  # vLLM asks in each step in which it has no room for the request
        changed(scheduler)
        assert scheduler.match(waits, 0) == 0
        now[0] += 10**9
    assert lost(scheduler) == {"disk too slow": 1}
    scheduler.end(waits)
    engine.drain()
    engine.close()


def test_without_room_in_host_memory_the_disk_is_not_called_slow(tmp_path):
    engine, now = served_before(tmp_path, list(range(20)), host=24)
    scheduler = engine.scheduler
    waits = PlayedRequest("second", list(range(20)), 20, 1)
    waiting = scheduler.requests.of(waits)
    waiting.wait.prefetched = 0  # as if what was asked for had brought nothing
    for step in range(9):
        changed(scheduler)
        assert scheduler.match(waits, 0) == 0
        assert lost(scheduler) == {"no room to bring up": 1}
        now[0] += scheduler._matching._deadline_ns * step
    scheduler.end(waits)
    engine.drain()
    engine.close()
