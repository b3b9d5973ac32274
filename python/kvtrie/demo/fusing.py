"""Fusing: a question over passages with known KV, answered in three ways.

The ways are a full prefill, plain reuse of the passages' KV, and fusion, which recomputes a few of
the passages' tokens. For each way the time to the first token, the distance of its next-token
distribution from the full prefill's, and the answer are shown.
Invariant: all ways read the same tokens. Exit status 0 if fusion is nearer to the full prefill than
plain reuse, 1 if not, 2 if it cannot start. Cost: half a minute with SmolLM2 on two cores.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtrie import BlockManager, ModelShape, Tier
from kvtrie.demo.fusion_picture import draw_fusion
from kvtrie.demo.model import Speaker, smollm, tiny
from kvtrie.demo.passages import FAMILIAR, PASSAGES, QUESTION, SYSTEM
from kvtrie.engines.transformers import Decoder, fingerprint
from kvtrie.engines.transformers.open_model import close_executor
from kvtrie.engines.transformers.opening import check_written
from kvtrie.errors import ConfigError, KvtrieError
from kvtrie.fuse import (
    CacheStore,
    Context,
    Controller,
    DeviationProfile,
    Fused,
    Fusor,
    Monitor,
)
from kvtrie.fuse.chunker import BySize, Given
from kvtrie.fuse.gate import divergence
from kvtrie.fuse.profile import load_profile
from kvtrie.input import read_text
from kvtrie.printable import MESSAGE, printable
from kvtrie.settings.argument import word
from kvtrie.settings.sizes import path_and_size
from kvtrie.tiers import default_device, open_pools
from kvtrie.transfer import Executor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvtrie.fuse.store import Kind

__all__ = ["FuseOptions", "Way", "fuse"]

_BLOCK_TOKENS = 16
_PASSAGE = 256  # tokens of a passage when cutting a single file
_PLAIN_WIDTH = 120


@dataclass(frozen=True, slots=True)
class FuseOptions:
    """Options of `kvtrie fuse`.

    Attributes:
        passages: files, each a passage. Empty takes the built-in passages.
        question: the question. None takes the built-in question.
        tiny: a random model instead of SmolLM2.
        select: choice of the tokens, see `kvtrie.fuse.select`.
        ratio: share of the passages' tokens to recompute. None leaves it to the controller, or .15.
        controller: a profile for a controller of the ratio.
        deviation: a file of a measured `DeviationProfile`. Its rankings choose the tokens instead
            of `select`. Its shares are the ratios unless `ratio` is given, or the controller's.
        measure: path for the profile of a fusion with all tokens recomputed, or None.
        monitor: compare the fusion with a full prefill.
        tier: tier of the passages before the fusion: "gpu", "host", or `disk:PATH:SIZE`, a folder
            in which the next run finds their KV.
        split: maximum tokens of a passage, for cutting files at ends of sentences. None cuts a
            single file into passages of 256 tokens, and takes each of several files as a passage.
        plot: path for a picture of the computed tokens and layers, or None.
        answer_tokens: tokens of each answer.
        json: print a JSON document instead of a table.
    """

    passages: Sequence[Path] = ()
    question: str | None = None
    tiny: bool = False
    select: str = "first+question"
    ratio: float | None = None
    controller: Path | None = None
    deviation: Path | None = None
    measure: Path | None = None
    monitor: bool = False
    tier: str = "host"
    split: int | None = None
    plot: Path | None = None
    answer_tokens: int = 6
    json: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """A way to answer.

    Attributes:
        name: its name.
        seconds: time to the logits of its first token.
        kl: divergence of these logits from the full prefill's, in nats.
        computed: computed share of the passages' (token, layer) pairs.
        answer: its answer.
    """

    name: str
    seconds: float
    kl: float
    computed: float
    answer: str


def fuse(options: FuseOptions) -> int:
    """Answer in three ways, print the results and return the exit status."""
    console = Console(
        stderr=options.json,
        highlight=False,
        emoji=False,  # for paths as a:x:b
        width=None if sys.stdout.isatty() else _PLAIN_WIDTH,
    )
    try:
        if options.tiny:
            torch.set_num_threads(1)  # threads slow down so small a model
        texts = [read_text(path, "the passage") for path in options.passages] or list(PASSAGES)
        question = options.question or QUESTION
        speaker = tiny() if options.tiny else smollm(console)
        torch.nn.Module.to(speaker.model, default_device())  # the device of the first tier
        return _run(options, speaker, texts, question, console)
    except KvtrieError as error:
        console.print(str(error), style="red", markup=False)
        return 2


def _run(
    options: FuseOptions, speaker: Speaker, texts: Sequence[str], question: str, console: Console
) -> int:
    context = Context(_passages(options, speaker, texts), speaker.tokens(question))
    store, kind = _store(speaker, context, options.tier)
    try:
        return _compare(options, speaker, context, store, kind, console=console)
    finally:
        close_executor(store.executor)


def _passages(
    options: FuseOptions, speaker: Speaker, texts: Sequence[str]
) -> list[NDArray[np.int64]]:
    """Return the tokens of each passage.

    Raises:
        ConfigError: a size below 1.
    """
    whole = Given()([speaker.tokens(text) for text in texts])
    size = _PASSAGE if options.split is None and len(whole) == 1 else options.split
    if size is None:
        return whole
    ends = (speaker.tokens(mark)[-1:] for mark in (".", "!", "?", "\n"))
    cut = BySize(size, frozenset(token for last in ends for token in last))
    return [passage for text in whole for passage in cut(text)]


def _compare(
    options: FuseOptions,
    speaker: Speaker,
    context: Context,
    store: CacheStore,
    kind: Kind,
    *,
    console: Console,
) -> int:
    """Answer in the three ways, and print the results."""
    chunks = [chunk.tokens for chunk in context.chunks]
    known = len(store.lookup(chunks).found)
    runner = _Runner(speaker, context, store, options.answer_tokens)
    decoder = Decoder(speaker.model)
    reuse = Fusor(decoder, store, ratio=0.0)
    fusion = _fusion(options, decoder, store)
    # The cache has the passages' KV from an earlier request with a different order.
    before = FAMILIAR if len(context.chunks) == len(FAMILIAR) else range(len(context.chunks))
    with console.status("computing each passage alone, once"):
        began = time.perf_counter()
        reuse.fuse(Context([context.chunks[at] for at in before], context.query)).close()
        isolated_s = time.perf_counter() - began
        store.executor.drain()
    with console.status("full prefill"):
        first, truth = runner.prefill()
    results = [first]
    fused: Fused | None = None
    for name, fusor in (("plain reuse", reuse), ("fusion", fusion)):
        for _ in store.executor.manager.tiers:  # a tier per step
            store.place(chunks, kind)
            store.executor.poll()
            store.executor.drain()
        with console.status(name):
            way, fused = runner.fused(name, fusor, truth)
        results.append(way)
    assert fused is not None  # noqa: S101 - fusion came last
    if options.measure is not None:
        with Fusor(decoder, store, select="all", ratio=1.0).fuse(context) as whole:
            DeviationProfile.measured(whole).write(options.measure)
    store.executor.save()
    ok = results[2].kl < results[1].kl
    if options.plot is not None:
        tokens = sum(len(chunk.tokens) for chunk in context.chunks)
        title = (
            f"{speaker.name}: {results[2].computed:.0%} of {tokens} tokens' KV computed again, "
            f"first token after {results[2].seconds:.2f} s instead of {results[0].seconds:.2f} s"
        )
        draw_fusion(options.plot, title, fused.log)
    if options.json:
        document = {"model": speaker.name, "alone_s": isolated_s, "known": known, "ok": ok}
        document |= _document(context, results, fused)
        sys.stdout.write(json.dumps(document) + "\n")
        return 0 if ok else 1
    _show(console, runner, results, fused, isolated_s=isolated_s, known=known)
    if options.plot is not None:
        console.print(f"Which tokens were computed at which layers: {escape(str(options.plot))}")
    return 0 if ok else 1


def _document(context: Context, ways: Sequence[Way], fused: Fused) -> dict[str, Any]:
    """Return tokens, ways and the log of the fusion, for a script."""
    return {
        "tokens": [len(chunk.tokens) for chunk in context.chunks],
        "query": len(context.query),
        "ways": [{name: getattr(way, name) for name in Way.__slots__} for way in ways],
        "quality": fused.quality._asdict(),
        "log": fused.log.as_dict(),
    }


def _fusion(options: FuseOptions, decoder: Decoder, store: CacheStore) -> Fusor:
    """Return the requested fusor."""
    measured = None if options.deviation is None else DeviationProfile.read(options.deviation)
    shares = measured if measured is not None and measured.shares else None
    controller = None
    if options.controller is not None:
        controller = Controller(load_profile(options.controller), store, deviation=shares)
    ratio = options.ratio
    if ratio is None and controller is None:
        ratio = shares
    return Fusor(
        decoder,
        store,
        select=measured if measured is not None and measured.rankings else options.select,
        ratio=ratio,
        controller=controller,
        monitor=Monitor(rate=1.0) if options.monitor else None,
    )


def _store(speaker: Speaker, context: Context, place: str) -> tuple[CacheStore, Kind]:
    """Open a store with room for the passages and a fused cache, and for the passages below it.

    Returns:
        The store, with the passages found on a disk, and the kind of tier in `place`.

    Raises:
        ConfigError: an unknown tier, or an unwritable folder.
    """
    model = speaker.model
    dtype = str(model.dtype).removeprefix("torch.")
    shape = ModelShape.from_config(model.config, dtype=dtype, fingerprint=fingerprint(model))
    prefix = speaker.tokens(SYSTEM)
    tokens = sum(len(chunk.tokens) for chunk in context.chunks) + len(context.query) + len(prefix)
    each = -(-tokens // _BLOCK_TOKENS) + 2 * len(context.chunks)
    tiers = [Tier("gpu", blocks=2 * each + 4), Tier("host", blocks=each + 4)]
    name, _, disk = place.partition(":")
    kind = cast("Kind", word("--tier", name, ("gpu", "host", "disk")))
    if kind == "disk":
        path, room = path_and_size("--tier disk:", disk)
        tiers.append(Tier("disk", bytes=room, path=path))
    elif disk:
        raise ConfigError(f"--tier is {place!r}, gpu, host or disk:PATH:SIZE wanted")
    manager = BlockManager(shape, tiers, block_tokens=_BLOCK_TOKENS)
    executor = Executor(manager, list(open_pools(shape, tiers, _BLOCK_TOKENS)))
    try:
        check_written(executor.pools)
        executor.restore()
    except BaseException:
        close_executor(executor)
        raise
    return CacheStore(executor, Given(), prefix=prefix), kind


@dataclass(frozen=True, slots=True)
class _Runner:
    """A question with its model and store."""

    speaker: Speaker
    context: Context
    store: CacheStore
    answer_tokens: int

    def prefill(self) -> tuple[Way, torch.Tensor]:
        """Return the full prefill as a way, and its logits as the reference."""
        chunks = (chunk.tokens for chunk in self.context.chunks)
        ids = np.concatenate([self.store.prefix, *chunks, self.context.query])
        rows = torch.as_tensor(ids)[None].to(self.speaker.model.device)
        began = time.perf_counter()
        logits = self._logits(rows)
        seconds = time.perf_counter() - began
        return Way("full prefill", seconds, 0.0, 1.0, self._answer(rows)), logits

    def fused(self, name: str, fusor: Fusor, truth: torch.Tensor) -> tuple[Way, Fused]:
        """Return the result of a fusor as a way, and its closed fusion."""
        began = time.perf_counter()
        with fusor.fuse(self.context) as fused:
            logits = self._logits(fused.ids[:, -1:], fused.cache)
            seconds = time.perf_counter() - began
            fused.cache.crop(-1)  # `generate` computes the last token itself
            answer = self._answer(fused.ids, fused.cache)
        return Way(name, seconds, divergence(truth, logits), fused.log.computed, answer), fused

    @torch.no_grad()
    def _logits(self, ids: torch.Tensor, cache: Any = None) -> torch.Tensor:  # noqa: ANN401 - an engine's
        model = cast("Any", self.speaker.model)
        logits: torch.Tensor = model(ids, past_key_values=cache, logits_to_keep=1).logits
        return logits[0, -1].cpu()

    def _answer(self, ids: torch.Tensor, cache: Any = None) -> str:  # noqa: ANN401 - an engine's
        generate: Callable[..., torch.Tensor] = cast("Any", self.speaker.model).generate
        output = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=self.answer_tokens,
            do_sample=False,
        )
        tokens = cast("list[int]", output[0, ids.shape[1] :].cpu().numpy().tolist())
        text = self.speaker.text(tokens)
        return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _show(
    console: Console,
    runner: _Runner,
    ways: Sequence[Way],
    fused: Fused,
    *,
    isolated_s: float,
    known: int,
) -> None:
    context = runner.context
    tokens = sum(len(chunk.tokens) for chunk in context.chunks)
    console.print(
        f"{runner.speaker.name}: a question of {len(context.query)} tokens over "
        f"{len(context.chunks)} passages of {tokens}, each computed alone before "
        f"({isolated_s:.1f} s, once; {known} were known)\n"
    )
    table = Table("way", "first token", "of full", "computed", "KL", "answer", box=None)
    for way in ways:
        table.add_row(
            way.name,
            f"{way.seconds:.2f} s",
            f"{way.seconds / ways[0].seconds:.0%}",
            f"{way.computed:.0%}",
            f"{way.kl:.4f}",
            escape(printable(way.answer, MESSAGE)),
        )
    console.print(table)
    spent = {name: each / 1e9 for name, each in fused.log.nanoseconds.items() if each > 10**5}
    parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in spent.items())
    console.print(f"\nFusion: {parts}; overlapped loading {fused.log.load_ns / 1e9:.2f} s")
    if fused.quality.score is not None:
        console.print(f"Quality {fused.quality.score:.2f}, estimated by {fused.quality.how}")
