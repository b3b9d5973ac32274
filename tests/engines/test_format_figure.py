"""A format of lower tiers is accepted with a calibration of the weights that are served."""

import json

import pytest

from kvtrie.engines.server.format_figure import FormatFigure
from kvtrie.errors import ConfigError

WEIGHTS = bytes(range(32))
ROW = {"kl_mean": 2e-4, "kl_p99": 1e-3, "top1": 1.0, "block_bytes": 10, "of_bf16": 0.53}
ROW["tokens"] = 768
MADE = {"checkpoint": WEIGHTS.hex(), "native_last": 0, "formats": {"int8": ROW}}


def read(path, name="int8", **more):
    limits = {"max_kl": 1e-3, "native_last": 0, "uncalibrated": False} | more
    return FormatFigure.read(name, None if path is None else str(path), lambda: WEIGHTS, **limits)


def written(folder, **more):
    path = folder / "calibration.json"
    path.write_text(json.dumps(MADE | more))
    return path


def test_a_figure_says_what_was_measured(tmp_path):
    figure = read(written(tmp_path))
    assert figure == ("int8", 2e-4, 0.53, "tiers below the GPU", 768)
    assert figure.text().endswith(
        "int8, 0.530 of bfloat16's bytes: mean KL of next tokens 2.00e-04 nats, measured over 768 "
        "tokens"
    )
    assert figure.as_dict() == {"name": "int8", "kl_mean": 2e-4, "tokens": 768}


def test_a_calibration_without_counts_is_accepted_if_all_blocks_had_the_format(tmp_path):
    row = {name: value for name, value in ROW.items() if name != "tokens"}
    figure = read(written(tmp_path, formats={"int8": row}))
    assert figure.tokens is None
    assert "measured over" not in figure.text()


def test_a_server_may_keep_more_native_tokens_than_the_calibration(tmp_path):
    path = written(tmp_path, native_first=64, native_last=128)
    assert read(path, native_first=64, native_last=128).kl_mean == 2e-4
    assert read(path, native_first=128, native_last=256).kl_mean == 2e-4


def test_blocks_of_another_size_do_not_change_int8(tmp_path):
    assert read(written(tmp_path, block_tokens=16), block_tokens=32).kl_mean == 2e-4


def test_native_tiers_need_no_calibration():
    assert read(None, "native") is None


REFUSED = {
    "no file": (None, {}, "format 'int8' has no calibration: measure it with `kvtrie calibrate"),
    "another format": ({}, {"name": "fp8"}, "cannot be read for format 'fp8': KeyError"),
    "other weights": ({"checkpoint": "ab" * 32}, {}, "is of weights abababababababab, and the"),
    "weights without files": ({"checkpoint": None}, {}, "is of weights None, and the server has"),
    "computed tokens": ({"native_last": 128}, {"native_last": 64}, "set it to at least 128"),
    "native tokens": (
        {"native_first": 4},
        {"native_first": 3},
        "has kept the first 4 tokens of a prompt in the model's format, and native_first is 3",
    ),
    "blocks of another size": (
        {"block_tokens": 16, "formats": {"int4": ROW}},
        {"name": "int4", "block_tokens": 32},
        "is of blocks of 16 tokens, which the cost of 'int4' with 0 native tokens depends on",
    ),
    "native blocks of another size": (
        {"block_tokens": 16, "native_first": 4},
        {"native_first": 4, "block_tokens": 32},
        "and the server has blocks of 32: give --block-tokens 32",
    ),
    "a cost above the limit": ({}, {"max_kl": 1e-4}, "a mean KL of 2.00e-04 nats by"),
    "no number": ({"formats": {"int8": ROW | {"kl_mean": "x"}}}, {}, "cannot be read"),
    "measured over nothing": (
        {"formats": {"int8": ROW | {"tokens": 0}}, "native_first": 512},
        {"native_first": 512},
        "has measured 'int8' over no tokens, with the first 512 tokens of a prompt in the model's",
    ),
    "no count, and native tokens": (
        {"formats": {"int8": {"kl_mean": 0.0, "of_bf16": 0.5}}, "native_first": 4},
        {"native_first": 4},
        "has measured 'int8' over a number of tokens that it does not have, with the first 4",
    ),
}
EXTREMES = [
    *({"kl_mean": value} for value in (float("nan"), float("inf"), -1e-9, 10**400, True, None, [])),
    *({"of_bf16": value} for value in (float("nan"), -1, "0.5", {})),
    *({"tokens": value} for value in (-1, 0.5, 2**63, "9", None, True, float("inf"))),
]


@pytest.mark.parametrize("change", EXTREMES, ids=lambda change: str(change)[:24])
def test_a_figure_that_cannot_be_is_refused(change, tmp_path):
    path = written(tmp_path, formats={"int8": ROW | change})
    with pytest.raises(
        ConfigError, match=f"cannot be read for format 'int8'.*{next(iter(change))}"
    ):
        read(path)


@pytest.mark.parametrize("name", ["native_last", "native_first"])
@pytest.mark.parametrize("value", [-1, 0.5, 2**63, float("inf"), True, None, "0", []])
def test_a_number_of_native_tokens_that_cannot_be_is_refused(name, value, tmp_path):
    with pytest.raises(ConfigError, match=f"cannot be read for format 'int8'.*{name}"):
        read(written(tmp_path, **{name: value}))


@pytest.mark.parametrize("what", REFUSED)
def test_a_format_without_its_calibration_is_refused(what, tmp_path):
    changes, more, message = REFUSED[what]
    path = None if changes is None else written(tmp_path, **changes)
    with pytest.raises(ConfigError) as refused:
        read(path, **more)
    assert message in str(refused.value)
    figure = read(path, **more, uncalibrated=True)
    assert figure.format == more.get("name", "int8")
    if figure.kl_mean is None:
        assert "was not measured for these weights (uncalibrated=true)" in figure.text()


def test_a_file_that_is_no_calibration_is_refused(tmp_path):
    path = tmp_path / "calibration.json"
    row = '{"formats": {"int8": %s}}'
    texts = ("", "[]", "{}", "\0", "1", '{"formats": 1}', "[" * 10**5, row % "[]", row % "null")
    for text in (*texts, "1" * 5000):
        path.write_text(text)
        with pytest.raises(ConfigError, match="cannot be read for format 'int8'"):
            read(path)
