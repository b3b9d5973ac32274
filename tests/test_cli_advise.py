"""`kvtrie advise`: a recording and a trace, as text, JSON and picture; what goes wrong."""

import json
from dataclasses import replace

import pytest

from kvtrie.advise.recording import Recorder
from kvtrie.advise.wire import Batch, Part, Stored
from kvtrie.cli import main

SIZE = 16
WORDS = ["--bytes-per-token", "1024"]
BLOCK = 1024 * SIZE


def batches(chats=40, turns=3):
    """Chats whose turns return after all other chats, on an engine that keeps none of them."""
    for turn in range(turns):
        for chat in range(chats):
            number = turn * chats + chat
            blocks = [100 * chat + at for at in range(4 * (turn + 1))]
            stored = Stored(blocks, None, SIZE, None, [1] * SIZE * len(blocks))
            yield Batch(number, 60.0 * number, [stored], blocks, rank=0)


@pytest.fixture
def recording(tmp_path):
    path = tmp_path / "events.jsonl"
    recorder = Recorder(path)
    before = {"prompt_tokens": 0.0, "queries": 0.0, "hits": 0.0, "prefill_s": 0.0, "computed": 0.0}
    tokens = 40.0 * SIZE * (24 + 3 / 2)  # three prompts, each with half a block that is not full
    after = {"prompt_tokens": tokens, "queries": tokens, "hits": 0.0, "num_gpu_blocks": 41.0}
    recorder.metrics(before)
    for batch in batches():
        recorder.batch(batch)
    recorder.metrics(after | {"prefill_s": tokens / 1e3, "computed": tokens})
    recorder.close()
    return path


def test_a_recording_as_text(recording, capsys):
    words = ["--host", "640KiB,7680KiB", "--disk", "0", "--policy", "lru"]
    assert main(["advise", str(recording), *WORDS, *words]) == 0
    text = capsys.readouterr().out
    assert "120 requests in 7140 s; the last 40, from 4760 s on, are counted" in text
    assert "960 blocks of 16 tokens stored, 480 distinct; 0 unknown parents" in text
    assert "100.0 % of them are rebuilt" in text
    assert "≥" not in text
    assert "Top breakers need token ids: --keep-tokens." in text
    assert "host 8MiB, policy lru, finds 64.0 % of prompt tokens" in text
    assert text.endswith("\nkvtrie vllm MODEL --host 8MiB --policy lru\n")


def test_a_recording_with_token_ids_has_its_breakers(tmp_path, capsys):
    path, tokens = tmp_path / "events.jsonl", list(range(64 * SIZE))
    recorder = Recorder(path, keep_tokens=True)
    for at in range(40):
        prompt = [*tokens[:20], 5000 + at, *tokens[21:]]
        blocks = [1000 * at + block for block in range(64)] if at else list(range(64))
        blocks[0] = 0
        recorder.batch(Batch(at, 60.0 * at, [Stored(blocks, None, SIZE, None, prompt)], rank=0))
    recorder.close()
    assert main(["advise", str(path), *WORDS, "--gpu", "1MB", "--disk", "0"]) == 0
    text = capsys.readouterr().out
    assert "1. 39117 tokens of 39 requests that part at token 20 of 1024" in text
    assert main(["advise", str(path), *WORDS, "--gpu", "1MB", "--disk", "0", "--json"]) == 0
    (breaker,) = json.loads(capsys.readouterr().out)["breakers"]
    assert (breaker["position"], breaker["requests"]) == (20, 39)


