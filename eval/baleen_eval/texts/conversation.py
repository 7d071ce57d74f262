"""Conversations as data: messages, tools and calls, ending with the assistant's answer. How a model sees them, or how
they travel to a server, is others' business.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """A function call: name and arguments in order."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """`role` is system, user, assistant or tool. `reasoning` and `calls` are the assistant's, `tools` the system's."""

    role: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that end with the assistant's answer. `info` describes it for tables of results."""

    messages: tuple[Message, ...]
    thinking: bool = False
    info: dict[str, Any] = field(default_factory=dict)


def dumps(value: object) -> str:
    """JSON in the released style: a space after comma and colon, text as it is."""
    return json.dumps(value, ensure_ascii=False)
