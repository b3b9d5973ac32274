"""A naive engine around the vLLM connector, which compares every block's bytes.

The engine allocates blocks as vLLM does, reuses freed blocks at once, preempts, aborts, and may
have a step under way while it plans the next one. A block's bytes are a number made of all tokens
up to its end, so a wrong block anywhere shows. With a format of host memory they are that number
times a pattern, which native blocks keep exactly and others nearly.

With `kinds` the model has further groups of layers: `w` and `n` attend to windows of several blocks
and of less than one, `s` keeps a state. As
vLLM does, the engine gives blocks of windows back that no token attends to, keeps the state of a
border for one more step, and computes nothing of a request before its loads have ended.
"""

import random
import time
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.engines.vllm_blocks import SIZE, WINDOWS, Blocks, passed

from kvtrie import ModelShape, Moves
from kvtrie.engines.vllm.model import ServedGroup, ServedModel
from kvtrie.engines.vllm.scheduler import SchedulerConnector
from kvtrie.engines.vllm.settings import Settings
from kvtrie.engines.vllm.worker import WorkerConnector
from kvtrie.model.layer_group import LayerGroup
from kvtrie.settings.scope import Scope
from kvtrie.transfer.copy_stream import CopyStream

LAYERS, BLOCKS = 2, 14  # of the first stage
KEPT: dict = {}  # further settings of a host tier with a file
PROMPT = list(range(13))  # three full blocks


@dataclass(eq=False)
class PlayedRequest:
    """A request as vLLM has it, as far as the connector looks."""

    request_id: str
    all_token_ids: list
    num_prompt_tokens: int
    answer: int
    status: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(name="WAITING"))
    table: list = field(default_factory=list)
    others: list = field(default_factory=list)  # tables of the groups after the first
    computed: int = 0
    processed: int = 0  # tokens of executed steps
    loaded: int | None = None  # tokens that its loads bring, while and after it waits for them
    prompt_embeds = lora_request = cache_salt = kv_transfer_params = kv_hints = session_id = None
    mm_features, priority, skip_reading_prefix_cache = (), 0, False

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    @property
    def num_computed_tokens(self):
        return self.computed

    @property
    def block_hashes(self):
        return named(self.all_token_ids)


def named(tokens):
    """A hash of each full block, of all tokens up to its end, as vLLM has them."""
    ends = range(SIZE, len(tokens) + 1, SIZE)
    return [blake2b(bytes(tokens[:end]), digest_size=32).digest() for end in ends]


def mark(tokens, block, size=SIZE):
    """The bytes of a block: they depend on all that comes before its end."""
    return zlib.crc32(bytes(tokens[: (block + 1) * size])) % 251 + 1


def state(tokens):
    """The number of a state after these tokens."""
    return zlib.crc32(bytes(tokens)) % 241 + 1


def served(names, ranks, stages, *, replicated, kinds="", pages=None):
    """The model as a stage with these layers sees it."""
    heads, layers = 1 if replicated else 2 * ranks, len(names) + len(kinds)
    shape = ModelShape(layers, heads, 8, fingerprint=f"halves {names}", latent=replicated, tp=ranks)
    groups = [ServedGroup(0, tuple(names))]
    if kinds:
        shaped = [LayerGroup(tuple(range(len(names))))]
        for at, kind in enumerate(kinds, len(names)):
            more = ("state", 0) if kind == "s" else ("sliding", WINDOWS[kind])
            shaped.append(LayerGroup((at,), *more, state_bytes=64 if kind == "s" else None))
            groups.append(ServedGroup(len(groups), (kind,), state=kind == "s"))
        shape = replace(shape, groups=tuple(shaped))
    if pages:
        groups = [replace(one, pages=count) for one, count in zip(groups, pages, strict=True)]
    blocks = BLOCKS * sum(pages or (1,) * len(groups))
    return ServedModel(shape, SIZE, blocks, tuple(groups), stages, replicated)


class Exchange:
    """Exchange of ranks' settings at start."""

    def __init__(self, ranks):
        self.values, self.barrier = [None] * ranks, Barrier(ranks)

    def gather(self, rank, value):
        self.values[rank] = value
        self.barrier.wait(60)
        values = list(self.values)
        self.barrier.wait(60)
        return values


