"""`python -m models.train.export PIECES OUT`: writes the official checkpoint from a piece of training."""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from models.data.tokenizer import make_tokenizer
from models.train.checkpoint import export, load_piece, new_model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m models.train.export", description=__doc__)
    parser.add_argument("pieces", type=Path, help="folder with piece-*.safetensors")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    model = new_model()
    try:
        load_piece(model, args.pieces)
    except (FileNotFoundError, RuntimeError) as error:
        sys.exit(f"{args.pieces}: {error}")
    export(model, make_tokenizer(), args.out)
    for path in sorted(args.out.iterdir()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        print(f"{path.stat().st_size:>10,} bytes  {digest}  {path.name}")


if __name__ == "__main__":
    main()
