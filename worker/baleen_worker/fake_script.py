"""Answers written down beforehand, for the fake runner to replay: what a test wants a model to have said.

A script is a file of JSON lines, `{"cue": [ids], "answer": [ids]}`. A prompt gets the answer whose cue stands last in
it, the longer one of two that end at the same place; so the newest message decides, and a conversation can go on. A
prompt without a cue gets the fake runner's own tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Scene(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer and what brings it on. Both hold token ids."""

    cue: tuple[int, ...]
    answer: tuple[int, ...]


class FakeScript:
    """The scenes of a script, found by the last token of their cues."""

    def __init__(self, scenes: Sequence[Scene]) -> None:
        self._by_last_id: dict[int, list[Scene]] = {}
        for scene in sorted(scenes, key=lambda scene: -len(scene.cue)):
            self._by_last_id.setdefault(scene.cue[-1], []).append(scene)

    @classmethod
    def load(cls, path: Path, vocab_size: int) -> FakeScript:
        """Reads a script. Raises ValueError, naming the line, when it cannot be played with this vocabulary."""
        try:
            lines = path.read_text("utf-8").splitlines()
        except OSError as error:
            raise ValueError(f"--fake-script {path} cannot be read: {error.strerror}") from None
        return cls([_scene(line, f"--fake-script {path}, line {number}", vocab_size) for number, line in _full(lines)])

    def answer_to(self, prompt_ids: Sequence[int]) -> tuple[int, ...] | None:
        """The answer to a prompt; None when no cue stands in it."""
        for end in range(len(prompt_ids), 0, -1):
            for scene in self._by_last_id.get(prompt_ids[end - 1], ()):
                if len(scene.cue) <= end and tuple(prompt_ids[end - len(scene.cue) : end]) == scene.cue:
                    return scene.answer
        return None


def _full(lines: Sequence[str]) -> list[tuple[int, str]]:
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _scene(line: str, place: str, vocab_size: int) -> Scene:
    try:
        scene = msgspec.json.decode(line, type=Scene)
    except msgspec.DecodeError as error:
        raise ValueError(f"{place}: {error}; a line is an object with the lists of ids 'cue' and 'answer'") from None
    if not scene.cue or not scene.answer:
        raise ValueError(f"{place}: cue and answer need at least one id each")
    wrong = next((token_id for token_id in (*scene.cue, *scene.answer) if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"{place}: id {wrong} is not in the vocabulary of {vocab_size}")
    return scene
