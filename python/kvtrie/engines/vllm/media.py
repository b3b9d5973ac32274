"""Name the images, audio and videos of a request by their processed tensors.

vLLM names an input by a hash of the client's data or by a `uuid` chosen by the client. Neither is
bound to the content. So when a request arrives, the digest of its tensors for the model replaces
vLLM's name. Then vLLM's caches of blocks and of encoder outputs, and kvtrie's tiers, distinguish
inputs by content. An input without tensors in the scheduler's process keeps its name, and its
request neither matches nor stores.
Invariant: an input has a content only if vLLM's caches use the same name for it.
Cost: a pass over the bytes of a request's inputs, on the thread receiving requests.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from kvtrie.engines.vllm.contents import contents_digest
from kvtrie.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.multimodal.inputs import MultiModalFeatureSpec

__all__ = ["content_of", "name_by_content", "name_media"]

_CONTENT = "kvtrie_content"
_OWNERS: WeakSet[Any] = WeakSet()


def name_media(owner: object) -> None:
    """Name the inputs of all requests of this process by content, while `owner` is alive."""
    from vllm.v1.request import Request

    made: Any = Request.from_engine_core_request
    if not hasattr(made, "kvtrie_names"):
        setattr(Request, "from_engine_core_request", classmethod(_naming(made.__func__)))  # noqa: B010 - a method of vLLM's class
    _OWNERS.add(owner)


def _naming(inner: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inner)
    def outer(cls: type, request: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's own
        if _OWNERS:
            for feature in request.mm_features or ():
                name_by_content(feature)
        return inner(cls, request, *args, **kwargs)

    vars(outer)["kvtrie_names"] = True
    return outer


def name_by_content(feature: MultiModalFeatureSpec) -> None:
    """Replace vLLM's name of an input by the digest of its tensors, if it has tensors here."""
    data = None if feature.data is None else feature.data.get_data()
    if data is None or any(each is None for each in data.values()):
        return
    place = feature.mm_position
    about = [feature.modality, place.length, place.is_embed]
    try:
        content, tensors = contents_digest([about, data])
    except ConfigError:
        return
    if tensors <= (place.is_embed is not None):  # an address of memory instead of tensors
        return
    # vLLM prefixes the hash with the adapter if encoder outputs depend on it.
    before, found, _ = feature.identifier.rpartition(feature.mm_hash or feature.identifier)
    feature.identifier = f"{before if found else ''}{content.hex()}"
    vars(feature)[_CONTENT] = content


def content_of(feature: MultiModalFeatureSpec) -> bytes | None:
    """Return the digest of an input's tensors, or None if vLLM's name was not replaced."""
    return vars(feature).get(_CONTENT)
