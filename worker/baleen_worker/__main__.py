"""`python -m baleen_worker MODEL_DIR`: serves one model to gateways; `compile MODEL_DIR` compiles its kernels instead.

Owns how a failed start looks.
"""

from __future__ import annotations

import logging
import sys


def main() -> int:
    """Exit status: 0 after an orderly end, 1 after a failure, 2 for a command line that cannot be honoured."""
    try:
        if sys.argv[1:2] == ["compile"]:
            from baleen_worker import compile as compile_command

            return compile_command.main(sys.argv[2:])
        return _run(sys.argv[1:])
    except KeyboardInterrupt:  # before the head handles signals itself
        return 130


def _run(arguments: list[str]) -> int:
    try:
        from baleen_worker.command_line import parse
        from baleen_worker.config import ConfigError
        from baleen_worker.head import FatalError, run
    except ModuleNotFoundError as error:
        message = f"the Python package {error.name} is missing for {sys.executable}: install baleen there"
        return _fail(message, arguments, status=1)
    try:
        config = parse(arguments)
        logging.basicConfig(
            level=config.worker.log_level.upper(),
            format="%(asctime)s %(levelname)s head: %(message)s",
            stream=sys.stderr,
        )
        return run(config)
    except ConfigError as error:
        return _fail(str(error), arguments, status=2)
    except FatalError as error:
        return _fail(str(error), arguments, status=1)


def _fail(message: str, arguments: list[str], *, status: int) -> int:
    if "--supervised" in arguments:
        import json

        print(json.dumps({"event": "fatal", "message": message}), flush=True)
    print(f"error: {message}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
