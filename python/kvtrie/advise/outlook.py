"""Outlook: the figures of one setting. Cost: none."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Outlook"]


@dataclass(frozen=True, slots=True)
class Outlook:
    """The figures of one setting.

    Attributes:
        host: bytes of host memory.
        disk: bytes of the disk.
        policy: the policy of both.
        beyond: whether a tier is larger than all that the window stored, so that the figures are
            lower limits.
        gpu: share of prompt tokens found in the GPU's memory, with the engine's cache as played.
        found: share of prompt tokens found on host and disk.
        saved: share of the time of all prefills that these tokens save; None without metrics and
            measured passes.
        ttft_mean_s: mean of the seconds that requests with such tokens save.
        ttft_median_s: median of them.
        helped: share of requests with such tokens.
        cost: share of the computation of all prefills that these tokens save, by context; without
            the time of loads.
    """

    host: int
    disk: int
    policy: str
    beyond: bool
    gpu: float
    found: float
    saved: float | None
    ttft_mean_s: float | None
    ttft_median_s: float | None
    helped: float
    cost: float
