"""Top breakers of a window, from the token ids of its events."""

import random

from kvtrie.advise.breakers import top_breakers
from kvtrie.advise.rebuild import Rebuilt
from kvtrie.advise.wire import Batch, Stored

SIZE = 16


class Publisher:
    """Events of an engine whose cache is empty at each request."""

    def __init__(self, rebuilt):
        self.rebuilt, self.number = rebuilt, 0

    def ask(self, tokens, *, named=True):
        full = len(tokens) // SIZE
        names = [hash(tuple(tokens[: (at + 1) * SIZE])) % 2**63 for at in range(full)]
        stored = Stored(names, None, SIZE, None, tokens[: full * SIZE] if named else ())
        self.rebuilt.add(Batch(self.number, 60.0 * self.number, [stored], rank=0))
        self.number += 1


def words(seed, count):
    draw = random.Random(seed)
    return [draw.randrange(10_000) for _ in range(count)]


def test_divergences_are_ranked_by_tokens_that_recur_and_new_prompts_are_none():
    rebuilt = Rebuilt(keep_tokens=True)
    publisher = Publisher(rebuilt)
    system, talk = words(1, 96), words(2, 304)
    for seed in range(3, 6):
        publisher.ask(system + words(seed, 304))  # new conversations
    publisher.ask(system + talk)  # a branch is followed by its newest blocks
    for at in range(3):
        publisher.ask([*system[:40], 20_000 + at, *system[41:], *talk])  # a date
    publisher.ask([*system, *talk[:200], 7, *talk[200:]])
    found = top_breakers(rebuilt)
    assert [(one.position, one.requests) for one in found] == [(40, 3), (296, 1)]
    assert found[0].recurring == 3 * 359
    assert found[0].asked[:2] == [20_000, system[41]]
    assert found[0].cached[:2] == system[40:42]
    assert found[1].tokens == 400


def test_a_window_without_token_ids_has_none():
    for keep_tokens, named in ((True, False), (False, True)):
        rebuilt = Rebuilt(keep_tokens=keep_tokens)
        Publisher(rebuilt).ask(words(1, 96), named=named)
        assert top_breakers(rebuilt) is None


def test_tokens_stay_with_their_blocks_when_older_ones_are_forgotten():
    rebuilt = Rebuilt(40, keep_tokens=True)
    publisher = Publisher(rebuilt)
    prompts = [words(seed, 96) for seed in range(30)]
    for prompt in prompts:
        publisher.ask(prompt)
    assert rebuilt.forgotten
    kept = [rebuilt.tokens(request.blocks).tolist() for request in rebuilt.requests()]
    assert kept == prompts[-len(kept) :]
