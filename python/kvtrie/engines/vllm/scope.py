"""The scope of a vLLM request's blocks, if the request is cacheable.

Invariant: two requests share a block only if vLLM's own prefix cache would allow it, and if the
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
    """Return the scope of a request, or None if it neither matches nor stores.

    A salt, the identity of weights and adapter, and the digests of images at their placeholder
    tokens separate requests. A prompt of embeddings has no tokens for a lookup, and an image
    without tensors in this process has no content.

    Args:
        request: the request.
        identity: its `Identity.name`.
        sharing: the rules for sharing between tenants, or None. With rules, a salt names no
            tenant: a request without a signed tenant shares only with requests of its salt, and
            without a salt with none.

    Raises:
        ConfigError: a salt or an input without a valid name in a scope.
    """
    if request.prompt_embeds is not None or identity is None:
        return None
    extra: dict[int, bytes] = {}
    features: list[MultiModalFeatureSpec] = request.mm_features or []
    for feature in features:
        at, content = int(feature.mm_position.offset), content_of(feature)
        if content is None:
            return None
        # Inputs at the same token have a combined digest.
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
