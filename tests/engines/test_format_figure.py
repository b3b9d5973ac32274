"""A format of lower tiers is accepted with a calibration of the weights that are served."""

import json

import pytest

from kvtrie.engines.format_figure import FormatFigure
from kvtrie.errors import ConfigError

WEIGHTS = bytes(range(32))
ROW = {"kl_mean": 2e-4, "kl_p99": 1e-3, "top1": 1.0, "block_bytes": 10, "of_bf16": 0.53}
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
    assert figure == ("int8", 2e-4, 0.53, "tiers below the GPU")
    assert "int8, 0.530 of bfloat16's bytes: mean KL of next tokens 2.00e-04 nats" in figure.text()
    assert figure.as_dict() == {"name": "int8", "kl_mean": 2e-4}


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
    "NaN": ({"formats": {"int8": ROW | {"kl_mean": float("nan")}}}, {}, "a mean KL of nan nats"),
}


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
    for text in ("", "[]", "{}", "\0"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="cannot be read for format 'int8'"):
            read(path)
