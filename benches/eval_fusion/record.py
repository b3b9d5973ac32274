"""Record: what one fusion of one case came to, and the file of them that a run goes on from.

A line of JSON for each, written as soon as it is measured: an interrupt loses at most the one under
way, and a line that was cut off is measured again.
Invariant: a record is found only by its world (model and sizes), kind, seed and setting. Cost: a
read of the whole file per run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from pathlib import Path

Key: TypeAlias = tuple[str, int, str]
"""Kind, seed and name of the setting."""


@dataclass(frozen=True, slots=True)
class Record:
    """What one fusion of one case came to.

    Attributes:
        world: the model and the sizes of its cases.
        kind: of the case.
        seed: of the case.
        setting: its name.
        kl: mean over the answer of KL(full prefill || fused), in nats.
        same: share of the answer's tokens whose best token is that of the full prefill.
        seconds: of CPU, of the fusion with its selection.
        full: of CPU, of the full prefill of the same tokens.
        computed: share of the chunks' (token, layer) pairs that was computed.
        score: the monitor's; None where there is none.
    """

    world: str
    kind: str
    seed: int
    setting: str
    kl: float
    same: float
    seconds: float
    full: float
    computed: float
    score: float | None

    @property
    def key(self) -> Key:
        """What it is found by within its world."""
        return self.kind, self.seed, self.setting


def read(path: Path, world: str) -> dict[Key, Record]:
    """The records of a world in a file that may not be there yet."""
    found: dict[Key, Record] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = Record(**json.loads(line))
        except (ValueError, TypeError):
            continue  # cut off while it was written, or of another version
        if record.world == world:
            found[record.key] = record
    return found


def append(path: Path, record: Record) -> None:
    """Add one line, behind whatever an interrupt has left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(max(0, file.seek(0, 2) - 1))
        broken = file.read(1) not in {b"", b"\n"}
        file.write(b"\n" * broken + json.dumps(asdict(record)).encode() + b"\n")
