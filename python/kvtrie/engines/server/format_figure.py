"""FormatFigure: the measured cost of a format of lower tiers, read from `calibration.json`.

Invariant: a format is accepted only with a calibration of the served weights, measured over at
least one token, with no more native tokens than the server has, and within the operator's limit.
The operator can override this. Cost: a small file and a digest of the weight files, once.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtrie.errors import ConfigError
from kvtrie.model.layout import FORMATS
from kvtrie.settings.argument import real, shown, whole

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FormatFigure"]

_MOST = 2**63 - 1
_HOW = "measure it with `kvtrie calibrate MODEL`, or set uncalibrated=true"


class FormatFigure(NamedTuple):
    """A format of lower tiers and its cost.

    Attributes:
        format: its name.
        kl_mean: mean KL divergence of next tokens from the native format, in nats. None if not
            measured for these weights.
        of_bf16: bytes of the calibration's blocks as a share of bfloat16, None if not measured.
        tiers: the tiers with this format.
        tokens: tokens with KV in the format during the calibration, None without a count.
    """

    format: str
    kl_mean: float | None = None
    of_bf16: float | None = None
    tiers: str = "tiers below the GPU"
    tokens: int | None = None

    @classmethod
    def read(
        cls,
        name: str,
        path: str | None,
        checkpoint: Callable[[], bytes | None],
        *,
        max_kl: float,
        native_last: int,
        uncalibrated: bool,
        native_first: int = 0,
        block_tokens: int | None = None,
        tiers: str = "tiers below the GPU",
    ) -> FormatFigure | None:
        """Return the figure of a format, None for "native".

        Args:
            name: the format.
            path: the file written by `kvtrie calibrate`.
            checkpoint: returns the digest of the served weight files, or None.
            max_kl: the largest accepted mean KL.
            native_last: tokens at the end of a prompt computed by the server.
            uncalibrated: whether to accept the format in any case.
            native_first: tokens at the start of a prompt kept in the model's format.
            block_tokens: tokens of the server's blocks. The cost of int4 and of native blocks
                depends on the block size. None to ignore the calibration's block size.
            tiers: the tiers with this format.

        Raises:
            ConfigError: no calibration for these weights, or a mean KL above the limit.
        """
        if FORMATS[name] is None:
            return None
        try:
            row = _row(
                name,
                path,
                checkpoint,
                native_first=native_first,
                native_last=native_last,
                block_tokens=block_tokens,
            )
        except ConfigError:
            if uncalibrated:
                return cls(name, tiers=tiers)
            raise
        figure = cls(name, row.kl_mean, row.of_bf16, tiers, row.tokens)
        if not row.kl_mean <= max_kl and not uncalibrated:
            raise ConfigError(
                f"format {name!r} has a mean KL of {row.kl_mean:.2e} nats by {path}, above "
                f"max_kl {max_kl:.2e}: raise max_kl, native_first or native_last, or set "
                "uncalibrated=true"
            )
        return figure

    def text(self) -> str:
        """Return a line about the format and its cost."""
        head = f"kvtrie: KV of {self.tiers} is in {self.format}"
        if self.kl_mean is None:
            return f"{head}, whose cost was not measured for these weights (uncalibrated=true)"
        over = "" if self.tokens is None else f", measured over {self.tokens} tokens"
        return (
            f"{head}, {self.of_bf16:.3f} of bfloat16's bytes: mean KL of next tokens "
            f"{self.kl_mean:.2e} nats{over}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the figure for JSON."""
        return {"name": self.format, "kl_mean": self.kl_mean, "tokens": self.tokens}


class _Row(NamedTuple):
    """The values of a format in a calibration."""

    kl_mean: float
    of_bf16: float
    tokens: int | None


def _row(
    name: str,
    path: str | None,
    checkpoint: Callable[[], bytes | None],
    *,
    native_first: int,
    native_last: int,
    block_tokens: int | None,
) -> _Row:
    """Return the values of a format, from a calibration of the served weights."""
    if path is None:
        raise ConfigError(f"format {name!r} has no calibration: {_HOW}")
    try:
        made: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        given = made["formats"][name]
        row = _Row(
            real("kl_mean", given["kl_mean"], 0, math.inf),
            real("of_bf16", given["of_bf16"], 0, math.inf),
            whole("tokens", given["tokens"], 0, _MOST) if "tokens" in given else None,
        )
        computed = whole("native_last", made["native_last"], 0, _MOST)
        first = whole("native_first", made.get("native_first", 0), 0, _MOST)
        whose, size = made["checkpoint"], made.get("block_tokens", block_tokens)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"the calibration {path} cannot be read for format {name!r}: "
            f"{type(error).__name__} {error}: {_HOW}"
        ) from error
    # Earlier versions wrote no count, and measured nothing if native_first covered the prompts.
    if row.tokens == 0 or (row.tokens is None and first):
        over = "no tokens" if row.tokens == 0 else "a number of tokens that it does not have"
        raise ConfigError(
            f"the calibration {path} has measured {name!r} over {over}, with the first {first} "
            f"tokens of a prompt in the model's format: {_HOW}"
        )
    digest = checkpoint()
    if digest is None or whose != digest.hex():
        served = "unknown files" if digest is None else digest.hex()[:16]
        of = whose[:16] if isinstance(whose, str) else shown(whose)
        raise ConfigError(
            f"the calibration {path} is of weights {of}, and the server has {served}: {_HOW}"
        )
    layout = FORMATS[name]
    if size != block_tokens is not None and (first or (layout is not None and layout.packed)):
        raise ConfigError(
            f"the calibration {path} is of blocks of {shown(size)} tokens, which the cost of "
            f"{name!r} with {first} native tokens depends on, and the server has blocks of "
            f"{block_tokens}: give --block-tokens {block_tokens}"
        )
    if first > native_first:
        raise ConfigError(
            f"the calibration {path} has kept the first {first} tokens of a prompt in the model's "
            f"format, and native_first is {native_first}: set it to at least {first}, or {_HOW}"
        )
    if computed > native_last:
        raise ConfigError(
            f"the calibration {path} has computed the last {computed} tokens of a prefix, and "
            f"native_last is {native_last}: set it to at least {computed}, or {_HOW}"
        )
    return row
