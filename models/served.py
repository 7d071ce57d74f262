"""`python -m models.served --base-url URL --json OUT`: the score of a served micro model, every answer written freely.

Runs the suites of `python -m baleen_eval` one after another and writes one file with the hardware of this machine,
which is to be the server's. Unlike `models.train.gate`, nothing of the expected answers is given.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

SUITES = ("tools", "arith", "needle", "track")


def score(args: argparse.Namespace, suite: str) -> dict[str, Any]:
    """The result file of one suite. Exits with the suite's own code where it could not be asked or got errors."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / f"{suite}.json"
        command = [sys.executable, "-m", "baleen_eval", "--base-url", args.base_url, "--suite", suite]
        command += ["--num", str(args.num), "--seed", str(args.seed), "--parallel", str(args.parallel)]
        command += ["--json", str(out)]
        if suite in ("needle", "track"):
            command += ["--lengths", *map(str, args.lengths)]
            if suite == "needle" and args.plot is not None:
                command += ["--plot", str(args.plot)]
        code = subprocess.run(command, check=False).returncode
        if code:
            sys.exit(code)
        document = json.loads(out.read_text("utf-8"))
        # The file's place is a temporary one, and of no use to who repeats this.
        return document | {"command": document["command"].replace(str(out), f"{suite}.json")}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m models.served", description=__doc__)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--num", type=int, default=100, help="questions (needle, track: of each length)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--parallel", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--server", required=True, help="the command that started the server, for the record")
    parser.add_argument("--commit", required=True, help="of the server's code, for the record")
    parser.add_argument("--plot", type=Path, help="file for the heat-map of needle")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    document: dict[str, Any] = {
        "command": "python -m models.served " + " ".join(sys.argv[1:]),
        "server": args.server,
        "commit": args.commit,
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "suites": {},
    }
    for suite in SUITES:
        document["suites"][suite] = score(args, suite)
        args.json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
