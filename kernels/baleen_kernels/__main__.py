"""`python -m baleen_kernels doctor`: what this machine can run, what is missing, and how to add it."""

from __future__ import annotations

import argparse
import os
import sys

from baleen_kernels.doctor import report


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 if a chosen backend gives wrong results."""
    parser = argparse.ArgumentParser(prog="python -m baleen_kernels", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="say what this machine can run, and check it")
    doctor.add_argument(
        "--device", choices=("auto", "cpu"), default="auto", help="cpu: leave accelerators out of account"
    )
    doctor.add_argument("--kv-cache-dtype", choices=("auto", "bfloat16", "fp8_e4m3"), default="auto")
    doctor.add_argument("--no-check", action="store_true", help="only look; run nothing")
    options = parser.parse_args(arguments)
    try:
        code = report(device=options.device, kv_cache_dtype=options.kv_cache_dtype, check=not options.no_check)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read it has read enough, as `head` does. What is still buffered goes nowhere when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
