"""The scope of a vLLM request's blocks, and whether it has blocks at all.

Invariant: two requests share a block only if vLLM's own prefix cache would let them, and if the
tensors of their images, audio and videos are equal. Cost: a few attributes per request.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvtrie.engines.vllm.media import content_of
from kvtrie.settings.argument import text
from kvtrie.settings.scope import Scope

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

__all__ = ["scope_of"]


def scope_of(request: Request, identity: str | None) -> Scope | None:
    """The scope of a request; None where it neither matches nor stores.

    A salt, the identity of weights and adapter, and the digests of images at their placeholder
    tokens separate requests. A prompt of embeddings has no tokens to be found by, and an image
    whose tensors are not here has no content.

    Args:
        request: the request.
        identity: what `Identity.name` returned for it.

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
    return Scope(
        tenant=text("cache_salt", request.cache_salt or "").encode(),
        lora=identity,
        extra=tuple(sorted(extra.items())),
    )
