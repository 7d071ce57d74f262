#!/bin/sh
# Fuzzes each target for FUZZ_SECONDS (60). With --available it says nothing and succeeds where fuzzing is possible.
#
# Built for speed: what is looked for, panics and broken properties, is found without a sanitizer (FUZZ_SANITIZER=address
# also watches the dependencies' unsafe code, at a third of the speed), and comparisons are not traced, for the
# dictionaries know the words. FUZZ_FLAGS are further flags of libFuzzer, such as -runs=10000000 or -fork=8.
#
# cargo-fuzz rather than a driver of our own on stable: coverage guides it to tags that random bytes never spell. It
# needs a nightly compiler, which nothing else here does, so `make test` runs the same functions over known inputs.
set -eu
cd "$(dirname "$0")"

missing() {
    [ "${1:-}" = --available ] || echo "error: $2" >&2
    exit 1
}

cargo +nightly --version >/dev/null 2>&1 ||
    missing "${1:-}" "fuzzing needs a nightly Rust compiler; install it with: rustup toolchain install nightly"
cargo fuzz --version >/dev/null 2>&1 ||
    missing "${1:-}" "fuzzing needs cargo-fuzz; install it with: cargo install cargo-fuzz --locked"
[ "${1:-}" = --available ] && exit 0

# The versions that are shipped; cargo adds what only fuzzing needs.
cp ../../Cargo.lock Cargo.lock
"${PYTHON:-python3}" seeds.py
for target in dsml sse chat_json; do
    echo "== $target"
    # An input that takes 5 s is a finding: everything here is linear.
    # shellcheck disable=SC2086 # flags are words
    cargo +nightly fuzz run --release --no-trace-compares --codegen-units 8 --sanitizer "${FUZZ_SANITIZER:-none}" \
        "$target" -- \
        -max_total_time="${FUZZ_SECONDS:-60}" -max_len=2048 -timeout=5 -dict="$target.dict" -print_final_stats=1 \
        ${FUZZ_FLAGS:-}
done
