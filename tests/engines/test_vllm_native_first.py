"""The first blocks of prompts keep the engine's format in tiers of fewer bits, as parts."""

import random

import numpy as np
import pytest
from kept import memory_folder
from tests.engines.vllm_engine import SIZE, Engine, PlayedRequest, play

from kvtrie.engines.server.commands import read_command
from kvtrie.engines.server.request_hints import FAR
from kvtrie.engines.vllm.native_first import NativeFirst
from kvtrie.errors import ConfigError
from kvtrie.settings.hint import Release, Retain
from kvtrie.settings.scope import Scope
from kvtrie.tiers.native_parts import NativeParts

NATIVE = NativeFirst(tokens=2 * SIZE, parts=3, block_tokens=SIZE, slots=100)
NONE = NativeFirst(tokens=0, parts=0, block_tokens=SIZE, slots=100)


def naive_sequence(tokens):
    """The manager's sequence, and for each of its tokens the place in the prompt."""
    places = []
    for first in range(0, len(tokens), SIZE):
        block = list(range(first, min(first + SIZE, len(tokens))))
        native = first < NATIVE.tokens and len(block) == SIZE
        places += block * (NATIVE.parts if native else 1)
    return [tokens[at] for at in places], places


def test_a_native_block_is_as_many_blocks_as_it_has_parts():
    tokens = np.arange(100, 118, dtype=np.uint32)
    for count in range(len(tokens) + 1):
        wanted, places = naive_sequence(tokens[:count].tolist())
        sequence = NATIVE.sequence(tokens[:count])
        assert sequence.tolist() == wanted
        assert NATIVE.stretch(count) == len(wanted)
        assert NATIVE.shrink(len(wanted)) == count
        blocks = [count > first for first in range(0, count, SIZE)]
        slots = NATIVE.slots_of(list(range(len(blocks))))
        assert len(slots) == len(blocks) + 2 * min(len(blocks), 2)
    for length in range(len(wanted) + 1):
        full = {at: places[:length].count(at) for at in range(SIZE * (length // SIZE + 1))}
        blocks = 0
        while full.get(blocks * SIZE + SIZE - 1, 0) >= (3 if blocks < 2 else 1):
            blocks += 1
        assert NATIVE.shrink(length) // SIZE == blocks


def test_slots_name_parts_of_native_blocks():
    assert NATIVE.slots_of([7, 8, 9]) == [107, 207, 307, 108, 208, 308, 9]
    assert NATIVE.slots_of([8, 9], 1) == [108, 208, 308, 9]
    assert NATIVE.slots_of([9], 2) == [9]
    assert {slot % NATIVE.slots for slot in NATIVE.slots_of([7, 8, 9])} == {7, 8, 9}


def test_hints_commands_and_digests_name_places_of_the_sequence():
    tokens = np.arange(20, dtype=np.uint32)
    _, places = naive_sequence(tokens.tolist())
    for start in range(14):
        for end in [*range(start, 20), None]:
            asked = Retain(tokens=tokens, start=start, end=end)
            hint = NATIVE.hint(asked)
            # A block belongs to a range if its first token does.
            firsts = range(0, len(places), SIZE)
            last = len(places) if hint.end is None else hint.end
            mine = [at for at in firsts if hint.start <= at < last]
            wanted = len(tokens) if end is None else end
            assert mine == [at for at in firsts if start <= places[at] < wanted]
    release = Release(session="one")
    assert NATIVE.hint(release) is release
    assert NONE.hint(asked) is asked

    body = {"tokens": tokens.tolist(), "retain": [{"start": 4, "end": 9}, {"start": 0}]}
    command = NATIVE.command(read_command("retain", body))
    assert command.tokens.tolist() == naive_sequence(tokens.tolist())[0]
    assert [each[:2] for each in command.ranges] == [(12, 28), (0, FAR)]

    scope = Scope(tenant=b"t", lora="weights", extra=((5, b"x"), (10, b"y")))
    named = NATIVE.scope(scope)
    assert (named.tenant, named.lora) == (b"t", "weights native 8 in 3")
    assert [at for at, _ in named.extra] == [places.index(5), places.index(10)]
    assert NONE.scope(scope) is scope


def test_host_memory_below_the_native_blocks_is_refused():
    Engine("", 1, 0, 0, 7, format_="int8", native_first=5).close()  # two blocks of three parts
    with pytest.raises(
        ConfigError, match=r"6 slots of host memory .* 8 tokens .* has 6: at least 7"
    ):
        Engine("", 1, 0, 0, 6, format_="int8", native_first=5)


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_find_the_first_blocks_unchanged(seed):
    engine = Engine("", 1 + seed % 2, seed % 3, seed, 16, format_="int8", native_first=2 * SIZE)
    play(engine, 14, seed)
    engine.close()
    assert engine.served > 0
    assert engine.found > 0
    assert engine.stored_blocks > 0
    assert engine.failed == 0


def test_a_converted_first_block_is_noticed():
    engine = Engine("", 1, 0, 0, 16, format_="int8")
    engine.native = 2
    with pytest.raises(AssertionError):
        play(engine, 14, 0)
    engine.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_disk_keeps_parts_over_a_restart(tmp_path, ranks):
    for again in range(2):
        engine = Engine(tmp_path, ranks, ranks - 1, 0, 16, format_="int8", native_first=8)
        assert (engine.scheduler.manager.stats().blocks > 0) == bool(again)
        play(engine, 14, 0)
        engine.close()
        assert engine.failed == 0
    assert engine.scheduler.cache.counters.tokens["disk"] > 0


def test_kept_memory_has_parts_over_a_restart():
    with memory_folder() as folder:
        for seed in range(2):
            engine = Engine("", 1, 0, seed, 24, keep=folder / "kv", format_="int8", native_first=8)
            assert (engine.scheduler.manager.stats().blocks > 0) == (seed > 0)
            play(engine, 14, 0)
            engine.close()
            assert engine.failed == 0
            assert engine.found > 0


def test_a_shared_store_has_parts(tmp_path):
    for seed in range(2):
        engine = Engine(
            "", 1, seed % 2, seed, 16, store=f"folder:{tmp_path}", format_="int8", native_first=8
        )
        play(engine, 14, 0)
        engine.close()
        assert engine.failed == 0
        assert engine.found > 0


def test_blocks_of_another_native_first_are_not_found(tmp_path):
    """Their names differ: a part is never taken for a converted block."""
    prompt = list(range(30))
    for native, found in ((8, 0), (0, 0), (4, 0), (8, 28)):
        engine = Engine(tmp_path, 1, 0, 0, 24, format_="int8", native_first=native)
        engine.whole = True
        engine.add("a", prompt, 1)
        engine.drain()
        engine.close()
        assert (engine.found, engine.failed) == (found, 0), native


def test_loads_of_parts_that_fail_are_never_committed(monkeypatch):
    copy, draw = NativeParts.copy_from, random.Random(0)

    def fail(self, *args):
        if draw.random() < 0.3:
            raise OSError("injected")
        copy(self, *args)

    monkeypatch.setattr(NativeParts, "copy_from", fail)
    failed = 0
    for seed in range(2):
        engine = Engine("", 1, seed % 2, seed, 16, format_="int8", native_first=8)
        play(engine, 20, seed)
        engine.close()
        failed += engine.failed
    assert failed > 0


def test_computed_tokens_are_counted_once_each():
    """A native block has its tokens in the counters, not those of its parts."""
    engine = Engine("", 1, 0, 0, 24, format_="int8", native_first=8)
    engine.whole = True
    for name, prompt in (("a", [*range(18)]), ("b", [*range(6), 90, 91, *range(8)])):
        engine.add(name, prompt, 1)
        engine.drain()
    missed = engine.scheduler.why.tokens
    assert sum(missed.values()) == 18 + 16 - 4
    assert engine.found == 4
    assert engine.scheduler.cache.counters.tokens["asked"] == 18 + 16
    assert engine.scheduler.cache.counters.blocks["written"] == 4 + 3
    request = PlayedRequest("c", [*range(18)], 18, 1)
    assert engine.scheduler.match(request, 0) == 16
    assert engine.scheduler.match(request, 4) == 12
    engine.scheduler.end(request)
    engine.close()


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(at, marks=pytest.mark.deep) for at in range(2, 200))]
)
def test_any_sizes_and_tiers(seed, tmp_path):
    draw = random.Random(seed)
    native, places = draw.choice([4, 8, 12]), draw.choice(["", "disk", "store", "disk store"])
    more = {
        "native_first": native,
        "native_last": draw.choice([0, 0, 3, 9]),
        "format_": draw.choice(["int8", "fp8"]),
        "use_layerwise": draw.random() < 0.3,
        "store": f"folder:{tmp_path}/store" if "store" in places else None,
    }
    host = native // SIZE * 3 + draw.choice([1, 2, 4, 8, 20])
    for again in range(2):
        folder = tmp_path / "disk" if "disk" in places else ""
        ranks = 1 if again or places else draw.choice([1, 2])
        engine = Engine(folder, ranks, draw.choice([0, 1, 2]), seed, host, **more)
        play(engine, 12, seed, aborts=draw.choice([0.05, 0.3]))
        engine.close()
        assert engine.failed == 0
        assert not engine.scheduler.cache.counters.lost["an unexpected error"]
