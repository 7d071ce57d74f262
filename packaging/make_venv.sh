#!/bin/sh
# Creates .venv with uv in it, from whatever the machine has: ensurepip, a pip beside the interpreter, or uv itself.
# Usage: make_venv.sh PYTHON
set -eu

python=$1
if [ ! -x .venv/bin/python ]; then
    rm -rf .venv
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv .venv
    else
        "$python" -m venv --without-pip .venv
    fi
fi

[ -x .venv/bin/uv ] && exit 0
if .venv/bin/python -m pip --version >/dev/null 2>&1; then
    .venv/bin/python -m pip install --quiet --disable-pip-version-check uv
elif "$python" -m pip --version >/dev/null 2>&1; then
    # pip can install into another interpreter's environment only since 22.3; every Python 3.11 brings a newer one.
    "$python" -m pip --python .venv/bin/python install --quiet --disable-pip-version-check uv
else
    uv pip install --quiet --python .venv/bin/python uv
fi
