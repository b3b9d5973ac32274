"""JobState: the states of a job, and the table of transitions between them.

    WAITING ──> LOST                cancelled, or the move that it waits for has failed
       │
       ├──────────> COPYING ──────> LATE ──────> EXPIRED
       │             ^   │            past its deadline, reported failed, its slots out of use
       └──> IDLE ────┘   │
             ^ └─────────┼──> ENDED   well, badly, or given up by its lease
             └───────────┘

A thread takes a job from WAITING to COPYING and then to its end. A claimed job is IDLE between two
of its layers, when no deadline counts.
Invariant: a job is in the runner's queue exactly while it is WAITING; LOST, ENDED and EXPIRED are
final. Cost: a look-up in a table per transition.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["TRANSITIONS", "JobState"]


class JobState(Enum):
    """One state of a job."""

    WAITING = "waiting"
    """In the queue: for a thread, for its turn at a slot of a storage, or for another move."""
    LOST = "lost"
    """Left the queue and never runs."""
    IDLE = "idle"
    """Begun by the engine that has claimed it, and between two layers."""
    COPYING = "copying"
    """Copies; the deadline counts."""
    LATE = "late"
    """Reported failed at the deadline, and may still write."""
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
"""The states that may follow each."""
