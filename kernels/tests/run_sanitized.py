"""Calls our own CUDA kernels on their cases and on odd sizes, for a tool that watches every access; see test_sanitizer.

python run_sanitized.py. Every tensor has memory of its own, so that what lies behind it is nobody's.
"""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
from baleen_kernels import proof, topk_slots
from odd_sizes import draw

NUM_DRAWS = 12


def main() -> None:
    """Prints how many calls came out like the reference; raises at one that did not."""
    cases = [topk_slots.make_inputs(case) for case in topk_slots.CASES]
    calls = [*cases, *(draw("topk_slots", seed) for seed in range(NUM_DRAWS))]
    for inputs in calls:
        if inputs["scores"].numel():
            on_device = proof.move(inputs, "cuda")
            found = topk_slots.OP.pick("cuda")(**on_device).cpu()
            torch.cuda.synchronize()
            assert torch.equal(found, topk_slots.reference(**inputs))
    print(f"{len(calls)} calls are right")


if __name__ == "__main__":
    main()