def test_a_recording_as_json_and_picture(recording, tmp_path, capsys):
    picture = tmp_path / "advice.png"
    words = ["--host", "7680KiB", "--json", "--plot", str(picture)]
    assert main(["advise", str(recording), *WORDS, *words]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["shares_of"] == "all requests"
    assert answer["coverage"] == 1
    assert answer["gpu_bytes"] == 39 * BLOCK
    assert [row["policy"] for row in answer["rows"]] == ["lru", "lru", "learned", "learned"]
    assert answer["rows"][0]["saved"] == pytest.approx(8 / 12.5, abs=0.01)
    assert answer["chosen"]["host"] == 480 * BLOCK
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_trace(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": at * 1000, "input_length": 512, "output_length": 1, "hash_ids": [at]}
        for at in range(60)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert main(["advise", str(trace), *WORDS, "--gpu", "8MiB"]) == 0
    text = capsys.readouterr().out
    assert "Shares are of the trace." in text
    assert "Nothing to gain: prompts are new content" in text


def test_the_shape_of_a_models_folder(recording, tmp_path, capsys):
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"hidden_size": 256, "torch_dtype": "bfloat16", "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["advise", str(recording), "--model", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu_bytes"] == 39 * BLOCK


HYBRID = {
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "torch_dtype": "bfloat16",
    "model_type": "gemma3_text",
    "sliding_window": 64,
    "attention_chunk_size": 128,
    "layer_types": ["full_attention", *["sliding_attention"] * 4, "chunked_attention"],
}


@pytest.fixture
def hybrid(tmp_path):
    """The recording of a server with three kinds of layers, and the folder of its model."""
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    path = tmp_path / "hybrid.jsonl"
    recorder = Recorder(path)
    for batch in batches():
        names = batch.stored[0].hashes
        parts = [
            *(Part(group, "sliding_window", 64, SIZE, names[-4:]) for group in (1, 2)),
            Part(3, "chunked_local_attention", None, 2 * SIZE, names[1::2]),
            *(Part(group, removed=names) for group in (1, 2, 3)),
        ]
        recorder.batch(replace(batch, parts=parts))
    recorder.close()
    return path


def test_groups_of_layers_are_played_apart(hybrid, tmp_path, capsys):
    words = ["--model", str(tmp_path), "--gpu", "2MiB", "--host", "64MiB", "--disk", "0"]
    assert main(["advise", str(hybrid), *words]) == 0
    text = capsys.readouterr().out
    assert (
        "Groups of layers besides full attention: 1 of chunked_local_attention in blocks of 32 "
        "tokens, 2 of sliding_window of 64 tokens in blocks of 16 tokens. A prefix counts up to "
        "the deepest border of 32 tokens at which all of them are there." in text
    )
    assert "Warning" not in text
    assert main(["advise", str(hybrid), *words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["block_tokens"], len(answer["groups"])) == (32, 3)
    found = [row["found"] for row in answer["rows"]]
    assert found == pytest.approx([8 / 12.5] * 2, abs=0.01)


def test_without_a_shape_one_group_is_played_with_a_warning(hybrid, capsys):
    assert main(["advise", str(hybrid), *WORDS, "--gpu", "2MiB"]) == 0
    text = capsys.readouterr().out
    assert "Warning: a model with several groups of layers: 720 events of other groups" in text


def test_a_model_with_other_windows_is_refused(hybrid, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(HYBRID | {"sliding_window": 32}))
    assert main(["advise", str(hybrid), "--model", str(tmp_path), "--gpu", "2MiB"]) == 2
    said = capsys.readouterr().err
    assert "sliding_window of 64 tokens in blocks of 16 tokens" in said
    assert "the model has full, sliding of 32 tokens, chunked of 128 tokens" in said


def test_a_trace_is_played_with_the_groups_of_a_named_model(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": at * 1000,
            "input_length": 1024,
            "output_length": 1,
            "hash_ids": [at, at + 99],
        }
        for at in [*range(1, 31), *range(1, 31)]
    ]
    rows = [row | {"timestamp": at * 1000} for at, row in enumerate(rows)]
    trace.write_text("\n".join(map(json.dumps, rows)) + "\n")
    words = ["--model", "qwen3-next-80b", "--gpu", "1GiB", "--host", "8GiB", "--disk", "0"]
    assert main(["advise", str(trace), *words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["rows"][0]["gpu"] + answer["rows"][0]["found"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--model DIR or --bytes-per-token N wanted"),
        (["--bytes-per-token", "6"], "a multiple of 4 wanted"),
        ([*WORDS, "--metrics", "http://h/metrics"], "--metrics goes with a server's endpoint"),
        ([*WORDS, "--keep-tokens"], "--keep-tokens goes with --record"),
        ([*WORDS, "--host", "1KB"], "a size of 1000 bytes is below a block of 16384 bytes"),
        ([*WORDS, "--gpu", "1KB"], "--gpu SIZE wanted, at least a block"),
        ([*WORDS, "--policy", "best"], "'best'"),
        (["--model", "/nowhere"], "/nowhere/config.json: No such file"),
    ],
)
def test_a_wrong_argument_is_named(recording, capsys, words, said):
    assert main(["advise", str(recording), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_time_that_cannot_be_is_refused(capsys):
    for wrong in ("10", "0s", "25h", "soon"):
        with pytest.raises(SystemExit):
            main(["advise", "tcp://h:1", *WORDS, "--for", wrong])
        assert "30s, 10m or at most 24h wanted" in capsys.readouterr().err
