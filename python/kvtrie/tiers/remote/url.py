"""RemoteUrl: the location and options of a shared store, parsed from a URL.

Invariant: a password is in the fields and never in `str` or `repr`. An unknown option is refused by
name.
Cost: a parse when a tier is created.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from kvtrie.errors import ConfigError
from kvtrie.settings.argument import masked, real, shown
from kvtrie.settings.argument import url as url_of

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Self

__all__ = ["RemoteUrl"]

_MASK = "***"
_PLAIN = "/:@,;=~+"  # characters displayed unescaped
_FLAGS = {"0": False, "1": True}
_COMMON = ("strict",)


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """A parsed URL.

    Attributes:
        scheme: the back end.
        host: the host, without user and port, or empty for a folder.
        port: the port, or None.
        user: the user name, or empty.
        password: the password, or empty.
        path: the path, as written after the host.
        options: the options after `?`, by name.
    """

    scheme: str
    host: str = ""
    port: int | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    path: str = ""
    options: dict[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def parse(cls, name: str, given: object) -> Self:
        """Parse a URL.

        Args:
            name: the setting, for messages.
            given: the text.

        Raises:
            ConfigError: no text, no scheme, an invalid port, or an option without a value or given
                twice.
        """
        url = url_of(name, given)
        try:
            parts = urlsplit(url)
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
            port, host = parts.port, parts.hostname or ""
        except ValueError as error:
            raise ConfigError(f"{name} is {masked(url)!r}: {error}") from None
        options = dict(pairs)
        if len(options) < len(pairs):
            raise ConfigError(f"{name} names an option twice: {', '.join(key for key, _ in pairs)}")
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        # File names are bytes and need not be UTF-8.
        path = unquote(parts.path, errors="surrogateescape")
        scheme = url.partition(":")[0].lower()
        return cls(scheme, host, port, user, password, path, options)

    def __str__(self) -> str:
        """The URL, with its password masked."""
        place = f"[{self.host}]" if ":" in self.host else self.host
        place += "" if self.port is None else f":{self.port}"
        if self.user or self.password:
            place = f"{self.user}{f':{_MASK}' if self.password else ''}@{place}"
        options = urlencode(self.options, safe=_PLAIN)
        path = quote(self.path, safe=_PLAIN, errors="surrogateescape")
        if not place:
            return f"{self.scheme}:{path}{f'?{options}' if options else ''}"
        return urlunsplit((self.scheme, place, path, options, ""))

    @property
    def strict(self) -> bool:
        """Whether an unreachable store at opening is an error."""
        return self.flag("strict")

    def only(self, names: Collection[str]) -> None:
        """Raise on options other than `names` and `strict`.

        Raises:
            ConfigError: an unknown option.
        """
        known = (*names, *_COMMON)
        for name in self.options:
            if name not in known:
                raise ConfigError(
                    f"{self.scheme}: has no option {shown(name)}: {', '.join(known)} are known"
                )

    def flag(self, name: str) -> bool:
        """Return the option `name` as a flag, by default False."""
        given = self.options.get(name, "0")
        if given not in _FLAGS:
            raise ConfigError(f"option {name} of {self.scheme}: is {shown(given)}, 0 or 1 wanted")
        return _FLAGS[given]

    def seconds(self, name: str, low: float, high: float) -> float | None:
        """Return the option `name` in seconds, or None."""
        given = self.options.get(name)
        if given is None:
            return None
        try:
            number: object = float(given)
        except ValueError:
            number = given
        return real(f"option {name} of {self.scheme}:", number, low, high)
