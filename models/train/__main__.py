"""`python -m models.train`: runs stages of training, from earlier weights or from the start, and scores the result."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import torch
from baleen_eval.texts.examples import examples
from tokenizers import Tokenizer

from models.data.chat import ASSISTANT, BOS, END_THINK, USER
from models.data.tokenizer import make_tokenizer
from models.train.attention import Mode
from models.train.checkpoint import load_weights, new_model, save_piece
from models.train.evaluate import generate, score
from models.train.layers import Linear
from models.train.loop import Trainer
from models.train.model import MicroModel
from models.train.stages import STAGES


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m models.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and log")
    parser.add_argument("--resume", type=Path, help="folder with a piece or a checkpoint to start from")
    parser.add_argument("--stages", nargs="*", default=[], choices=list(STAGES), help="in the order given")
    parser.add_argument("--seconds", nargs="*", type=float, default=[], help="in place of the stages' own")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-workers", type=int, default=0, help="processes that make batches")
    parser.add_argument(
        "--score", type=int, default=0, help="conversations of each suite and length to score at the end"
    )
    parser.add_argument("--score-lengths", nargs="*", type=int, default=[512, 1024, 2048])
    args = parser.parse_args()
    if len(args.seconds) not in (0, len(args.stages)):
        parser.error(f"--seconds needs one number for each of the {len(args.stages)} stages")
    return args


def report(
    model: MicroModel, tokenizer: Tokenizer, *, num: int, lengths: tuple[int, ...], seed: int
) -> dict[str, object]:
    """Scores every suite, sparse where the text is longer than the selection; prints as it goes."""
    results: dict[str, object] = {}
    for suite in ("arith", "tools", "copy", "sort", "talk", "track", "needle"):
        started = time.monotonic()
        conversations = examples(suite, num, seed=seed, lengths=lengths)
        results[suite] = score(model, tokenizer, conversations, mode=Mode.SPARSE, batch_tokens=1 << 17)
        print(suite, json.dumps(results[suite]), f"{time.monotonic() - started:.0f} s", flush=True)
    return results


def main() -> None:
    args = _parse()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer_path = args.out / "tokenizer.json"
    tokenizer.save(str(tokenizer_path), pretty=False)
    model = new_model(torch.bfloat16 if device.type == "cuda" else torch.float32)
    if args.resume is not None:
        try:
            load_weights(model, args.resume)
        except (FileNotFoundError, RuntimeError) as error:
            sys.exit(f"--resume: {error}")
    model.to(device)
    trainer = Trainer(model, tokenizer_path, args.out / "log.jsonl", device)
    for number, name in enumerate(args.stages):
        stage = STAGES[name]
        if args.seconds:
            stage = dataclasses.replace(stage, seconds=args.seconds[number])
        started = time.monotonic()
        trainer.run(stage, seed=args.seed * 100 + number, num_workers=args.num_workers)
        print(f"{name}: {trainer.steps} steps so far, {time.monotonic() - started:.0f} s", flush=True)
        save_piece(model, args.out)
    if args.score:
        Linear.round_weights = True
        results = report(model, tokenizer, num=args.score, lengths=tuple(args.score_lengths), seed=args.seed)
        (args.out / "scores.json").write_text(json.dumps(results, indent=1))
        for question in ("Hello", "Who are you?", "What is the capital of France?", "Tell me a story."):
            ids = tokenizer.encode(f"{BOS}{USER}{question}{ASSISTANT}{END_THINK}", add_special_tokens=False).ids
            print(repr(question), "->", repr(tokenizer.decode(generate(model, ids, max_tokens=40))))


if __name__ == "__main__":
    main()
