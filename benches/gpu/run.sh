#!/usr/bin/env bash
# Everything that wants a CUDA device, in at most eight minutes, from one wheel and this checkout:
#
#     benches/gpu/run.sh dist/kvtrie-0.2.0-cp311-abi3-linux_x86_64.whl
#
# Needs a python3 (or $PYTHON) with torch 2.11 or newer, cuda-core, transformers, rich, matplotlib,
# pytest, pytest-timeout, pytest-benchmark and hypothesis; fetches nothing. The kernels are compiled
# for the card at hand.
set -uo pipefail
wheel=$(realpath "${1:?the wheel is missing: make wheel builds it}")
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}

devices=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 1
if [[ $devices == 0 ]]; then
    echo "not run: no CUDA device"
    exit 0
fi

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" -m pip install --quiet --no-index --no-deps --target "$site" "$wheel" || exit 1
export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
failed=0

# 150 + 2 * 60 + 200 seconds are the eight minutes, with ten to spare.
part() {
    local seconds=$1
    shift
    echo "== $*"
    timeout "$seconds" "$@" || { echo "== ended with $?"; failed=1; }
}

kernels=tests/kernels/test_on_device.py
part 150 "$python" -m pytest -q -m gpu "$kernels" tests/kernels/test_flash_on_device.py tests/tiers tests/transfer/test_streams_on_gpu.py \
    tests/engines/test_layer_by_layer.py tests/demo
if command -v compute-sanitizer >/dev/null; then
    # The bindings ask the driver for calls that it may not have: no error of ours.
    for tool in "memcheck --report-api-errors no" racecheck; do
        part 60 compute-sanitizer --tool $tool --error-exitcode 1 \
            "$python" -m pytest -q "$kernels" -k "skipped or (real_sizes and int8 and 576)"
    done
else
    echo "compute-sanitizer: not run, it is not installed"
fi
part 200 "$python" -m benches.gpu
exit "$failed"
