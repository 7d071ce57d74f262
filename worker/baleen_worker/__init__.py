"""Baleen's worker: owns tokens, pages and devices; knows no text. Start it with `python -m baleen_worker MODEL_DIR`.

`from baleen_worker import LLM` generates in this process, without a server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baleen_worker.llm import LLM, Completion, RequestFailedError

__all__ = ["LLM", "Completion", "RequestFailedError"]


def __getattr__(name: str) -> Any:
    # Late, because head and rank import this package too and want none of it.
    if name in __all__:
        from baleen_worker import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
