"""Place of a measurement: machine, versions and date, which every record has.

Invariant: nothing that names the machine or its owner. Cost: none.
"""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

CPUS = Path("/proc/cpuinfo")


def place() -> dict[str, Any]:
    """Date, processor, cores, load, interpreter, system."""
    names = [
        line.partition(":")[2].strip()
        for line in (CPUS.read_text().splitlines() if CPUS.exists() else [])
        if line.startswith("model name")
    ]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "load": [round(each, 2) for each in os.getloadavg()],
        "python": platform.python_version(),
        "system": platform.system(),
    }
