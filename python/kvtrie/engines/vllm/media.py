"""Name the images, audio and videos of a request by what processing made of them.

vLLM names an input by a hash of what the client sent, or by a `uuid` that the client chose, and
binds such a name to no content. So when a request arrives, the tensors that the model will read are
digested, and the digest replaces vLLM's name: its own caches of blocks and of encoder outputs, and
kvtrie's tiers, then tell two inputs apart by content. An input whose tensors are not in the
scheduler's process keeps its name, and its request neither matches nor stores.
Invariant: a content is given only to an input whose name vLLM's caches have it by.
Cost: a pass over the bytes of a request's inputs, on the thread that takes requests in.
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
    """Name the inputs of all requests of this process by content, as long as an object lives."""
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
    """Replace vLLM's name of an input by the digest of its tensors, if they are here."""
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
    # vLLM puts an adapter before the hash where encoder outputs depend on it.
    before, found, _ = feature.identifier.rpartition(feature.mm_hash or feature.identifier)
    feature.identifier = f"{before if found else ''}{content.hex()}"
    vars(feature)[_CONTENT] = content


def content_of(feature: MultiModalFeatureSpec) -> bytes | None:
    """Return the digest of an input's tensors; None if vLLM's name of it is another one."""
    return vars(feature).get(_CONTENT)
