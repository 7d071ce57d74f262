#!/bin/sh
# Everything that a GPU machine should be asked after a change, in a few minutes: compiles all kernels, proves them,
# measures the slice of the model, and runs the tests that need a device, compute-sanitizer over our own CUDA among them.
# Each stage has a limit of its own, and one that fails costs the others nothing.
#
# Usage: bench/gpu_run.sh FOLDER [COMMIT], in a checkout, with the packages importable or PYTHON set to a Python that has
# them. FOLDER gets log.txt, slice7.json and tables of kernels.
set -u
out=$1
commit=${2:-unknown}
python=${PYTHON:-python3}
export PYTHONPATH="worker:kernels:bench:eval${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$out"
started=$(date +%s)

# stage NAME SECONDS COMMAND…
stage() {
    name=$1
    limit=$2
    shift 2
    echo "== $name: $(($(date +%s) - started)) s after the start" | tee -a "$out/log.txt"
    timeout -k 5 "$limit" "$@" >"$out/.stage" 2>&1
    code=$?
    tr '\r' '\n' <"$out/.stage" | grep -v '^$' | tail -n 400 >>"$out/log.txt"
    echo "== $name ended with $code" | tee -a "$out/log.txt"
    grep -E '^\{|^error|passed|failed|compiled and right' "$out/.stage" | cut -c1-400 | tail -n 25
    rm -f "$out/.stage"
}

slice=$(mktemp -d)
"$python" -m baleen_bench slice7 --config-only "$slice"
sizes="1 16 64 128"
flags="--load-format dummy --uniform-routing --chunked-prefill-size 8192 --context-length 40000"
# shellcheck disable=SC2086
stage compile-slice 110 "$python" -m baleen_worker compile "$slice" $flags --max-running-requests 128 --cuda-graph-bs $sizes
stage slice-bf16 110 "$python" -m baleen_bench slice7 --variant bf16 --out "$out/slice7-bf16.json" --commit "$commit" \
    --seconds 75 --profile 16x4096
stage compile-micro 60 "$python" -m baleen_worker compile models/micro --max-running-requests 6 --cuda-graph-bs 2 6
stage kernel-tests 90 "$python" -m pytest -q -p no:cacheprovider -p no:benchmark -m gpu -n 8 --dist worksteal --timeout 80 kernels/tests
stage tests 120 "$python" -m pytest -q -p no:cacheprovider -p no:xdist --timeout 70 -m gpu \
    worker/tests/run/test_cuda.py worker/tests/run/test_cuda_sampling.py worker/tests/run/test_cuda_faults.py \
    worker/tests/run/test_host_pool.py
stage invariance 240 "$python" -m pytest -q -p no:cacheprovider -p no:xdist -m gpu worker/tests/proof/test_gpu_invariance.py
stage slice-fp8 90 "$python" -m baleen_bench slice7 --variant fp8 --out "$out/slice7-fp8.json" --commit "$commit" \
    --seconds 60 --profile 64x4096
stage doctor 60 "$python" -m baleen_kernels doctor
echo "== all stages: $(($(date +%s) - started)) s" | tee -a "$out/log.txt"
