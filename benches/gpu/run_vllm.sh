#!/usr/bin/env bash
# vLLM with kvtrie and without on this machine's card, in at most nine minutes, without a network:
#
#     benches/gpu/run_vllm.sh FOLDER
#
# FOLDER is what benches/gpu/vllm_bundle.sh wrote. It is unpacked once, into target/gpu-vllm. The
# report is target/gpu-vllm.md; the same command goes on after the rows that have passed. Without a
# card every row says so and the exit status is 2.
set -euo pipefail
folder=$(realpath "${1:?the bundle folder is missing: benches/gpu/vllm_bundle.sh writes it}")
cd "${KVTRIE_CHECKOUT:-$(dirname "$0")/../..}"
[[ -d benches/gpu ]] || { echo "$PWD is no checkout of kvtrie: set KVTRIE_CHECKOUT" >&2; exit 2; }
site=target/gpu-vllm
if ! cmp -s "$folder/SHA256SUMS" "$site/SHA256SUMS"; then
    (cd "$folder" && sha256sum --check --quiet SHA256SUMS) || { echo "a part is damaged or missing" >&2; exit 2; }
    rm -rf "$site"
    mkdir -p "$site"
    cat "$folder"/vllm.tar.gz.* | tar -C "$site" -xzf -
    cp "$folder/SHA256SUMS" "$site/"
fi
export PYTHONPATH="$PWD/$site/vllm:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0
exec "${PYTHON:-python3}" -m benches.gpu.vllm "${@:2}"
