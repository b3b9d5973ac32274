"""Time to first token over chunks in a new order: full prefill, prefix reuse and fusion.

SmolLM2-135M on one thread reads six chunks of 256 tokens of Python's documentation and a question.
Their KV is known, each computed alone after the prefix, and is on the host or on a disk. All
ways are played in turn, so that ratios are of one run.
Cost: half a minute a round on an idle core; `--quick` seconds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

import numpy as np
import torch
from rich.console import Console

from benches.core.place import place
from benches.record import Result, document, keep, options, show
from kvtrie import BlockManager, Layout, ModelShape, Tier
from kvtrie.cli.progress import watched
from kvtrie.demo.model import smollm, tiny
from kvtrie.engines.transformers import Decoder, KvtrieCache, fingerprint
from kvtrie.fuse import CacheStore, Context, Fusor
from kvtrie.fuse.backing import Leased
from kvtrie.fuse.chunker import Given
from kvtrie.tiers import open_pools
from kvtrie.transfer import Executor, LayerwiseEngine

OUT = Path(__file__).parent / "results" / "fusion.json"
BLOCK, CHUNKS, TOKENS = 16, 6, 256
PREFIX, QUESTION = "Answer by the manual.\n\n", "\n\nQuestion: what is a slice?\nAnswer:"
GOALS = {"fusion": 1 / 0.35, "ranking and scatter": 1 / 0.05, "waiting": 1 / 0.2, "memory": 1.0}
"""Goals: the factor by which each is better than its peer; `results` says which peer."""
FORMATS = {
    "int8 host": Layout(dtype="int8", scales="token"),
    "fp8 host": Layout(dtype="float8_e4m3fn", scales="token"),
}


@dataclass(slots=True)
class Sample:
    """One fusion: seconds to the first token, and of its parts."""

    seconds: float
    chosen: float
    waited: float
    loaded: float
    buffers: int


class World:
    """A model and a store whose chunks are on one kind of tier, in the host tier's layout."""

    def __init__(self, speaker, decoder, kind, folder, tokens, *, layout=None):
        model = speaker.model
        shape = ModelShape.from_config(model.config, fingerprint=fingerprint(model))
        blocks = tokens // BLOCK + 2 * CHUNKS
        tiers = [
            Tier("gpu", blocks=2 * blocks + 8),
            Tier("host", blocks=blocks, layout=layout),
        ]
        if kind == "disk":
            tiers.append(Tier("disk", blocks=2 * blocks, path=Path(folder)))
        manager = BlockManager(shape, tiers, block_tokens=BLOCK)
        self.executor = Executor(manager, open_pools(shape, tiers, BLOCK))
        self.store = CacheStore(self.executor, Given(), prefix=speaker.tokens(PREFIX))
        self.speaker, self.decoder, self.kind = speaker, decoder, kind

    def sink(self, context):
        """Push all chunks down to the tier."""
        kinds = [tier.kind for tier in self.executor.manager.tiers][1:]
        for kind in kinds:
            self.store.place([chunk.tokens for chunk in context.chunks], kind)
            self.executor.poll()
            self.executor.drain()
        found = self.store.lookup([chunk.tokens for chunk in context.chunks]).found
        assert [one.tier for one in found] == [self.kind] * CHUNKS, found

    def fuse(self, context, **how):
        """Seconds to the first token through fusion, and where they went."""
        fusor = Fusor(self.decoder, self.store, **how)
        self.sink(context)
        staging = []
        buffer = Leased.buffer

        def noted(leased, layer, tokens):
            pair = buffer(leased, layer, tokens)
            staging.append(sum(each.nbytes for each in pair))
            return pair

        Leased.buffer = noted
        try:
            began = time.perf_counter()
            with fusor.fuse(context) as fused:
                first(self.speaker.model, fused.ids[:, -1:], fused.cache)
                seconds = time.perf_counter() - began
                spent = fused.log.nanoseconds
        finally:
            Leased.buffer = buffer
        chosen = spent["select"] + spent.get("scatter", 0)
        staged = LayerwiseEngine.of(self.store.executor).staged_bytes
        return Sample(
            seconds,
            chosen / 1e9,
            spent["wait"] / 1e9,
            fused.log.load_ns / 1e9,
            max(staging) + staged,
        )


@torch.no_grad()
def first(model, ids, cache=None):
    """The logits of the next token."""
    return model(ids, past_key_values=cache, logits_to_keep=1, use_cache=True).logits[0, -1]


def prefix_reuse(world, ids):
    """Seconds to the first token where the prefix and the first chunk alone are found again."""
    began = time.perf_counter()
    with KvtrieCache(world.speaker.model, world.executor, ids) as cache:
        past = cache.get_seq_length()
        first(world.speaker.model, ids[:, past:], cache)
    seconds = time.perf_counter() - began
    # The next request must not find this one's blocks.
    world.executor.manager.reset()
    return seconds, past


