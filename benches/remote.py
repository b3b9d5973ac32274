"""A remote tier compared with plain clients: pairs in one run, whole blocks, checks on.

    make bench-remote ARGS="--quick"

Ours loads blocks from the store into host memory through an executor and verifies headers and
checksums. A peer puts the same number of bytes into the same pool memory and verifies nothing:
`GET` written by hand on one connection, the client library and a copy, `readinto` of the same
files, `batch_get_into`. Servers are those of `make stores`; rows without their server are left out,
and those of Mooncake without a network namespace. Pairs take turns; figures are medians, ratios
those of the pairs' ratios.
Invariant: both sides move the same bytes. Cost: two minutes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track
from tests import namespace, store_servers

from benches.core.place import place
from benches.record import Result, document, keep, options, read, show
from benches.remote_clients import folder_rows, mooncake_rows, object_rows, redis_rows
from benches.remote_hang import hang_rows, keys_rows
from benches.remote_sides import Size, sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OUT = Path(__file__).parent / "results/remote.json"


def namespaced(folder: Path, size: Size, pairs: int) -> Iterator[Result]:
    """Rows of Mooncake, whose clients listen on every address, from a network namespace."""
    if namespace.INSIDE:
        yield from mooncake_rows(folder, size, pairs)
    elif namespace.possible():
        out = folder / "rows.json"
        only = ("--only", f"mooncake {size.name}")
        words = (*only, "--pairs", pairs, "--out", out)
        ended = namespace.run("benches.remote", *words, stdout=subprocess.DEVNULL)
        if ended.returncode:
            raise SystemExit(f"mooncake: exit status {ended.returncode}")
        yield from read(out)[1]


def measured(given: object) -> Iterator[tuple[str, Callable[[Path], Iterator[Result]]]]:
    """Names of groups of rows, and the functions that measure them."""
    small, *large = sizes(quick=given.quick)
    pairs = given.pairs or (1 if given.quick else 15)
    last = (large or [small])[-1]
    servers = {"redis": redis_rows, "seaweedfs": object_rows, "mooncake": namespaced}
    for size in (small, *large):
        for server, rows in servers.items():
            installed = store_servers.PROGRAMS[server].is_file()
            if installed and not given.quick and (server == "redis" or size is last):
                yield f"{server} {size.name}", lambda at, rows=rows, s=size: rows(at, s, pairs)
        yield f"folder {size.name}", lambda at, size=size: folder_rows(at, size, pairs)
    yield "host hit", lambda at: hang_rows(at, small, pairs)
    yield "keys", lambda at: keys_rows(at, small, pairs)


def main() -> int:
    """Measure, print, write."""
    parser = options(__doc__, OUT)
    parser.add_argument("--pairs", type=int, help="default: 15")
    parser.add_argument("--folder", type=Path, help="folder of the files; the default is temporary")
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose names have it")
    given = parser.parse_args()
    screen = Console(stderr=True)
    rows: list[Result] = []
    cells = [cell for cell in measured(given) if given.only in cell[0]]
    for _name, cell in track(cells, "Stores", console=screen, transient=True):
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            rows += cell(Path(folder))
    if not keep(given, document(place(), rows)):
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
