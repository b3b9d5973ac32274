"""ServedSettings: the operator's settings as the HTTP server of vLLM finds them.

The connector runs in other processes; its `kv_connector_extra_config` is in the configuration that
the HTTP server has as well. Cost: a file is read, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from kvtrie.engines.server.control import control_path
from kvtrie.errors import ConfigError
from kvtrie.settings.argument import text
from kvtrie.tiers.remote.open import read_secret

if TYPE_CHECKING:
    from kvtrie.engines.vllm.asgi import Scope

__all__ = ["ServedSettings"]


@dataclass(frozen=True, slots=True)
class ServedSettings:
    """What the operator has set for the connector.

    Attributes:
        sockets: control sockets of the data-parallel ranks; none without `control`.
        tenant_header: the header, in lower case, in which the front end names the tenant; "" for
            none.
        secret: signs tenants.
    """

    sockets: tuple[str, ...] = ()
    tenant_header: str = ""
    secret: bytes = b""

    @classmethod
    def of(cls, scope: Scope) -> ServedSettings:
        """Read the settings of the server that a request has come to.

        Raises:
            ConfigError: a secret that cannot be read.
        """
        config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
        transfer = getattr(config, "kv_transfer_config", None)
        given: object = getattr(transfer, "kv_connector_extra_config", None)
        if config is None or not isinstance(given, Mapping):
            return cls()
        extra = cast("Mapping[str, Any]", given)
        sockets: tuple[str, ...] = ()
        if (control := extra.get("control")) is not None:
            ranks = int(config.parallel_config.data_parallel_size)
            path = text("control", control)
            sockets = tuple(control_path(path, rank, several=ranks > 1) for rank in range(ranks))
        header = text("tenant_header", extra.get("tenant_header") or "").lower()
        secret = read_secret(extra.get("secret_file")) if header else None
        return cls(sockets, header, secret or b"")

    def tenant_of(self, scope: Scope) -> str:
        """Return the tenant that the front end names.

        Raises:
            ConfigError: it names none, or several: one is a client's.
        """
        wanted = self.tenant_header.encode()
        found = [value for name, value in scope["headers"] if name.lower() == wanted]
        if len(found) != 1:
            raise ConfigError(f"{len(found)} headers {self.tenant_header}, one wanted")
        try:
            return found[0].decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.tenant_header} is no UTF-8") from error
