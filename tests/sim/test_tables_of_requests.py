"""`readers.tables`: rows of Azure and BurstGPT become requests, and bad cells are named."""

import pytest
from trace_files import AZURE, BURST, SECOND, plain, write

from kvtrie.errors import ConfigError
from kvtrie.sim.readers.tables import Prompts, azure_requests, burstgpt_requests


def test_azure_lines_have_dates_and_lengths(tmp_path):
    rows = plain(azure_requests(write(tmp_path, AZURE), 16))
    assert rows == [
        (0, [0, 1, 2], 40, 7, None),
        (700, [3], 16, 1, None),
        (1_319_410_000, [4, 5, 6], 33, 0, None),
    ]
    zoned = AZURE.replace("18:15:48.0000000", "19:15:48+01:00")
    assert plain(azure_requests(write(tmp_path, zoned), 16)) == rows


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        ("TIMESTAMP,", "TIME,", "line 1: there is no column TIMESTAMP among TIME, ContextTokens"),
        (",16,1", ",0,1", "line 3: ContextTokens is 0"),
        (",16,1", ",x,1", "line 3: ContextTokens is 'x'"),
        (",16,1", ",16,nan", "line 3: GeneratedTokens is 'nan'"),
        (",16,1", ",16", "line 3: 2 cells, 3 wanted"),
        ("46.6805907", "46.5", "line 3: TIMESTAMP is -0.18059 s, before the 0.0 s"),
        ("2023-11-16 18:15:48", "2023-13-16 18:15:48", "line 4: TIMESTAMP is '2023-13"),
    ],
)
def test_a_bad_cell_is_named(tmp_path, was, now, message):
    with pytest.raises(ConfigError, match=message):
        list(azure_requests(write(tmp_path, AZURE.replace(was, now)), 16))


def test_a_session_begins_with_its_earlier_turns(tmp_path):
    rows = plain(burstgpt_requests(write(tmp_path, BURST), 16))
    # 40 + 10 tokens are three whole blocks, of which the prompt had two and a partial one.
    assert rows == [
        (5 * SECOND, [0, 1, 3], 40, 10, "a"),
        (6 * SECOND, [4], 16, 0, "b"),
        (7_500_000_000, [0, 1, 2, 5, 6], 70, 5, "a"),
        (8 * SECOND, [7, 8], 20, 5, "a"),  # shorter than what was said: a new conversation
        (9 * SECOND, [9, 10], 20, 5, None),
    ]
    without = "\n".join(
        ",".join(cell for at, cell in enumerate(line.split(",")) if at not in {1, 2})
        for line in BURST.splitlines()
    )
    rows = plain(burstgpt_requests(write(tmp_path, without), 16))
    ids = [block for _, blocks, *_ in rows for block in blocks]
    assert ids == list(range(len(ids)))
    with pytest.raises(ConfigError, match="line 2: Timestamp is '-1'"):
        list(burstgpt_requests(write(tmp_path, BURST.replace("\n5,", "\n-1,")), 16))


def test_ids_start_again_after_the_last():
    prompts = Prompts(16)
    prompts._next = 2**32 - 1
    assert prompts.of(None, 32, 0).tolist() == [2**32 - 1, 0]
