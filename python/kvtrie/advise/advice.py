"""Advice: predicted hits and savings of host memory and disks of several sizes, and a choice.

Invariant: a hit that takes longer to load than to compute does not count. Cost: a pass over the
window for all sizes of LRU, and a replay per size for each further policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvtrie.advise import prefill
from kvtrie.advise.outlook import Outlook
from kvtrie.advise.predict import Setting, bound, play, play_lru
from kvtrie.advise.tier_bytes import TierBytes
from kvtrie.advise.worth import worth_of
from kvtrie.errors import ConfigError
from kvtrie.settings.resume import has_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from kvtrie.advise.predict import Bound, Played
    from kvtrie.advise.server_metrics import Traffic
    from kvtrie.advise.worth import Worth
    from kvtrie.model.shape import ModelShape
    from kvtrie.settings.resume import ResumePoints
    from kvtrie.settings.tier import Lane
    from kvtrie.sim.passes import Passes
    from kvtrie.sim.trace import TraceRequest

__all__ = ["Advice", "Question", "advise", "usual_hosts"]

_POINT = 0.01
_ON_GPU = 0.9
_NS = 1e9
_STEPS = 6
_FINE = 20
_LEAST_COUNTED = 10


@dataclass(frozen=True, slots=True)
class Question:
    """The settings to predict for.

    Attributes:
        model: decides bytes.
        block_tokens: tokens of a block.
        gpu: bytes of the engine's cache.
        hosts: sizes of host memory in bytes. Empty takes the usual sizes.
        disk: bytes of a disk to combine with each size. None takes the bytes of all stored blocks,
            0 plays no disk.
        policies: policies of host and disk.
        lanes: the lanes for loads from host and from disk.
        traffic: work of the server in the window, if its metrics are known.
        coverage: tokens of the rebuilt prompts per token of all prompts. 1 without metrics.
        resume: resumable borders, if groups of layers are kept apart. None keeps all tokens of all
            layers.
        passes: measured step times of the engine. None takes the mean time of the metrics for each
            computed token.
    """

    model: ModelShape
    block_tokens: int
    gpu: int
    hosts: Sequence[int] = ()
    disk: int | None = None
    policies: Sequence[str] = ("lru", "learned")
    lanes: tuple[Lane, Lane] | None = None
    traffic: Traffic | None = None
    coverage: float = 1.0
    resume: ResumePoints | None = None
    passes: Passes | None = None

    def sizes(self) -> TierBytes:
        """Return the sizes of blocks."""
        return TierBytes.of(self.model, self.block_tokens, self.resume)

    def prefill_s(
        self, gpu: NDArray[np.int64], found: NDArray[np.int64], prompt: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Return the seconds of computing prompts without host and disk, and with them.

        With measured passes and metrics, the passes are scaled to the server's reported time, since
        the server computes requests concurrently.

        Args:
            gpu: tokens found in the GPU's memory.
            found: further tokens found on host and disk.
            prompt: tokens of the prompts.
        """
        token_s = self.traffic.token_s if self.traffic is not None else None
        if self.passes is None:
            if token_s is None:
                return None
            alone, below = (one.astype(np.float64) for one in (prompt - gpu, prompt - gpu - found))
            return alone * token_s, below * token_s
        alone = prefill.seconds(self.passes, gpu, prompt)
        below = prefill.seconds(self.passes, gpu + found, prompt)
        scale = 1.0
        if token_s is not None and alone.any():
            scale = token_s * float((prompt - gpu).sum()) / float(alone.sum())
        return alone * scale, below * scale


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer to a question.

    Attributes:
        window: facts of the window.
        gpu: share of prompt tokens found in the GPU's memory alone.
        most: share of prompt tokens found by a cache of unlimited size.
        rows: all settings.
        chosen: the smallest setting within a point of the largest. None with nothing to gain.
        half: with a GPU cache half as large, the chosen setting or the GPU alone.
        half_gpu_alone: share found in the GPU's memory alone at half its size.
        nothing: why there is nothing to gain, or None.
        refused: requests too large for the engine's cache as played.
        worth: gain of each size.
    """

    window: Bound
    gpu: float
    most: float
    rows: tuple[Outlook, ...]
    chosen: Outlook | None
    half: Outlook
    half_gpu_alone: float
    nothing: str | None
    refused: int
    worth: Worth


def usual_hosts(gpu: int, stored: int) -> list[int]:
    """Return sizes of host memory in bytes: the GPU cache's size, doubled until all blocks fit.

    Args:
        gpu: bytes of the engine's cache.
        stored: bytes of all blocks stored in the window.
    """
    sizes = [gpu]
    while sizes[-1] < stored and len(sizes) < _STEPS:
        sizes.append(2 * sizes[-1])
    return sizes


def advise(
    requests: Callable[[], Iterable[TraceRequest]],
    question: Question,
    watch: Callable[[Sequence[Setting]], Iterable[Setting]] = iter,
) -> Advice:
    """Predict every setting, and choose.

    Args:
        requests: returns the window's requests, in order of arrival, at each call.
        question: the settings.
        watch: passes on the settings as they are played.

    Raises:
        ConfigError: an unknown policy, too few requests, or a size below a block.
    """
    size = question.block_tokens
    window = bound(requests, size)
    if window.counted < _LEAST_COUNTED:
        raise ConfigError(
            f"{window.requests} requests, {window.counted} of them in the last third of the "
            f"window: at least {_LEAST_COUNTED} wanted there; listen for longer"
        )
    sizes = question.sizes()
    gpu = max(sizes.rounded(question.gpu), sizes.least)
    smaller = max(sizes.least, sizes.rounded(gpu // 2))
    settings, fine = _settings(window, question, gpu)
    lru = _played_lru(
        requests, [Setting(gpu), Setting(smaller), *settings, *fine], window, question
    )

    def played(setting: Setting) -> Played:
        if setting in lru:
            return lru[setting]
        return play(
            requests(),
            setting,
            model=question.model,
            block_tokens=size,
            since=window.since,
            resume=question.resume,
        )

    alone = played(Setting(gpu))
    rows = tuple(_outlook(one, played(one), window, question) for one in watch(settings))
    chosen, nothing = _choose(rows, alone, window, question)
    half = Setting(smaller)
    if chosen is not None:
        half = Setting(smaller, chosen.host, chosen.disk, chosen.policy)
    halved = played(Setting(smaller))
    return Advice(
        window,
        _share(int(alone.found.sum()), window, question),
        _share(window.repeated, window, question),
        rows,
        chosen,
        _outlook(half, played(half), window, question),
        _share(int(halved.found.sum()), window, question),
        nothing,
        alone.refused,
        worth_of(rows, [_outlook(one, lru[one], window, question) for one in fine if one in lru]),
    )


def _settings(window: Bound, question: Question, gpu: int) -> tuple[list[Setting], list[Setting]]:
    """Return the settings to play, and sizes between them if `lru` is among the policies.

    Raises:
        ConfigError: a size below a block.
    """
    sizes = question.sizes()
    stored = sizes.stored(window)
    hosts = question.hosts or usual_hosts(gpu, stored)
    disk = max(stored, sizes.least) if question.disk is None else question.disk
    for given in (*hosts, *((disk,) if disk else ())):
        if given < sizes.least:
            raise ConfigError(f"a size of {given} bytes is below a block of {sizes.least} bytes")
    settings = [
        Setting(gpu, sizes.rounded(host), sizes.rounded(below), policy)
        for policy in question.policies
        for below in ((0, disk) if disk else (0,))
        for host in hosts
    ]
    if "lru" not in question.policies:
        return settings, []
    between = np.geomspace(min(hosts), max(hosts), _FINE).astype(np.int64).tolist()
    return settings, [Setting(gpu, sizes.rounded(host)) for host in between]


def _played_lru(
    requests: Callable[[], Iterable[TraceRequest]],
    settings: Sequence[Setting],
    window: Bound,
    question: Question,
) -> dict[Setting, Played]:
    """Play the settings of LRU in one pass, or none if groups of layers are kept apart."""
    if has_groups(question.model, question.resume):
        return {}
    return play_lru(
        requests(),
        [one for one in settings if one.policy == "lru"],
        model=question.model,
        block_tokens=question.block_tokens,
        since=window.since,
    )


def _share(tokens: int, window: Bound, question: Question) -> float:
    """Return tokens as a share of all prompt tokens."""
    return tokens / window.prompt * question.coverage if window.prompt else 0.0


def _outlook(setting: Setting, played: Played, window: Bound, question: Question) -> Outlook:
    below = played.found[:, 1:]
    kinds = [kind for kind, room in ((0, setting.host), (1, setting.disk)) if room]
    load_s = np.zeros(len(below))
    if question.lanes is not None:
        carried = question.sizes().carried(below)
        for at, kind in enumerate(kinds):
            lane, bytes_ = question.lanes[kind], carried[:, at]
            taken = bytes_ / lane.bytes_per_s + lane.latency_ns / _NS
            load_s += np.where(bytes_ > 0, taken, 0.0)
    found = below.sum(axis=1) if kinds else np.zeros(len(below), dtype=np.int64)
    gpu = played.found[:, 0]
    spared = None
    times = question.prefill_s(gpu, found, played.prompt)
    if times is not None:
        gain = times[0] - times[1] - load_s
        found = np.where(gain > 0, found, 0)
        spared = np.where(gain > 0, gain, 0.0)
    helped = found > 0
    saved = mean = median = None
    if spared is not None and times is not None:
        computed = float(times[0].sum())
        saved = float(spared.sum() / computed) if computed > 0 else 0.0
        some = spared[helped]
        mean, median = (float(some.mean()), float(np.median(some))) if len(some) else (0.0, 0.0)
    return Outlook(
        host=setting.host,
        disk=setting.disk,
        policy=setting.policy,
        beyond=max(setting.host, setting.disk) > question.sizes().stored(window),
        gpu=_share(int(played.found[:, 0].sum()), window, question),
        found=_share(int(found.sum()), window, question),
        saved=saved,
        ttft_mean_s=mean,
        ttft_median_s=median,
        helped=float(helped.mean()) if len(helped) else 0.0,
        cost=_cost(gpu, found, played.prompt, question),
    )


def _cost(
    gpu: NDArray[np.int64], found: NDArray[np.int64], prompt: NDArray[np.int64], question: Question
) -> float:
    """Return the saved share of all computation."""
    of = prefill.computation
    if (passes := question.passes) is not None:
        of = partial(prefill.seconds, passes)
    alone = float(of(gpu, prompt).sum())
    return 1 - float(of(gpu + found, prompt).sum()) / alone if alone else 0.0


def _choose(
    rows: Sequence[Outlook], alone: Played, window: Bound, question: Question
) -> tuple[Outlook | None, str | None]:
    """Return the smallest setting within a point of the largest, or the reason for none.

    Host memory alone is preferred: a disk is chosen only if it finds a point more than any host.
    """
    plain = [row for row in rows if not row.disk]
    best, most = max(row.found for row in plain), max(row.found for row in rows)
    if most < _POINT:
        could, has = window.repeated, int(alone.found.sum())
        if could and has >= _ON_GPU * could:
            why = "all hits are on the GPU already"
        elif _share(could, window, question) < _POINT:
            why = "prompts are new content"
        else:
            why = "prompts that return had left every size played; play larger ones with --host"
        share = 100 * _share(has, window, question)
        at_most = 100 * _share(could, window, question)
        return None, (
            f"{why}: the GPU finds {share:.1f} % of prompt tokens, a cache of any size "
            f"{at_most:.1f} %"
        )
    worth = [row for row in (plain if best > most - _POINT else rows) if row.found > most - _POINT]
    # Least memory first, then the largest share found.
    return min(worth, key=lambda row: (row.host, row.disk, -row.found)), None
