"""`Layout`: digests in which every field counts, and what it refuses."""

import pytest

from kvtrie.errors import ConfigError
from kvtrie.model.layout import Layout


def test_equal_layouts_have_equal_digests_and_every_field_counts():
    assert Layout().digest() == Layout().digest()
    others = [
        Layout(order=("layer", "block", "kv", "token", "head", "dim")),
        Layout(strides=(6, 5, 4, 3, 2, 1)),
        Layout(dtype="bfloat16"),
        Layout(kv="split"),
        Layout(scales="head"),
        Layout(latent=True),
        Layout(alignment=4096),
        Layout(rope="plain"),
        Layout(opaque="an engine's"),
    ]
    digests = {layout.digest() for layout in [Layout(), *others]}
    assert len(digests) == len(others) + 1
    assert {len(digest) for digest in digests} == {32}


def test_a_digest_is_the_same_in_every_version():
    assert Layout().digest().hex()[:16] == "78bc20c15af8c34c"


@pytest.mark.parametrize(
    "wrong",
    [
        {"order": ("block", "layer", "kv", "token", "head")},
        {"strides": (1, 2)},
        {"dtype": "float31"},
        {"kv": "both"},
        {"scales": "some"},
        {"rope": "yes"},
        {"alignment": 0},
    ],
)
def test_a_layout_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError):
        Layout(**wrong)
