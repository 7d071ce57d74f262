"""Runs one op's Triton backend over its cases on the host; the last line of output is JSON, an outcome by case.

python run_triton.py OP [MODULE.NAME=NUMBER …], with TRITON_INTERPRET=1. The numbers replace those of modules of `own`.
"""

from __future__ import annotations

import importlib
import json
import sys

from baleen_kernels import proof, selection
from baleen_kernels.registry import OPS


def main() -> None:
    """Prints the outcomes."""
    selection.load_ops()
    op = OPS[sys.argv[1]]
    for setting in sys.argv[2:]:
        place, _, number = setting.partition("=")
        module, _, attribute = place.partition(".")
        setattr(importlib.import_module(f"baleen_kernels.own.{module}"), attribute, int(number))
    outcomes: dict[str, str] = {}
    for case in op.cases:
        inputs = op.make_inputs(case)
        if op.entry("triton").rejection(inputs) is None:
            try:
                proof.check_case(op, "triton", inputs, device="cpu")
                outcomes[case.name] = "ok"
            except proof.WrongResultError as error:
                outcomes[case.name] = str(error)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
