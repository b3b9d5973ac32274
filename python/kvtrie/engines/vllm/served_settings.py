"""ServedSettings: the operator's settings in vLLM's HTTP server process.

The connector runs in different processes, but its `kv_connector_extra_config` is also in the HTTP
server's configuration. Cost: a file is read once.
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
    """The operator's settings of the connector.

    Attributes:
        sockets: control sockets of the data-parallel ranks, empty without `control`.
        tenant_header: the front end's header for the tenant, in lower case, or "".
        secret: signs tenants.
    """

    sockets: tuple[str, ...] = ()
    tenant_header: str = ""
    secret: bytes = b""

    @classmethod
    def of(cls, scope: Scope) -> ServedSettings:
        """Read the settings of a request's server.

        Raises:
            ConfigError: the secret cannot be read.
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
        """Return the tenant named by the front end.

        Raises:
            ConfigError: no name, or several: a client may have added a name.
        """
        wanted = self.tenant_header.encode()
        found = [value for name, value in scope["headers"] if name.lower() == wanted]
        if len(found) != 1:
            raise ConfigError(f"{len(found)} headers {self.tenant_header}, one wanted")
        try:
            return found[0].decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.tenant_header} is no UTF-8") from error
