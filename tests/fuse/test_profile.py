"""Profiles: spread of timings, tables of passes, and files that are refused."""

import pytest

from kvtrie.errors import ConfigError
from kvtrie.fuse.profile import load_profile
from kvtrie.transfer.timed_copies import Timing


def test_spread_is_half_the_distance_of_the_quartiles():
    timing = Timing.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (timing.median, timing.spread, timing.runs) == (3.0, 1.5, 5)
    with pytest.raises(ConfigError, match="1 runs have no spread"):
        Timing.of([1.0])


def test_other_files_are_refused(tmp_path):
    wrong = tmp_path / "x.toml"
    wrong.write_text("[cost]\nper_token = 1\n")
    with pytest.raises(ConfigError, match="is no profile"):
        load_profile(wrong)
