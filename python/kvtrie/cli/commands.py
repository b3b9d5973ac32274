"""Commands: the name of what `add_subparsers` returns, which argparse keeps private."""

from __future__ import annotations

import argparse
from typing import TypeAlias

__all__ = ["Commands"]

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # pyright: ignore[reportPrivateUsage]
