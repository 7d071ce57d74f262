"""The table of ops and their backends. Owns names and lookup; the arithmetic lives in one file per op.

An op has one float32 `reference`, a list of cases that every backend must pass, and backends by name. The caller names
the backend; a name that is not there raises, and so does one that this machine cannot run or that rejects the shapes
it is given. Nothing falls back. Which names to use on a machine is `selection`'s question, whether a backend's results
are right is `proof`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from baleen_kernels.machine import ANYWHERE, Needs

F = TypeVar("F", bound=Callable[..., Any])

OPS: dict[str, Op[Any]] = {}


@dataclass(frozen=True, slots=True)
class Backend(Generic[F]):
    """One implementation of an op.

    call: the implementation. It imports its library when called, never when its module is imported.
    needs: what a machine must have for it.
    rejects: given a call's arguments, the reason why this backend cannot serve them, or None.
    """

    name: str
    call: F
    needs: Needs = ANYWHERE
    rejects: Callable[..., str | None] | None = None

    def rejection(self, arguments: Mapping[str, Any]) -> str | None:
        """Why these arguments are not for this backend; None if they are."""
        return None if self.rejects is None else self.rejects(**arguments)


@dataclass(frozen=True, slots=True)
class Op(Generic[F]):
    """One operation of the model.

    reference: the contract as slow, plain float32 code.
    cases: shapes and values worth checking, of the op file's own case type.
    make_inputs: case -> keyword arguments of a call.
    atol, rtol: how far a float32 backend may be from the reference; 0 for ops with integer or byte results.
    bf16_error: largest relative error (Frobenius norm) of a bfloat16 result, see `proof`.
    byte_flips: largest share of FP8 numbers that may be another neighbour of the exact value than the reference's,
        because sums were taken in another order before rounding; 0 where nothing is summed.
    canonical: (arguments, tensors to compare) -> the tensors with what the contract leaves open set to one value.
    """

    name: str
    reference: F
    cases: Sequence[Any]
    make_inputs: Callable[[Any], Mapping[str, Any]]
    atol: float = 1e-5
    rtol: float = 1e-5
    bf16_error: float = 1e-2
    byte_flips: float = 0.0
    canonical: Callable[[Mapping[str, Any], list[Any]], list[Any]] | None = None
    backends: dict[str, Backend[F]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name in OPS:
            raise ValueError(f"op {self.name!r} is declared twice")
        OPS[self.name] = self

    def backend(
        self, name: str, *, needs: Needs = ANYWHERE, rejects: Callable[..., str | None] | None = None
    ) -> Callable[[F], F]:
        """Decorator that adds an implementation under a name."""

        def register(implementation: F) -> F:
            if name in self.backends:
                raise ValueError(f"op {self.name!r} already has a backend {name!r}")
            self.backends[name] = Backend(name, implementation, needs, rejects)
            return implementation

        return register

    def pick(self, name: str) -> F:
        """Returns the implementation of that name; ValueError if there is none."""
        return self.entry(name).call

    def entry(self, name: str) -> Backend[F]:
        """Returns the backend of that name; ValueError if there is none."""
        backend = self.backends.get(name)
        if backend is None:
            known = ", ".join(sorted(self.backends)) or "none"
            raise ValueError(f"op {self.name!r} has no backend {name!r} (it has: {known})")
        return backend