def loss(speaker, world, context, whole):
    """Nats by which fused chunks of a tier lead away from the full prefill's next token."""
    world.sink(context)
    with Fusor(world.decoder, world.store).fuse(context) as fused:
        mine = first(speaker.model, fused.ids[:, -1:], fused.cache)
    truth, mine = (
        each.double().log_softmax(dim=-1) for each in (first(speaker.model, whole), mine)
    )
    return float((truth.exp() * (truth - mine)).sum())


def play(speaker, rounds, size):
    """Samples by way; fusions as `Sample`, losses in nats by format, the others as seconds."""
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = np.array(speaker.tokens(text[: 12 * CHUNKS * size]))
    chunks = [ids[at * size : (at + 1) * size] for at in range(CHUNKS)]
    context = Context(chunks, speaker.tokens(QUESTION))
    decoder = Decoder(speaker.model)
    parts = [np.array(speaker.tokens(PREFIX)), *chunks, context.query]
    whole = torch.from_numpy(np.concatenate(parts))[None]
    seen = {"full prefill": [], "prefix reuse": [], "fusion, host": [], "fusion, disk": []}
    seen |= {"plain reuse, host": [], "values, host": []}
    with tempfile.TemporaryDirectory() as folder:
        worlds = {
            kind: World(speaker, decoder, kind, folder, whole.shape[1]) for kind in ("host", "disk")
        }
        single = World(speaker, decoder, "host", folder, whole.shape[1])
        coded = {
            name: World(speaker, decoder, "host", folder, whole.shape[1], layout=layout)
            for name, layout in FORMATS.items()
        }
        for world in (
            *worlds.values(),
            *coded.values(),
        ):  # every chunk is computed once, and the model passes the gate
            Fusor(decoder, world.store, ratio=0.0).fuse(context).close()
            world.executor.drain()
        for _ in watched(range(rounds), "rounds", quiet=False):
            began = time.perf_counter()
            first(speaker.model, whole)
            seen["full prefill"].append(time.perf_counter() - began)
            head = whole[:, : -len(context.query) - (CHUNKS - 1) * size]
            with KvtrieCache(speaker.model, single.executor, head) as cache:
                first(speaker.model, head, cache)
            seen["prefix reuse"].append(prefix_reuse(single, whole)[0])
            for kind, world in worlds.items():
                seen[f"fusion, {kind}"].append(world.fuse(context))
            seen["plain reuse, host"].append(worlds["host"].fuse(context, ratio=0.0))
            seen["values, host"].append(worlds["host"].fuse(context, select="values"))
        losses = {"exact": loss(speaker, worlds["host"], context, whole)}
        losses |= {name: loss(speaker, one, context, whole) for name, one in coded.items()}
        for world in (*worlds.values(), *coded.values(), single):
            world.executor.close()
    layer = worlds["host"].executor.manager.model.layer_bytes(BLOCK) // BLOCK * whole.shape[1]
    return seen, layer, losses


def results(seen, layer, losses):
    """Rows of medians over the rounds, each compared with its peer."""
    full = "full prefill", median(seen["full prefill"])

    def row(what, ours, peer, goal=None, unit="s"):
        name, theirs = peer
        ratio = theirs / ours
        reached = None if goal is None else ratio >= goal
        return Result(what, ours, unit, theirs, name, round(ratio, 2), goal, reached)

    rows = [row("prefix reuse", median(seen["prefix reuse"]), full)]
    for name, samples in seen.items():
        if not isinstance(samples[0], Sample):
            continue
        took = median(each.seconds for each in samples)
        main = name.startswith("fusion")
        goal = GOALS["fusion"] if main else None
        rows.append(row(name, took, full, goal))
        if main:
            chosen, waited, loaded = (
                median(getattr(each, part) for each in samples)
                for part in ("chosen", "waited", "loaded")
            )
            goal = GOALS["ranking and scatter"]
            rows.append(row(f"ranking and scatter, {name}", chosen, full, goal))
            # Loading that is longer than all the rest cannot hide.
            goal = GOALS["waiting"] if loaded < took else None
            rows.append(row(f"waiting, {name}", waited, ("loading", loaded), goal))
    most = max(each.buffers for each in seen["fusion, disk"])
    rows.append(row("buffers", most, ("three layers", 3 * layer), GOALS["memory"], "bytes"))
    exact = "KL of exact pools", losses.pop("exact")
    rows.extend(row(f"KL, {name}", ours, exact, unit="nats") for name, ours in losses.items())
    return rows


def main() -> int:
    """Play, write, print."""
    parser = options(__doc__, OUT)
    parser.add_argument("--rounds", type=int, help="default: 5")
    given = parser.parse_args()
    torch.set_num_threads(1)
    speaker = tiny() if given.quick else smollm(Console(stderr=True))
    rounds = given.rounds or (1 if given.quick else 5)
    tokens = 32 if given.quick else TOKENS
    rows = results(*play(speaker, rounds, tokens))
    where = {**place(), "model": speaker.name, "torch": torch.__version__, "rounds": rounds}
    where["threads"], where["chunks"], where["chunk_tokens"] = 1, CHUNKS, tokens
    if not keep(given, document(where, rows)):
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
