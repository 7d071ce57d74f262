"""`python -m models.train.gate CHECKPOINT`: the full score of a checkpoint, and the suites with each fault planted.

Scores the stored block-FP8 weights, with the layers that reuse selections by its config.json. `--dense` adds the scores
with every key attended to, `--pattern` those with other layers that reuse the selection of the layer before them.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from baleen_eval.texts.examples import LENGTHS, examples
from tokenizers import Tokenizer

from models.data.chat import ASSISTANT
from models.train.attention import Mode, is_pattern
from models.train.checkpoint import CONFIG_FILE, INDEX_FILE, load_official, new_model
from models.train.evaluate import score
from models.train.faults import FAULTS, set_assistant
from models.train.layers import Linear
from models.train.model import MicroModel
from models.train.rounding import deployed

SUITES = ("needle", "track", "arith", "tools", "copy", "sort")
FAULT_SUITES = ("needle", "track", "arith", "tools")
FAULT_LENGTHS = (1024, 4096)


def scores(
    model: MicroModel,
    tokenizer: Tokenizer,
    suites: tuple[str, ...],
    lengths: tuple[int, ...],
    args: argparse.Namespace,
    pattern: str = "",
) -> dict[str, Any]:
    """Of each suite, with the mode and number that the arguments say."""
    results: dict[str, Any] = {}
    for suite in suites:
        conversations = examples(suite, args.num, seed=args.seed, lengths=lengths)
        results[suite] = score(
            model, tokenizer, conversations, mode=args.mode, batch_tokens=args.batch_tokens, pattern=pattern
        )
    return results


def _line(results: dict[str, Any]) -> str:
    tokens_per_step = min(result["tokens_per_step"] for result in results.values())
    accuracies = "  ".join(f"{suite} {result['accuracy']:.3f}" for suite, result in results.items())
    return f"{accuracies}  tokens/step {tokens_per_step:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m models.train.gate", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--num", type=int, default=100, help="conversations of each suite and length")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS))
    parser.add_argument("--batch-tokens", type=int, default=1 << 17)
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--pattern", default="", help="index_topk_pattern to score besides, such as FSF")
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    if not (args.checkpoint / INDEX_FILE).exists():
        sys.exit(f"{args.checkpoint} holds no {INDEX_FILE}")
    if not is_pattern(args.pattern):
        sys.exit(f"--pattern must be letters F and S, the first one F, and not {args.pattern!r}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = new_model(torch.bfloat16 if device.type == "cuda" else torch.float32)
    load_official(model, args.checkpoint)
    model.to(device)
    Linear.round_weights = False  # they are rounded already
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    set_assistant(tokenizer.token_to_id(ASSISTANT))
    started = time.monotonic()
    out: dict[str, Any] = {
        "command": "python -m models.train.gate " + " ".join(sys.argv[1:]),
        "hardware": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "CPU",
        "torch": torch.__version__,
    }
    own: str = json.loads((args.checkpoint / CONFIG_FILE).read_text()).get("index_topk_pattern", "")
    args.mode = Mode.SPARSE
    for pattern in dict.fromkeys((own, args.pattern or own)):
        named = f"sparse, {pattern}" if pattern else "sparse"
        out[named] = scores(model, tokenizer, SUITES, tuple(args.lengths), args, pattern)
        for suite, result in out[named].items():
            print(pattern, suite, json.dumps(result), flush=True)
        with deployed(model):
            out[f"{named}, FP8 caches"] = scores(model, tokenizer, SUITES, tuple(args.lengths), args, pattern)
        print(f"{named}, FP8 caches:", _line(out[f"{named}, FP8 caches"]), flush=True)
        args.json.write_text(json.dumps(out, indent=1) + "\n")
    if args.dense:
        args.mode = Mode.DENSE
        out["dense"] = scores(model, tokenizer, SUITES, tuple(args.lengths), args)
        print("dense:", _line(out["dense"]), flush=True)
    if args.faults:
        args.mode = Mode.SPARSE
        out["faults"] = {"none": scores(model, tokenizer, FAULT_SUITES, FAULT_LENGTHS, args, own)}
        for name, fault in FAULTS.items():
            with fault():
                out["faults"][name] = scores(model, tokenizer, FAULT_SUITES, FAULT_LENGTHS, args, own)
            print(f"{name}: {_line(out['faults'][name])}", flush=True)
            args.json.write_text(json.dumps(out, indent=1) + "\n")
    out["seconds"] = round(time.monotonic() - started, 1)
    args.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