class Engine:
    """Scheduler, workers and memory, without a model.

    Args:
        folder: of the disk tier; empty for none.
        store: URL of a shared store, or the settings of its tier; None for none.
        format_: format of host memory; None is the engine's.
        ranks: workers of a pipeline stage.
        ahead: steps that are planned before the first of them has finished.
        more: further settings.
        naming: hashes of blocks, for events.
        clock: the scheduler's, and the wall's; None is the system's.
        keep: path of the file of host memory; None for memory that ends with the engine.
        kinds: further groups of one layer each: "w" and "n" with windows, "s" with a state.
        pages: by group, its blocks per block of the manager; None for one.
    """

    def __init__(
        self,
        folder,
        ranks,
        ahead,
        seed,
        host=6,
        *,
        events=False,
        stages=1,
        replicated=False,
        clock=None,
        naming=None,
        keep=None,
        store=None,
        format_=None,
        kinds="",
        pages=None,
        **more,
    ):
        self.draw, self.ahead, self.kinds = random.Random(seed), ahead, kinds
        count = BLOCKS * sum(pages or (1,) * (1 + len(kinds)))
        self.blocks, self.loading = Blocks(count, kinds, self.draw, pages), {}
        self.layerwise = more.get("use_layerwise", False)
        # A block of two layers, its windows and states.
        room = {"bytes": host * 2048 * (1 + len(kinds))} if kinds else {"blocks": host}
        rows = [{"kind": "host", **room} | ({"keep": str(keep), **KEPT} if keep else {})]
        self.pattern, self.native = None, more.get("native_first", 0) // SIZE
        self.error = {"int8": 0.02, "fp8": 0.12}.get(format_)  # of a number, at most
        if format_:
            rows[0]["format"] = format_
            self.pattern = torch.rand(2, SIZE, 2, 8, generator=torch.manual_seed(0)) + 0.5
            more["uncalibrated"] = True
        if folder:
            room = {"bytes": 1 << 22} if kinds else {"blocks": 64}
            rows.append({"kind": "disk", **room, "path": str(folder)})
        if store is not None:
            row = {"path": store} if isinstance(store, str) else store
            rows.append({"kind": "remote", "blocks": 1000, **row})
        more = {"deadline_s": 1000, "lookup_s": 1000, "events": events, **more}
        settings = Settings.read({"tiers": rows, **more})
        self.wall = clock or time.time_ns
        self.layers, self.memory, self.workers = [], [], []
        for names in ("ab", "cd" if kinds else "c")[:stages]:  # of one group unequal ones
            self.open(settings, names, ranks, stages, replicated=replicated)
        model = served("ab", ranks, stages, replicated=replicated, kinds=kinds, pages=pages)
        opened = {rank: worker.opened() for rank, worker in enumerate(self.workers)}
        clock = clock or time.monotonic_ns
        self.scheduler = SchedulerConnector(settings, model, opened, naming=naming, clock=clock)
        self.waiting, self.running, self.under_way = deque(), [], deque()
        self.broken = []
        self.found = self.failed = self.served = self.late = 0
        self.whole = False  # whether a step computes all that is left of a request
        self.seen = []

    def open(self, settings, names, ranks, stages, *, replicated):
        """The workers of a stage, which wait for each other as they exchange values."""
        pages, sizes = self.blocks.pages, self.blocks.sizes
        model = served(names, ranks, stages, replicated=replicated, kinds=self.kinds, pages=pages)
        exchange = Exchange(ranks)
        size = dict(zip(self.kinds, sizes[1:], strict=True))

        def wide(name):
            tokens = size.get(name, sizes[0])
            return (16,) if name == "s" else (tokens, 8) if replicated else (2, tokens, 2, 8)

        first = len(self.memory)
        for _ in range(ranks):
            self.layers.append(names + self.kinds)
            self.memory.append(
                {name: torch.zeros(self.blocks.count, *wide(name)) for name in names + self.kinds}
            )

        def worker(rank):
            return WorkerConnector(
                settings,
                model,
                first + rank,
                self.memory[first + rank],
                engine="naive",
                gather=partial(exchange.gather, rank),
                runners=1,
                stream=self.stream(first + rank),
                wall=self.wall,
                writer=None if self.pattern is None else writer,
            )

        with ThreadPoolExecutor(ranks) as threads:
            self.workers += threads.map(worker, range(ranks))

    def stream(self, rank):  # noqa: ARG002
        """Makes the streams of a worker's loads and stores."""
        return CopyStream

    def add(self, name, tokens, answer):
        self.seen.append(PlayedRequest(name, list(tokens), len(tokens), answer))
        self.waiting.append(self.seen[-1])

    def some(self, left, had=0):
        """The number of tokens that a step computes out of those left, after those it had."""
        count = left if self.whole else min(self.draw.randint(1, 9), left)
        # A state is kept where a step ends: vLLM ends most at a border.
        border = (had // SIZE + 1) * SIZE - had
        return min(count, border) if "s" in self.kinds and self.draw.random() < 0.7 else count

    def plan(self):
        """As vLLM's scheduler: running requests first, then those that wait."""
        counts, before, grown, new, self.offers = {}, {}, {}, [], {}
        for request in list(self.running):
            if request not in self.running or request.computed >= request.num_tokens:
                continue  # its next token is still being sampled
            count = self.some(request.num_tokens - request.computed, request.computed)
            self.blocks.take_passed(request)
            had = request.computed
            while (
                not (fits := self.blocks.fits(request, count, had))
                and self.running[-1] is not request
            ):
                self.preempt(self.running[-1], counts)
            if not fits:
                self.preempt(request, counts)
                continue
            grown[request.request_id] = self.blocks.grow(request, request.computed + count)
            self.schedule(request, count, counts, before)
        while self.waiting and len(self.running) < 4:
            request = self.waiting[0]
            # The next input of a session is not asked for, nor a request whose loads have ended.
            loaded = 0 if request.computed else self.scheduler.match(request, 0)
            if loaded is None:
                self.waiting.rotate(-1)
                break
            had = request.computed + loaded
            count = self.some(request.num_tokens - had, had)
            if not self.blocks.fits(request, count, had):
                # Those that hold loaded blocks go first, else nobody would ever go on.
                self.waiting = deque(sorted(self.waiting, key=lambda one: one.loaded is None))
                break
            self.waiting.popleft()
            if loaded and self.kinds:
                self.load(request, loaded)
                continue
            self.blocks.grow(request, had + count)
            request.status.name = "RUNNING"
            self.running.append(request)
            self.scheduler.admit(request, self.blocks.tables(request), loaded)
            request.computed = had
            self.found += loaded
            new.append(request.request_id)
            self.schedule(request, count, counts, before)
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, num_computed_tokens=before[name]) for name in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name in counts if name in grown],
                new_block_ids=[grown[name] for name in counts if name in grown],
                num_computed_tokens=[before[name] for name in counts if name in grown],
            ),
            scheduled_spec_decode_tokens={},
            num_scheduled_tokens=dict(counts),
            total_num_scheduled_tokens=sum(counts.values()),
            kv_connector_block_state=SimpleNamespace(boundary_state_offloads=self.offers),
        )
        orders = self.scheduler.orders(output)
        rows = [
            (self.of(name), list(self.of(name).all_token_ids), before[name], count)
            for name, count in counts.items()
        ]
        tables = {request: self.blocks.tables(request) for request, *_ in rows}
        self.under_way.append((orders, rows, tables))

    def load(self, request, loaded):
        """Give a request the blocks that its loads fill; it waits for them."""
        self.blocks.give_for_load(request, loaded)
        self.scheduler.admit(request, self.blocks.tables(request), loaded)
        request.computed = request.loaded = loaded
        self.loading[request.request_id] = request, set()

    def schedule(self, request, count, counts, before):
        counts[request.request_id], before[request.request_id] = count, request.computed
        request.computed += count
        at, rest = divmod(request.computed, SIZE)
        if "s" in self.kinds and not rest:
            group = self.kinds.index("s")
            offer = group + 1, request.others[group][at - 1], request.computed
            self.offers[request.request_id] = [offer]

    def of(self, name):
        return next(one for one in self.running if one.request_id == name)

    def preempt(self, request, counts):
        counts.pop(request.request_id, None)
        self.offers.pop(request.request_id, None)
        self.running.remove(request)
        request.status.name = "PREEMPTED"
        self.blocks.release(request)
        self.waiting.appendleft(request)

    def replace(self, request, computed, tokens):
        """The next input of a session: it replaces the tokens that do not count as computed."""
        self.running.remove(request)
        self.waiting.appendleft(request)
        request.computed = computed
        request.all_token_ids[computed:] = tokens
        request.num_prompt_tokens = request.num_tokens

    def finish(self, request):
        self.scheduler.end(request)
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        if request.request_id not in self.loading:  # else its loads have to end first
            self.blocks.release(request)

    def receive(self, rank, worker):
        """Requests whose loads have ended on every rank go on, or are computed."""
        received, failed = worker.received()
        for name in received:
            request, ranks = self.loading[name]
            ranks.add(rank)
            if name in failed:
                request.loaded = None
            if len(ranks) < len(self.workers):
                continue
            del self.loading[name]
            if name not in self.scheduler.requests.waiting:  # aborted meanwhile
                self.blocks.release(request)
                continue
            if request.loaded is None:
                self.late += 1
                self.blocks.release(request)
            else:
                request.processed = request.loaded
                self.found += request.loaded
            self.waiting.appendleft(request)

    def execute(self):
        """The oldest step: each worker stores, loads, and writes what the step computes."""
        orders, rows, tables = self.under_way.popleft()
        news, bad = {}, set()
        # Otherwise a graph of all layers is run.
        by_layer = self.draw.random() < 0.7 or self.layerwise
        for rank, worker in enumerate(self.workers):
            worker.store(orders)
            if not self.kinds:  # else as vLLM does where no request reads what the step loads
                worker.load()
            for name in self.layers[rank]:
                bad |= self.run_layer(rank, name, rows, tables, bad, by_layer=by_layer)
            self.end_step(rank, worker)
            news[rank] = worker.news(idle=not rows)
        broken = [request for request, *_ in rows if bad & set(tables[request][0])]
        for request, tokens, begin, count in rows:
            table = tables[request][0]
            stored = request.table[: len(table)] == table
            if stored and request in self.running:
                request.processed = max(request.processed, begin + count)
            if stored and request in self.running and request not in broken:
                self.sample(request, tokens, begin + count)
        self.scheduler.on_reports(news)
        self.broken += broken
        for request in broken:
            self.failed += 1
            if request in self.running or request in self.waiting:  # preempted since
                self.finish(request)

    def end_step(self, rank, worker):
        """End a step of a rank."""
        if self.kinds:
            worker.load()
        worker.finish()
        if self.kinds:
            self.receive(rank, worker)

    def run_layer(self, rank, name, rows, tables, bad, *, by_layer):
        """A layer of a rank; the blocks that were not loaded for it. vLLM calls for no state."""
        worker, by_layer = self.workers[rank], by_layer and name != "s"
        if by_layer:
            worker.wait_for_layer(name)
        bad = bad if self.kinds else bad | worker.bad_slots()
        self.compute(name, self.memory[rank][name], rows, tables, bad)
        if by_layer:
            worker.save_layer(name)
        return bad

    def sample(self, request, tokens, end):
        """The next token of a request whose last one was computed, or its end."""
        if end == len(tokens) == request.num_tokens:
            if len(tokens) - request.num_prompt_tokens == request.answer:
                self.served += 1
                self.finish(request)
            else:
                request.all_token_ids.append(sum(tokens) % 7)

    def compute(self, name, memory, rows, tables, bad):
        """A layer: read what comes before, which must be right, and write what is computed."""
        group = 1 + self.kinds.index(name) if name in self.kinds else 0
        for request, tokens, begin, count in rows:
            table, end, size = tables[request][group], begin + count, self.blocks.sizes[group]
            if name == "s":
                self.compute_state(memory, table, tokens, (begin, end))
                continue
            # Skip a request in flight whose load failed, or that reads a block that failed to load.
            if request in self.broken or not bad.isdisjoint(table[: begin // size]):
                continue
            first = passed(name, begin) // size if name in WINDOWS else 0
            for block in range(first, begin // size):
                assert self.right(memory[table[block]], tokens, block, size), (name, block, begin)
            for block in range(begin // size, -(-end // size)):
                whole = end >= (block + 1) * size
                memory[table[block]] = self.content(tokens, block, size) if whole else -1.0

    def compute_state(self, memory, table, tokens, span):
        """A layer goes on from the state after the tokens before, and leaves that after them."""
        begin, end = span
        if begin:
            found = memory[table[(begin - 1) // SIZE]]
            assert (found == state(tokens[:begin])).all(), (begin, found)
        memory[table[(end - 1) // SIZE]] = float(state(tokens[:end]))

    def content(self, tokens, block, size):
        number = mark(tokens, block, size)
        return number if self.pattern is None else self.pattern[:, :size] * number

    def right(self, found, tokens, block, size):
        wanted = self.content(tokens, block, size)
        if self.pattern is None or block < self.native:
            return bool((found == wanted).all())
        return bool(((found - wanted).abs() < self.error * mark(tokens, block, size)).all())

    def on_host(self, tokens):
        """The blocks of a sequence that are whole on host: their bytes are right."""
        sequence, scope = np.array(tokens, np.uint32), None
        if self.native:
            sequence = self.scheduler.cache.native.sequence(sequence)
            scope = self.scheduler.cache.native.scope(Scope())
        now, manager = self.scheduler.cache.clock(), self.scheduler.manager
        blocks = manager.lookup(sequence, now=now, keep=0, scope=scope).blocks
        stored = []
        for at, block in enumerate(blocks):
            for copy in block.copies:
                if copy.tier == 1 and copy.group:
                    self.check_part(copy, tokens, at)
                if copy.tier != 1 or copy.group or copy.layer_hi != LAYERS:
                    continue
                stored.append(at)
                for worker in self.workers if self.pattern is None else ():
                    rows = worker.host.layer_units(np.asarray([copy.slot]), 0)
                    for row in range(rows[0], rows[0] + worker.gpu.layers):
                        found = worker.host.layer_bytes(
                            copy.slot, (row - rows[0], row - rows[0] + 1)
                        )
                        self.check_pages(found, tokens, at, 0)
        return stored

    def check_part(self, copy, tokens, at):
        """A block of a group after the first on host has the right bytes."""
        for worker in self.workers if copy.layer_lo < copy.layer_hi else ():
            found = worker.host.groups[copy.group].block(copy.slot)
            if self.kinds[copy.group - 1] == "s":
                assert (found.view(torch.float32) == state(tokens[: (at + 1) * SIZE])).all()
            else:
                self.check_pages(found, tokens, at, copy.group)

    def check_pages(self, found, tokens, at, group):
        """A block of a layer has the right bytes, page by page, where its end needs them."""
        if self.pattern is not None:
            return  # in another format, which a step reads back
        pages, size = self.blocks.pages[group], self.blocks.sizes[group]
        kind, end = ("f" + self.kinds)[group], (at + 1) * SIZE
        for page, part in enumerate(found.view(torch.float32).reshape(-1).chunk(pages)):
            if kind in WINDOWS and at * SIZE + (page + 1) * size <= passed(kind, end):
                continue
            assert (part == mark(tokens, at * pages + page, size)).all(), (group, at, page)

    def step(self):
        self.plan()
        while len(self.under_way) > self.ahead:
            self.execute()

    def wait_for_store(self):
        """Wait until questions to a shared store are answered, as time passes between steps."""
        for waiting in list(self.scheduler.requests.waiting.values()):
            if waiting.store.question is not None:
                waiting.store.question.wait(self.scheduler.cache.clock)

    def drain(self):
        for _ in range(3000):
            if not (self.scheduler.busy or self.waiting or self.running or self.loading):
                while self.under_way:
                    self.execute()
                if not self.scheduler.busy:
                    return
            self.step()
            self.wait_for_store()
        pytest.fail(
            f"{len(self.running)} run, {self.scheduler.cache.moves.dispatch.pending} moves are left"
        )

    def close(self):
        for worker in self.workers:
            worker.close()
        self.scheduler.close()


def writer(_name, memory):
    """A kernel that writes rows into the memory of a layer."""

    def write(keys, values, slots):
        size = memory.shape[2]
        memory[slots // size, 0, slots % size] = keys
        memory[slots // size, 1, slots % size] = values

    return write


def make_engine(host=16, ranks=1, ahead=0, folder="", **settings):
    """An engine that computes each prompt in one step."""
    made = Engine(folder, ranks, ahead, 0, host, **settings)
    made.whole = True
    return made


def play(engine, requests, seed, aborts=0.1):
    """Conversations over three beginnings; some are aborted at any moment."""
    draw = random.Random(seed)
    heads = [[draw.randrange(9) for _ in range(16)] for _ in range(3)]
    for at in range(requests):
        tail = [draw.randrange(9) for _ in range(draw.randint(1, 12))]
        engine.add(str(at), draw.choice(heads)[: draw.randint(4, 16)] + tail, draw.randint(1, 9))
        for _ in range(draw.randint(1, 4)):
            engine.step()
            everybody = [*engine.running, *engine.waiting]
            if everybody and draw.random() < aborts:
                engine.finish(draw.choice(everybody))
    engine.drain()
    stats = engine.scheduler.manager.stats()
    assert (stats.leases, stats.moves) == (0, 0)
    assert engine.scheduler.requests.pins.blocks == 0
    assert sorted(engine.blocks.free) == list(range(1, engine.blocks.count))
    engine.stored_blocks = sum(len(engine.on_host(each.all_token_ids)) for each in engine.seen)
    engine.scheduler.manager.audit()


def stores(data):
    """Blocks that are stored at the beginning of a step, and inside it."""
    before = sum(int((Moves.from_bytes(each).src == 0).sum()) for each in data.moves)
    return before, sum(len(Moves.from_bytes(each)) for each in data.ahead)


def planned(counts, before=0, drafts=None):
    """The output of vLLM's scheduler for requests with these computed tokens."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=before) for name in counts
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[]),
        scheduled_spec_decode_tokens=drafts or {},
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
    )
