"""Scripts for the fake runner: what a test wants the model to say, written as text.

A line of a script is brought on by a cue in the newest message. Texts become ids with the micro model's tokenizer,
control tokens included, as a model would have produced them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from harness.processes import MICRO_MODEL
from tokenizers import Tokenizer

END = "<｜end▁of▁sentence｜>"


@dataclass(frozen=True)
class Line:
    """A user message or a tool result that is exactly `cue` gets `answer`; END belongs into it where it should end."""

    cue: str
    answer: str


@cache
def tokenizer() -> Tokenizer:
    """The micro model's."""
    return Tokenizer.from_file(str(MICRO_MODEL / "tokenizer.json"))


def ids(text: str) -> list[int]:
    """Control tokens in `text` become their ids."""
    return tokenizer().encode(text, add_special_tokens=False).ids


def write_script(path: Path, lines: list[Line]) -> Path:
    """Writes `--fake-script`'s file."""
    scenes = [{"cue": ids(line.cue), "answer": ids(line.answer)} for line in lines]
    path.write_text("".join(f"{json.dumps(scene)}\n" for scene in scenes), "utf-8")
    return path


def call(name: str, arguments: dict[str, object]) -> str:
    """One invoke in V3.2's markup."""
    parameters = "".join(
        f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>\n'


def calls(*invokes: str) -> str:
    """A block of calls, as it follows content."""
    return f"\n\n<｜DSML｜function_calls>\n{''.join(invokes)}</｜DSML｜function_calls>"


# Long enough that it cannot come in one piece: tokens that wait for a busy gateway leave it together, and few may.
TALE = "Once" + " upon a time" * 100
# One small model for every client: it greets, thinks, adds by two parallel calls, writes JSON, and talks.
TWO_CALLS = calls(call("add", {"a": 2, "b": 3}), call("add", {"a": 40, "b": 2}))
PLAY = [
    Line("Say hello.", "Hello there, friend." + END),
    Line("Think first.", "A greeting is due.</think>Hello." + END),
    Line("Add 2 and 3, and 40 and 2.", "Adding." + TWO_CALLS + END),
    Line("42", "The sums are 5 and 42." + END),  # the result of the second call
    Line("Write a sum as JSON.", '{"sum": 42}' + END),
    Line("Tell a tale.", TALE + END),
    Line("Talk for long.", " and so on" * 5000),  # until its limit, or until somebody leaves
]
