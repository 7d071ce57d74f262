"""The table of ops and their backends. Owns names and lookup; the arithmetic lives in one file per op.

An op has one float32 `reference`, a list of cases that every backend must pass, and backends by name. The caller names
the backend; a name that is not there raises. Nothing is chosen by availability, and nothing falls back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

OPS: dict[str, Op[Any]] = {}


@dataclass(frozen=True, slots=True)
class Op(Generic[F]):
    """One operation of the model.

    reference: the contract as slow, plain float32 code.
    cases: shapes and values worth checking, of the op file's own case type.
    make_inputs: case -> keyword arguments of a call.
    atol, rtol: how far a float32 backend may be from the reference; 0 for ops with integer or byte results.
    """

    name: str
    reference: F
    cases: Sequence[Any]
    make_inputs: Callable[[Any], Mapping[str, Any]]
    atol: float = 1e-5
    rtol: float = 1e-5
    backends: dict[str, F] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name in OPS:
            raise ValueError(f"op {self.name!r} is declared twice")
        OPS[self.name] = self

    def backend(self, name: str) -> Callable[[F], F]:
        """Decorator that adds an implementation under a name."""

        def register(implementation: F) -> F:
            if name in self.backends:
                raise ValueError(f"op {self.name!r} already has a backend {name!r}")
            self.backends[name] = implementation
            return implementation

        return register

    def pick(self, name: str) -> F:
        """Returns the implementation of that name; ValueError if there is none."""
        implementation = self.backends.get(name)
        if implementation is None:
            known = ", ".join(sorted(self.backends)) or "none"
            raise ValueError(f"op {self.name!r} has no backend {name!r} (it has: {known})")
        return implementation
