#!/bin/sh
# Checks that this machine has what `make setup` cannot install itself, and prints the Python interpreter to use.
# Each thing that is missing is named in one sentence with the command that installs it; nothing is changed.
set -u

apt="sudo apt-get update && sudo apt-get install -y"
problems=0

missing() {
    echo "error: $1" >&2
    problems=1
}

# True when version $1 is at least version $2 (major.minor).
at_least() {
    [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]
}

command -v git >/dev/null || missing "git is missing; install it with: $apt git"
command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null ||
    missing "a C compiler is missing; install one with: $apt build-essential"

if command -v cargo >/dev/null; then
    cargo_version=$(cargo --version | cut -d ' ' -f 2)
    at_least "$cargo_version" 1.88 ||
        missing "cargo $cargo_version is too old, 1.88 or newer is needed; update it with: rustup update stable"
else
    missing "Rust is missing; install it with: curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y && . \"\$HOME/.cargo/env\""
fi

python=
for candidate in "${PYTHON:-python3}" python3 python3.13 python3.12 python3.11 python3.14; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    missing "Python 3.11 or newer is missing; install it with: $apt python3 (or name one: make setup PYTHON=/path/to/python3)"
elif ! "$python" -c 'import venv' 2>/dev/null; then
    missing "$python has no venv module; install it with: $apt python3-venv"
elif ! "$python" -c 'import ensurepip' 2>/dev/null &&
    ! "$python" -m pip --version >/dev/null 2>&1 &&
    ! command -v uv >/dev/null; then
    missing "$python has neither ensurepip nor pip; install them with: $apt python3-venv"
fi

[ "$problems" -eq 0 ] || exit 1
echo "$python"
