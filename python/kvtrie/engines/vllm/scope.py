"""The scope of a vLLM request's blocks, and whether it has blocks at all.

Invariant: two requests share a block only if vLLM's own prefix cache would let them, and if the
tensors of their images, audio and videos are equal. Cost: a few attributes per request.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvtrie.engines.server.tenant import tenant_of
from kvtrie.engines.vllm.media import content_of
from kvtrie.settings.argument import text
from kvtrie.settings.scope import Scope

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

    from kvtrie.engines.server.tenant import Sharing

__all__ = ["scope_of"]


def scope_of(
    request: Request, identity: str | None, sharing: Sharing | None = None
) -> Scope | None:
    """The scope of a request; None where it neither matches nor stores.

    A salt, the identity of weights and adapter, and the digests of images at their placeholder
    tokens separate requests. A prompt of embeddings has no tokens to be found by, and an image
    whose tensors are not here has no content.

    Args:
        request: the request.
        identity: what `Identity.name` returned for it.
        sharing: how tenants share. A salt names no tenant then: a request without a signed tenant
            shares with requests of its salt, and without a salt with none.

    Raises:
        ConfigError: a salt or an input that a scope cannot name.
    """
    if request.prompt_embeds is not None or identity is None:
        return None
    extra: dict[int, bytes] = {}
    features: list[MultiModalFeatureSpec] = request.mm_features or []
    for feature in features:
        at, content = int(feature.mm_position.offset), content_of(feature)
        if content is None:
            return None
        # Two inputs at one token are one digest of both.
        extra[at] = hashlib.blake2b(extra.get(at, b"") + content).digest()
    salt, tenant = text("cache_salt", request.cache_salt or ""), None
    if sharing is not None:
        tenant = tenant_of(request.kv_transfer_params, sharing.secret)
        if tenant is None and not salt:
            return None
    return Scope(
        tenant=salt.encode() if tenant is None else tenant,
        lora=identity,
        extra=tuple(sorted(extra.items())),
        share_after=None if sharing is None or tenant is None else sharing.after,
    )
