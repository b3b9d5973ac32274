#!/usr/bin/env bash
# A folder with vLLM and all that it needs to run with kvtrie on a machine with a card and no network:
#
#     benches/gpu/vllm_bundle.sh [--part-size MIB] [--python VERSION] [--compiled] WHEEL FOLDER
#
# WHEEL is kvtrie's (`make wheel`). The machine has torch 2.11, triton 3.6, transformers 5.17, numpy
# and this checkout; benches/gpu/vllm_packages.txt has the other packages. FOLDER gets parts of at
# most MIB (60) MiB, which can be sent one after the other, their SHA-256 sums, and run_vllm.sh.
# vLLM comes without compiled kernels: Triton computes attention, torch everything else. With
# `--compiled` its kernels come too, but for those of other attention: their torch is 2.13.
# VERSION (3.12) is the machine's Python.
set -euo pipefail
size=60 version=3.12 compiled=
while [[ ${1:-} == --* ]]; do
    case $1 in
        --part-size) size=${2:?MIB is missing}; shift 2 ;;
        --python) version=${2:?VERSION is missing}; shift 2 ;;
        --compiled) compiled=yes; shift ;;
        *) echo "$1 is no option: --part-size, --python or --compiled" >&2; exit 2 ;;
    esac
done
wheel=$(realpath "${1:?the wheel is missing: make wheel builds it}")
out=${2:?FOLDER is missing}
[[ $size =~ ^[1-9][0-9]*$ ]] || { echo "a part of $size MiB: at least 1 MiB" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work/wheels" "$work/vllm"
rm -f "$out"/vllm.tar.gz.*

fetch=("$python" -m pip download --quiet --no-deps --only-binary ":all:" --dest "$work/wheels"
    --python-version "$version")
for glibc in 2_{39..17} 2014 1; do
    fetch+=(--platform "manylinux${glibc/#2_/_2_}_x86_64")
done
"${fetch[@]}" -r "$here/vllm_packages.txt"
for each in "$work"/wheels/*.whl "$wheel"; do
    "$python" -m zipfile -e "$each" "$work/vllm"
done
keep=(_C_stable_libtorch.abi3.so _moe_C_stable_libtorch.abi3.so)
find "$work/vllm/vllm" \( -name '*.so' -o -name vllm-rs -o -name '*.hpp' -o -name '*.cuh' \) -type f |
    while read -r file; do
        [[ -n $compiled && " ${keep[*]} " == *" ${file##*/} "* ]] || rm "$file"
    done

tar -C "$work" -czf - vllm | split -b "${size}M" -d -a 3 - "$out/vllm.tar.gz."
cp "$here/run_vllm.sh" "$out/"
(cd "$out" && sha256sum vllm.tar.gz.* run_vllm.sh >SHA256SUMS)
ls -l "$out"
