"""Generates the worker's Python code from the contract, without a system protoc.

`python proto/generate.py` writes `worker/baleen_worker/pb/`: `worker_pb2.py` and its type stub from
`baleen/worker/v1/worker.proto`, and a copy of `limits.json`, so that an installed package carries all it needs.
`python proto/generate.py --check` writes nothing and exits 1 when a committed file differs from what it would write.

No `_grpc` module is generated: the server registers its handlers by name, which leaves no import path to repair.
Needs `grpcio-tools`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib import resources
from pathlib import Path

PROTO_ROOT = Path(__file__).resolve().parent
CONTRACT = Path("baleen/worker/v1/worker.proto")
TARGET = PROTO_ROOT.parent / "worker" / "baleen_worker" / "pb"

INIT = '''"""Generated from proto/ by `python proto/generate.py`; never edited by hand."""\n'''


def render() -> dict[str, bytes]:
    """Contents of every file of the package, by file name."""
    from grpc_tools import protoc  # here, so that --help works without it

    with tempfile.TemporaryDirectory() as scratch:
        status: int = protoc.main(
            [
                "protoc",
                f"--proto_path={PROTO_ROOT}",
                f"--proto_path={resources.files('grpc_tools') / '_proto'}",
                f"--python_out={scratch}",
                f"--pyi_out={scratch}",
                str(CONTRACT),
            ]
        )
        if status != 0:
            raise SystemExit(f"error: protoc refused {CONTRACT}")
        built = Path(scratch) / CONTRACT.parent
        files = {path.name: path.read_bytes() for path in sorted(built.iterdir())}
    files["__init__.py"] = INIT.encode()
    files["limits.json"] = (PROTO_ROOT / CONTRACT.parent / "limits.json").read_bytes()
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate worker/baleen_worker/pb from proto/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a committed file is stale")
    arguments = parser.parse_args()

    files = render()
    stale = [name for name, data in files.items() if not _holds(TARGET / name, data)]
    if arguments.check:
        for name in stale:
            print(
                f"error: {(TARGET / name).relative_to(PROTO_ROOT.parent)} is stale: run python proto/generate.py",
                file=sys.stderr,
            )
        return 1 if stale else 0
    TARGET.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (TARGET / name).write_bytes(files[name])
    return 0


def _holds(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data


if __name__ == "__main__":
    raise SystemExit(main())
