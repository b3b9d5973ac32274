"""The shape of the Rust core, read from its source."""

import re
from pathlib import Path

CORE = Path(__file__).parents[1] / "rust" / "core" / "src"


def test_a_policy_is_a_short_trait():
    text = (CORE / "policy.rs").read_text()
    trait = re.search(r"(?ms)^pub trait Policy\b.*?^}", text)
    methods = re.findall(r"(?m)^    fn (\w+)", trait.group())
    assert {"terms", "compare"} <= set(methods)
    assert len(methods) <= 14
