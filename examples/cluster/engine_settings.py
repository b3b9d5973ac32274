"""EngineSettings: what the process of an engine is started with.

Cost: none; the process that starts engines does not import torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine.

    Attributes:
        machine: its number.
        port: where it answers requests.
        events: endpoint of its events.
        replay: endpoint of their replay.
        gpu: blocks.
        host: blocks.
        disk: blocks.
        folder: folder of its disk.
        store: URL of a store that all engines share; empty without one.
        address: the address that it listens on.
    """

    machine: int
    port: int
    events: str
    replay: str
    gpu: int
    host: int
    disk: int
    folder: str
    store: str = ""
    address: str = "127.0.0.1"

    def to_json(self) -> str:
        """The argument of the process."""
        return json.dumps(asdict(self))
