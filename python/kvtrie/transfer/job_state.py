"""JobState: the states of a job, and the table of transitions between them.

    WAITING ──> LOST                cancelled, or its `after` has failed
       │
       ├──────────> COPYING ──────> LATE ──────> EXPIRED
       │             ^   │            past its deadline, reported failed, its slots out of use
       └──> IDLE ────┘   │
             ^ └─────────┼──> ENDED   well, badly, or given up by its lease
             └───────────┘

A thread takes a job from WAITING to COPYING and then to its end. A claimed job is IDLE between two
layers, without a deadline.
Invariant: a job is in the runner's queue exactly while it is WAITING. LOST, ENDED and EXPIRED are
final.
Cost: a table lookup per transition.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["TRANSITIONS", "JobState"]


class JobState(Enum):
    """State of a job."""

    WAITING = "waiting"
    """In the queue: for a thread, for its turn at a storage slot, or for another move."""
    LOST = "lost"
    """Removed from the queue without running."""
    IDLE = "idle"
    """Begun by the claiming engine, between two layers."""
    COPYING = "copying"
    """Copying, with a running deadline."""
    LATE = "late"
    """Reported failed at the deadline, but may still write."""
    ENDED = "ended"
    """Ended in time, well or not."""
    EXPIRED = "expired"
    """Ended after its deadline."""


TRANSITIONS = {
    JobState.WAITING: frozenset({JobState.LOST, JobState.IDLE, JobState.COPYING}),
    JobState.IDLE: frozenset({JobState.COPYING, JobState.ENDED}),
    JobState.COPYING: frozenset({JobState.IDLE, JobState.LATE, JobState.ENDED}),
    JobState.LATE: frozenset({JobState.EXPIRED}),
    JobState.LOST: frozenset[JobState](),
    JobState.ENDED: frozenset[JobState](),
    JobState.EXPIRED: frozenset[JobState](),
}
"""The allowed next states of each state."""
