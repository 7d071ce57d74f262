"""`python -m models.train.export PIECES OUT`: writes the official checkpoint from a piece of training.

With `--over BASE --pattern FSF`, what the piece changes in that checkpoint: links to its files, the tensors that
differ, and a config.json that says which layers reuse selections.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from models.data.tokenizer import make_tokenizer
from models.train.attention import is_pattern
from models.train.checkpoint import export, export_over, load_piece, new_model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m models.train.export", description=__doc__)
    parser.add_argument("pieces", type=Path, help="folder with piece-*.safetensors")
    parser.add_argument("out", type=Path)
    parser.add_argument("--over", type=Path, metavar="BASE", help="checkpoint of which only what differs is written")
    parser.add_argument("--pattern", default="", help="index_topk_pattern of what is written over BASE, such as FSF")
    args = parser.parse_args()
    if not is_pattern(args.pattern) or bool(args.pattern) != (args.over is not None):
        parser.error("--over takes a --pattern of letters F and S, the first one F; without --over there is none")
    model = new_model()
    try:
        load_piece(model, args.pieces)
        if args.over is None:
            export(model, make_tokenizer(), args.out)
        else:
            export_over(model, args.over, args.pattern, args.out)
    except (FileNotFoundError, RuntimeError) as error:
        sys.exit(f"{args.pieces}: {error}")
    except ValueError as error:
        sys.exit(f"--over: {error}")
    for path in sorted(args.out.iterdir()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        arrow = f" -> {path.readlink()}" if path.is_symlink() else ""
        print(f"{path.stat().st_size:>10,} bytes  {digest}  {path.name}{arrow}")


if __name__ == "__main__":
    main()
