"""Server metrics: the counters of a vLLM or SGLang server, and the traffic in a window.

Invariant: counters of all engines of a server are added, and counters of two models are refused.
Cost: an HTTP request.
"""

from __future__ import annotations

import re
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Traffic", "read_counters", "scrape", "traffic_of"]

_NAMES = {
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prefix_cache_queries_total": "queries",
    "vllm:prefix_cache_hits_total": "hits",
    "vllm:request_prefill_time_seconds_sum": "prefill_s",
    "vllm:request_prefill_kv_computed_tokens_sum": "computed",
    "sglang:prompt_tokens_total": "prompt_tokens",
    "sglang:cached_tokens_total": "hits",
    "sglang:max_total_num_tokens": "gpu_tokens",
}
_CACHE = "vllm:cache_config_info"
_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_TIMEOUT_S = 10
_MOST_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class Traffic:
    """A server's work between two scrapes.

    Attributes:
        prompt_tokens: tokens of all prompts.
        gpu_hits: share of these tokens found in the GPU's memory.
        token_s: seconds of prefill per computed token, or None without computed tokens.
    """

    prompt_tokens: float
    gpu_hits: float | None
    token_s: float | None


def scrape(url: str) -> dict[str, float]:
    """Return the counters of a server, by kvtrie's names.

    Args:
        url: address of its `/metrics`.

    Raises:
        ConfigError: no HTTP address, no answer, or as `read_counters`.
    """
    if urlsplit(url).scheme not in {"http", "https"}:
        raise ConfigError(f"--metrics is {shown(url)}, http://HOST:PORT/metrics wanted")
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - checked above
            text = answer.read(_MOST_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        raise ConfigError(f"no metrics from {url}: {error}") from error
    return read_counters(text, url)


def read_counters(text: str, origin: str = "the metrics") -> dict[str, float]:
    """Return the counters in a text of Prometheus' format.

    Args:
        text: the text.
        origin: its origin, for messages.

    Raises:
        ConfigError: counters of neither engine, or of several models.
    """
    found: dict[str, float] = {}
    models: set[str] = set()
    for name, labels, value in _samples(text):
        if name == _CACHE:
            sizes = {key: labels.get(key, "") for key in ("num_gpu_blocks", "block_size")}
            found |= {key: float(size) for key, size in sizes.items() if size.isdecimal()}
        elif name in _NAMES:
            found[_NAMES[name]] = found.get(_NAMES[name], 0.0) + value
            models |= {labels["model_name"]} if "model_name" in labels else set()
    if len(models) > 1:
        raise ConfigError(
            f"{origin} has several models, {', '.join(sorted(models)[:4])}: one server of one "
            "model wanted"
        )
    if "prompt_tokens" not in found:
        raise ConfigError(
            f"{origin} has no vllm:prompt_tokens_total or sglang:prompt_tokens_total: is it the "
            "server's /metrics? SGLang needs --enable-metrics"
        )
    return found


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of each valid line."""
    for line in text.splitlines():
        matched = _LINE.fullmatch(line.strip())
        if matched is None:
            continue
        with suppress(ValueError):
            yield matched[1], dict(_LABEL.findall(matched[2] or "")), float(matched[3])


def traffic_of(before: dict[str, float], after: dict[str, float]) -> Traffic | None:
    """Return the work between two scrapes, or None without prompts.

    Raises:
        ConfigError: a decreased counter: the server started again.
    """
    for name in set(_NAMES.values()) - {"gpu_tokens"}:
        if after.get(name, 0.0) < before.get(name, 0.0):
            raise ConfigError(
                f"{name} of the metrics fell from {before[name]:.0f} to {after.get(name, 0):.0f}: "
                "the server started again in the window"
            )

    def more(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    prompts = more("prompt_tokens")
    if prompts <= 0:
        return None
    queries = more("queries") if "queries" in after else prompts
    hits = more("hits") / queries if "hits" in after and queries else None
    computed = more("computed")
    token_s = more("prefill_s") / computed if computed > 0 else None
    return Traffic(prompts, hits, token_s)
