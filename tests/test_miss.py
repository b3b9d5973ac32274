"""`explain_miss`: compared with a twin over plain lists of all cached sequences."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvtrie import BlockManager, ConfigError, Cost, ModelShape, Scope, Tier

SHAPE = ModelShape(layers=2, kv_heads=1, head_dim=4, fingerprint="weights")
SIZE, RUN, MOST = 4, 16, 128 << 10
# Blocks that share their first tokens; a ghost compares first, middle and last tokens in 8 bits.
POOL = [[10 * first, 10 * first, 3, last] for first in range(1, 4) for last in range(101, 105)]
POOL += [[7, 8, 9, last] for last in (50, 51, 52)]
TENANTS = (b"", b"a", b"b")
LORAS = ("", "x")
DIGESTS = (b"one", b"two")


def manager(policy="lru", **more):
    """A manager whose tiers never fill, so that only `mark` evicts."""
    tiers = [Tier("gpu", blocks=2048), Tier("host", blocks=4096)]
    cost = Cost(ns_per_token=1e9)  # loading is always faster
    return BlockManager(
        SHAPE, tiers, block_tokens=SIZE, policy=policy, cost=cost, explain=True, **more
    )


@dataclass
class CachedBlock:
    """A block of the lists."""

    whose: tuple[bytes, str]
    content: tuple
    serial: int
    handle: int
    used: int = 0


@dataclass
class Twin:
    """All cached sequences as lists, and the ghosts by group."""

    manager: BlockManager
    blocks: list[CachedBlock] = field(default_factory=list)
    ghosts: dict = field(default_factory=dict)
    serial: int = 0

    def content(self, tokens, scope):
        """Tokens with digests in place, and those that no block has."""
        content = list(map(int, tokens))
        for offset, digest in scope.extra:
            if offset < len(content):
                content[offset] = (content[offset], digest)
        return tuple(content)

    def store(self, tokens, scope, session, now):
        self.open(scope, session)
        with self.manager.acquire(
            tokens, now=now, scope=scope, session=session, keep=0, load="none"
        ) as lease:
            lease.commit(tokens[lease.matched :], now=now)
            handles = lease.handles.tolist()
            lease.release(now=now)
        content, whose = self.content(tokens, scope), (scope.tenant, scope.lora)
        known = {block.handle: block for block in self.blocks}
        for at, handle in enumerate(handles):
            if handle not in known:
                self.serial += 1
                part = content[: (at + 1) * SIZE]
                self.blocks.append(CachedBlock(whose, part, self.serial, handle))
                known[handle] = self.blocks[-1]
            known[handle].used = now

    def use(self, tokens, scope, now):
        content, whose = self.content(tokens, scope), (scope.tenant, scope.lora)
        for block in self.blocks:
            if block.whose == whose and block.content == content[: len(block.content)]:
                block.used = now

    def open(self, scope, session):
        """Note the order in which sessions began."""
        live = [name for name, *_ in self.manager.sessions(scope=plain(scope))]
        if session is not None and session not in live:
            self.opened[plain(scope), session] = len(self.opened_order)
            self.opened_order.append(session)

    def update_ghosts(self):
        """Move blocks that left the cache to the ghosts, the deepest first."""
        left = [block for block in self.blocks if not self.alive(block)]
        for block in sorted(left, key=lambda one: -len(one.content)):
            group, place = self.group(block.whose, block.content)
            self.ghosts.setdefault(group, {})[place] = block.content[-SIZE:]
        self.blocks = [block for block in self.blocks if block not in left]

    def alive(self, block):
        try:
            self.manager.layer_tiers(block.handle)
        except ConfigError:
            return False
        return True

    def group(self, whose, content):
        """The group of eight blocks that a path's last block is in, by its first block."""
        depth = len(content) // SIZE - 1
        head = depth // 8 * 8 * SIZE
        return (whose, depth // 8, content[head : head + SIZE]), depth % 8

    def children(self, whose, content):
        """Blocks after a path, the newest first."""
        size = len(content)
        found = [
            block
            for block in self.blocks
            if block.whose == whose
            and len(block.content) == size + SIZE
            and block.content[:size] == content
        ]
        return sorted(found, key=lambda block: -block.serial)

    def known(self, whose, content):
        paths = {block.content for block in self.blocks if block.whose == whose}
        count = 0
        while content[: (count + 1) * SIZE] in paths and (count + 1) * SIZE <= len(content):
            count += 1
        return count

    def follow(self, whose, block):
        """The content of a branch by its newest blocks, and the last block."""
        while len(block.content) < MOST and (next_ := self.children(whose, block.content)):
            block = next_[0]
        return block

    def miss(self, tokens, scope, session, limit, now):
        """All fields of the answer, by comparison of lists."""
        content, whose = self.content(tokens, scope), (scope.tenant, scope.lora)
        full, known = len(content) // SIZE * SIZE, self.known(whose, content)
        path, rest = content[: known * SIZE], content[known * SIZE :]
        usable = self.manager.lookup(tokens, now=now, scope=scope, keep=0).tokens
        by_content = {b.content: b for b in self.blocks if b.whose == whose}
        found, flying = [0, 0], known * SIZE - usable
        for at in range(usable // SIZE):
            tiers = self.manager.layer_tiers(by_content[content[: (at + 1) * SIZE]].handle)
            if tiers[0] < 0:
                flying += SIZE
            else:
                found[tiers[0]] += SIZE
        chosen = self.candidates(whose, path, rest, session, limit, scope)
        diverging = max((common(b.content[len(path) :], rest) for b in chosen), default=None)
        if diverging is not None and diverging >= len(rest):
            diverging, chosen = None, []
        branches, other = [], self.elsewhere(whose, content, known)
        for block in chosen if diverging is not None else ():
            last = self.follow(whose, block)
            branch = last.content[len(path) :]
            own, others = rest[diverging : diverging + 1], branch[diverging : diverging + 1]
            if is_digest(own) and is_digest(others):
                pairs = zip(rest, branch, strict=False)
                alike = [(is_digest([a]) and is_digest([b])) or a == b for a, b in pairs]
                shared = [*alike, False].index(False)
                other = max(other, shared // SIZE * SIZE)
            after, asked = branch[diverging:], rest[diverging:]
            branches.append((
                [t[0] if isinstance(t, tuple) else t for t in after[:64]],
                len(after),
                now - block.used,
                self.session_at(scope, last.handle),
                recurring(asked, after),
            ))  # fmt: skip
        evicted = self.evicted(whose, content, known)
        most = max((branch[4] for branch in branches), default=0)
        diverged = most and most * 10 >= 3 * (len(rest) - diverging)
        end, elsewhere = known * SIZE + evicted, known * SIZE + other
        causes = []
        for start, stop, cause in (
            (usable, known * SIZE, "not stored yet"),
            (known * SIZE, min(end, full), "evicted"),
            (min(end, full), min(elsewhere, full), "other scope"),
            (min(max(end, elsewhere), full), full, "diverged" if diverged else "new"),
            (full, len(content), "not cacheable"),
        ):
            if start < stop:
                causes.append((start, stop, cause))
        diverged_at = None if diverging is None else len(path) + diverging
        return found, diverged_at, branches, evicted, flying, other, causes

    def candidates(self, whose, path, rest, session, limit, scope):
        newest = self.children(whose, path)[:64]
        chosen = []
        for name, _, handles in self.manager.sessions(scope=plain(scope)) if session else ():
            if name == session and len(handles):
                own = next(b.content for b in self.blocks if b.handle == handles[-1])
                if own[: len(path)] == path and len(own) > len(path):
                    own = own[: len(path) + SIZE]
                    chosen += [b for b in self.blocks if (b.whose, b.content) == (whose, own)]
        if newest:
            chosen.append(max(newest, key=lambda b: common(b.content[len(path) :], rest)))
        for block in newest:
            chosen.append(block)
        unique = list({block.handle: block for block in chosen}.values())
        return unique[:limit]

    def elsewhere(self, whose, content, known):
        others = {b.whose for b in self.blocks if b.whose[0] == whose[0] and b.whose != whose}
        most = max((self.known(other, content) for other in others), default=0)
        return max(0, most - known) * SIZE

    def evicted(self, whose, content, known):
        count = 0
        while (known + count + 1) * SIZE <= len(content):
            part = content[: (known + count + 1) * SIZE]
            group, place = self.group(whose, part)
            gone = self.ghosts.get(group, {}).get(place)
            # A ghost compares three tokens of its block.
            if gone is None or any(gone[at] != part[-SIZE:][at] for at in (0, SIZE // 2, -1)):
                break
            count += 1
        return count * SIZE

    def session_at(self, scope, handle):
        """The session that came last of those that end in a block."""
        scope = plain(scope)
        live = self.manager.sessions(scope=scope)
        ends = [name for name, _, handles in live if len(handles) and handles[-1] == handle]
        return max(ends, key=lambda name: self.opened[scope, name], default=None)

    opened: dict = field(default_factory=dict)
    opened_order: list = field(default_factory=list)


def plain(scope):
    """A scope without digests, which owns the same blocks."""
    return Scope(tenant=scope.tenant, lora=scope.lora)


def is_digest(tokens):
    return len(tokens) > 0 and isinstance(tokens[0], tuple)


def common(known, given):
    """Leading tokens of a block that are given too."""
    pairs = enumerate(zip(known[:SIZE], given, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(known[:SIZE]), len(given)))


def recurring(asked, branch):
    """Tokens covered by runs that both have, by comparison of all pairs."""
    runs = {branch[at : at + RUN] for at in range(len(branch) - RUN + 1)}
    covered = set()
    for at in range(len(asked) - RUN + 1):
        if asked[at : at + RUN] in runs:
            covered.update(range(at, at + RUN))
    return len(covered)


def seen(miss):
    """The fields of an answer as the twin has them."""
    branches = [
        (b.tokens.tolist(), b.cached, b.idle, b.session, b.recurring) for b in miss.branches
    ]
    return (
        miss.found,
        miss.diverged_at,
        branches,
        miss.evicted,
        miss.in_flight,
        miss.other_scope,
        miss.causes,
    )


def draw_prompt(draw, before):
    """A prompt: new, or an earlier one cut, extended or shifted; not always of full blocks."""
    blocks = [draw.choice(POOL) for _ in range(draw.randint(0, 14))]
    tokens = [token for block in blocks for token in block]
    if before and draw.random() < 0.75:
        old = draw.choice(before)
        cut = draw.randint(0, len(old))
        kind = draw.random()
        if kind < 0.4:
            tokens = old[:cut] + tokens
        elif kind < 0.7:
            tokens = [*old[:cut], draw.choice((7, 10, 20, 77)), *old[cut:]]
        else:
            tokens = old + tokens[:8]
    tokens = [*tokens, 7, 8] if draw.random() < 0.5 else tokens or [7]
    return tokens[: 40 * SIZE]


def draw_scope(draw, length):
    extra = ()
    if draw.random() < 0.25 and length:
        extra = ((draw.randrange(length), draw.choice(DIGESTS)),)
    return Scope(tenant=draw.choice(TENANTS), lora=draw.choice(LORAS), extra=extra)


def play_world(seed):
    """Compare the answers after each of sixty random steps; the causes that were seen."""
    draw = random.Random(seed)
    twin, before, now, causes = Twin(manager()), [], 0, set()
    for _ in range(60):
        now += draw.randint(0, 1000)
        change_world(draw, twin, before, now)
        twin.update_ghosts()
        asked = np.array(draw_prompt(draw, before), dtype=np.uint32)
        scope = draw_scope(draw, len(asked))
        session, limit = draw.choice((None, "s", "t")), draw.choice((1, 2, 8))
        generation = twin.manager.generation
        miss = twin.manager.explain_miss(asked, now=now, scope=scope, session=session, limit=limit)
        assert seen(miss) == twin.miss(asked, scope, session, limit, now)
        assert twin.manager.generation == generation
        cheap = twin.manager.explain_miss(asked, now=now, scope=scope, session=session, limit=0)
        whole = twin.manager.explain_miss(asked, now=now, scope=scope, session=session)
        assert cheap.branches == []
        assert cheap.diverged_at == whole.diverged_at
        rest = {"diverged": "new"}
        assert cheap.causes == [(a, b, rest.get(why, why)) for a, b, why in whole.causes]
        known = (whole.diverged_at or 0) // SIZE
        key = bytes(twin.manager.keys(asked, scope=scope)[known - 1]) if known else None
        assert cheap.divergence == whole.divergence == key
        computed = sum(end - start for start, end, _ in miss.causes)
        unstored = sum(end - start for start, end, why in miss.causes if why == "not stored yet")
        assert computed + sum(miss.found) + miss.in_flight - unstored == miss.tokens == len(asked)
        causes |= {cause for *_, cause in miss.causes}
    assert not twin.manager.audit()
    return causes


def change_world(draw, twin, before, now):
    """Store a prompt, evict the tail of one, or move one to host, with loads in flight."""
    tokens = draw_prompt(draw, before)
    scope, kind = draw_scope(draw, len(tokens)), draw.random()
    if kind < 0.45:
        session = draw.choice((None, None, "s", "t", "u"))
        twin.store(np.array(tokens, dtype=np.uint32), scope, session, now)
        before.append(tokens)
        return
    if kind > 0.7 or not before:
        return
    old = np.array(draw.choice(before), dtype=np.uint32)
    if kind < 0.6:
        skip = draw.randint(0, len(old) // SIZE)
        for tier in (0, 1):
            with suppress(ConfigError):  # a block whose children need it stays
                twin.manager.mark(old, tier, present=False, now=now, scope=scope, skip=skip)
        return
    length = twin.manager.lookup(old, now=now, scope=scope, keep=0).tokens
    if length >= SIZE:
        part, ready = old[:length], now + draw.choice((0, 10**6))
        twin.manager.mark(part, 1, present=True, now=now, ready=ready, first=ready, scope=scope)
        twin.use(part, scope, now)  # as a mark counts
        with suppress(ConfigError):
            skip = draw.randint(0, length // SIZE)
            twin.manager.mark(part, 0, present=False, now=now, scope=scope, skip=skip)


def test_it_is_what_lists_of_all_sequences_give():
    causes = set().union(*map(play_world, range(25)))
    assert causes == {"new", "diverged", "evicted", "other scope", "not cacheable"}


def test_another_tenant_changes_no_field():
    mine, other = Scope(tenant=b"a"), Scope(tenant=b"b", lora="x")
    alone, shared = manager(), manager()
    texts = [np.arange(at, at + 80, dtype=np.uint32) for at in (0, 40, 0)]
    texts[2] = np.concatenate([texts[0][:10], [5000], texts[0][10:]]).astype(np.uint32)
    for now, text in enumerate(texts[:2], 1):
        for one in (alone, shared):
            Twin(one).store(text, mine, f"chat {now}", now)
        Twin(shared).store(text[:60], other, "theirs", now)
        Twin(shared).store(texts[2], other, "chat 1", now)
    for scope in (mine, Scope(tenant=b"c")):
        for text in texts:
            answers = [
                one.explain_miss(text, now=9, scope=scope, session="chat 1")
                for one in (alone, shared)
            ]
            assert seen(answers[0]) == seen(answers[1])
            assert repr(answers[0]) == repr(answers[1])
    new = shared.explain_miss(texts[0], now=9, scope=Scope(tenant=b"c"))
    assert (new.diverged_at, new.branches, new.other_scope) == (None, [], 0)
    assert new.causes == [(0, 80, "new")]


def test_a_token_that_is_inserted_parts_a_prompt_and_the_rest_recurs():
    cache = BlockManager(SHAPE, [Tier("gpu", blocks=64)], block_tokens=16)
    text = np.arange(1000, 1400, dtype=np.uint32)
    Twin(cache).store(text, Scope(), "chat", 5)
    asked = np.insert(text, 37, 7).astype(np.uint32)
    miss = cache.explain_miss(asked, now=25)
    assert (miss.found, miss.diverged_at) == ([32], 37)
    (branch,) = miss.branches
    assert branch.tokens.tolist() == text[37:101].tolist()
    assert (branch.cached, branch.idle, branch.session) == (400 - 37, 20, "chat")
    assert branch.recurring == len(asked) - 38
    assert miss.causes == [(32, 400, "diverged"), (400, 401, "not cacheable")]
    new = np.concatenate([text[:37], np.arange(9000, 9300)]).astype(np.uint32)
    assert cache.explain_miss(new, now=25).causes == [(32, 336, "new"), (336, 337, "not cacheable")]


def test_blocks_that_compute_faster_than_they_load_are_recomputed():
    tiers = [Tier("gpu", blocks=64), Tier("host", blocks=64)]
    cache = BlockManager(SHAPE, tiers, block_tokens=16, cost=Cost(ns_per_token=1e-3))
    text = np.arange(128, dtype=np.uint32)
    cache.mark(text, 1, present=True, now=0)
    miss = cache.explain_miss(text, now=1)
    assert miss.recomputed + sum(miss.found) == 128
    assert miss.recomputed == 128
    assert miss.causes == [(0, 128, "recomputed")]


@pytest.mark.parametrize("policy", ["lru", "learned", "fifo"])
def test_evicted_blocks_are_remembered_under_every_policy(policy):
    text = np.arange(160, dtype=np.uint32)
    causes = {}
    for explain in (False, True):
        cache = BlockManager(
            SHAPE, [Tier("gpu", blocks=64)], block_tokens=16, policy=policy, explain=explain
        )
        Twin(cache).store(text, Scope(), None, 1)
        cache.mark(text, 0, present=False, now=2, skip=3)
        miss = cache.explain_miss(text, now=3)
        assert miss.found == [48]
        causes[explain] = miss.causes
    assert causes[True] == [(48, 160, "evicted")]
    assert causes[False] == [(48, 160, "evicted" if policy == "learned" else "new")]


def test_remembering_decides_nothing():
    draw = random.Random(3)
    prompts = [
        np.repeat([draw.randint(0, 5) for _ in range(draw.randint(1, 9))], SIZE) for _ in range(400)
    ]
    evicted = []
    for explain in (False, True):
        cache = BlockManager(
            SHAPE, [Tier("gpu", blocks=12)], block_tokens=SIZE, policy="lfu", explain=explain,
            events=10_000,
        )  # fmt: skip
        for now, prompt in enumerate(prompts):
            Twin(cache).store(prompt.astype(np.uint32), Scope(), None, now)
        evicted.append([event.block for event in cache.take_events()])
    assert evicted[0] == evicted[1]
    assert len(evicted[0]) > 100


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"limit": -1}, "limit is -1"),
        ({"limit": 65}, "limit is 65, 0 to 64 wanted"),
        ({"session": 7}, "session"),
        ({"scope": "a"}, "scope is 'a', a Scope wanted"),
        ({"now": -1}, "now is -1"),
    ],
)
def test_wrong_arguments_are_refused(more, said):
    with pytest.raises(ConfigError, match=said):
        manager().explain_miss([1, 2, 3], **{"now": 0, **more})


def test_the_rest_of_a_long_prompt_recurs_behind_another_branch():
    cache = BlockManager(SHAPE, [Tier("gpu", blocks=1 << 17)], block_tokens=16)
    draw = np.random.default_rng(1)
    text = draw.integers(0, 100_000, 100_000).astype(np.uint32)
    for at in range(8):
        branch = np.insert(text, 1000, 100_000 + at).astype(np.uint32)
        with cache.acquire(branch, now=at, keep=0, load="none") as lease:
            lease.commit(branch[lease.matched :], now=at)
    asked = np.insert(text, 1000, 999).astype(np.uint32)
    assert cache.explain_miss(asked, now=99).branches[7].recurring > 90_000
