"""Check: what must hold of the samples that begin and end a soak.

Cost: none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benches.soak.engine import WORKERS
from benches.soak.slope import MOST

if TYPE_CHECKING:
    from benches.soak.sample import Sample
    from benches.soak.slope import Slope

FLAT = 0.02


@dataclass(frozen=True)
class Check:
    """One thing that must hold.

    Attributes:
        what: what is compared.
        warm: its figure when the warm-up ended.
        end: its figure at the end.
        wanted: what must hold, for people.
        ok: whether it does.
    """

    what: str
    warm: int
    end: int
    wanted: str
    ok: bool


def checks(warm: Sample, end: Sample, slope: Slope) -> list[Check]:
    """Check the end of the warm-up, the end, and the slope between."""
    flat = abs(end.resident - warm.resident) <= FLAT * warm.resident
    same = end.descriptors == warm.descriptors
    tolerance = f"± {FLAT:.0%}"
    return [
        Check("wrong blocks", warm.wrong, end.wrong, "0", end.wrong == 0),
        Check("reads failed as planned", warm.planned, end.planned, "some", end.planned > 0),
        *_failed(warm, end),
        Check("resident bytes", warm.resident, end.resident, tolerance, flat),
        Check(
            "resident bytes a request",
            round(end.grown(warm)),
            round(slope.per_request),
            f"at most {MOST} over the second half",
            slope.steady,
        ),
        Check("descriptors", warm.descriptors, end.descriptors, "the same", same),
        Check("rings", warm.rings, end.rings, f"at most {WORKERS}", end.rings <= WORKERS),
        *(
            Check(f"{tier}: evictions", full, end.evicted[tier], "some in the warm-up", full > 0)
            for tier, full in warm.evicted.items()
        ),
        *(
            Check(f"{tier}: blocks found", hits, end.hits[tier], "more", end.hits[tier] > hits)
            for tier, hits in warm.hits.items()
        ),
    ]


def taken_over(kept: int, found: int, end: Sample) -> list[Check]:
    """Check an engine that found the host tier of an earlier one.

    Args:
        kept: blocks on the first engine's host tier when it was closed.
        found: blocks on the second one's when it was opened.
        end: the second engine, after it has served the first one's last requests again.
    """
    hits = end.hits["host"]
    return [
        Check("host: blocks of the next engine", kept, found, "the same", found == kept > 0),
        Check("host: blocks that it found", 0, hits, "some", hits > 0),
        Check("its wrong blocks", 0, end.wrong, "0", end.wrong == 0),
    ]


def _failed(warm: Sample, end: Sample) -> list[Check]:
    """Moves fail because a read was made to fail, or because they waited for one that did."""
    most = {"gpu": end.failed["host"], "host": end.planned, "disk": 0}
    return [
        Check(f"failed moves to {tier}", warm.failed[tier], failed, f"at most {most[tier]}", ok)
        for tier, failed in end.failed.items()
        for ok in [failed <= most[tier]]
    ]
