"""A tool whose calls are easy to judge, for whoever has a model call one."""

from __future__ import annotations

from typing import Any

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"town": {"enum": ["Oslo", "Bergen"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["town", "days"],
    "additionalProperties": False,
}


def tool(name: str, *, strict: bool = False) -> dict[str, Any]:
    """A declaration whose arguments must obey `WEATHER`."""
    return {"type": "function", "function": {"name": name, "parameters": WEATHER, "strict": strict}}
