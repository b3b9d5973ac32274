"""Parts of pages that are written from records: each is between two comments of its name.

Invariant: text outside the two comments is never touched. Cost: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def part(page: Path, name: str) -> str:
    """Return the part of a page that is written under this name."""
    begin, end = _bounds(page.read_text(), page, name)
    return page.read_text()[begin:end].strip()


def write_part(page: Path, name: str, text: str) -> None:
    """Write the part of a page."""
    whole = page.read_text()
    begin, end = _bounds(whole, page, name)
    page.write_text(f"{whole[:begin]}\n\n{text.strip()}\n\n{whole[end:]}")


def _bounds(whole: str, page: Path, name: str) -> tuple[int, int]:
    first = whole.find(f"<!-- {name}: written by ")
    end = whole.find(f"<!-- {name}: end -->")
    if not 0 <= first < end:
        raise ValueError(f"{page.name} has no part {name!r}")
    return whole.index("-->", first) + len("-->"), end
