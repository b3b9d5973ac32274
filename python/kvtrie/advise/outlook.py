"""Outlook: the figures of a setting. Cost: none."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Outlook"]


@dataclass(frozen=True, slots=True)
class Outlook:
    """The figures of a setting.

    Attributes:
        host: bytes of host memory.
        disk: bytes of the disk.
        policy: the policy of both.
        beyond: whether a tier is larger than all blocks stored in the window. The figures are then
            lower limits.
        gpu: share of prompt tokens found in the GPU's memory, with the engine's cache as played.
        found: share of prompt tokens found on host and disk.
        saved: share of the time of all prefills saved by these tokens. None without metrics and
            measured passes.
        ttft_mean_s: mean seconds saved per request with these tokens.
        ttft_median_s: median seconds saved per request with these tokens.
        helped: share of requests with these tokens.
        cost: share of the computation of all prefills saved by these tokens, by context, without
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
