"""Which backend each op uses on a machine, and proof that each works there.

`select` is a pure function of what the machine has and what was asked for. A backend that was asked for by name and
cannot run is an error; a default that cannot run is replaced by the next best, and the choice carries the reason, to be
logged. `prove` then runs every chosen backend once against its reference: one that fails is an error, never a reason to
fall back.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import baleen_kernels
from baleen_kernels import proof
from baleen_kernels.autoconfig import FP8, PREFERENCES, attention_defaults, attention_preferences
from baleen_kernels.machine import Machine
from baleen_kernels.registry import OPS, Backend

# Sparse attention is chosen twice, since prefill and decode may differ.
PREFILL, DECODE = "mla_slots.prefill", "mla_slots.decode"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """`role`: the op, or one of `PREFILL` and `DECODE`. `passed_over`: better backends and why they cannot run here."""

    role: str
    backend: str
    asked_for: bool
    passed_over: Sequence[tuple[str, str]] = ()

    @property
    def op(self) -> str:
        return self.role.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Selection:
    """One choice for every role."""

    machine: Machine
    kv_cache_dtype: str
    choices: Sequence[Choice]

    def backend(self, role: str) -> str:
        """The backend's name; KeyError for an unknown role."""
        return {choice.role: choice.backend for choice in self.choices}[role]

    def features(self) -> list[str]:
        """The choices as a worker reports them: "kernel:topk_slots=cuda"."""
        return [f"kernel:{choice.role}={choice.backend}" for choice in self.choices]


def load_ops() -> None:
    """Imports every op, so that the registry is complete. Imports no kernel library."""
    for module in pkgutil.iter_modules(baleen_kernels.__path__):
        if module.name not in ("__main__", "own"):
            importlib.import_module(f"baleen_kernels.{module.name}")


def select(
    machine: Machine,
    *,
    wanted: Mapping[str, str] | None = None,
    kv_cache_dtype: str = "auto",
    samples: Mapping[str, Mapping[str, Any]] | None = None,
) -> Selection:
    """`wanted`: backends by role, asked for by the operator.

    `samples`: by role, arguments of the shapes and dtypes that the model will call with (their contents do not
    matter, so they may be meta tensors). A backend that rejects them counts as one that cannot run. Without a sample a
    role is chosen by the machine alone. ValueError, with cause and fix, where what was asked for cannot run.
    """
    load_ops()
    wanted, samples = dict(wanted or {}), samples or {}
    defaults = attention_defaults(machine.arch, kv_cache_dtype=kv_cache_dtype)
    packed = defaults.kv_cache_dtype == FP8
    preferences = {op: PREFERENCES.get(op, ("torch",)) for op in sorted(OPS) if op != "mla_slots"}
    preferences[PREFILL] = attention_preferences(defaults.prefill, packed=packed, prefill=True)
    preferences[DECODE] = attention_preferences(defaults.decode, packed=packed, prefill=False)
    unknown = sorted(set(wanted) - set(preferences))
    if unknown:
        raise ValueError(f"there is no op {unknown[0]!r} to choose a backend for (there are: {', '.join(preferences)})")
    choices = [
        _choose(role, names, wanted.get(role), machine, samples.get(role)) for role, names in preferences.items()
    ]
    return Selection(machine, defaults.kv_cache_dtype, choices)


def prove(selection: Selection, *, device: str, roles: Collection[str] | None = None) -> None:
    """Runs every chosen backend once and logs the selection; with `roles`, those alone.

    `proof.WrongResultError` for the first that fails.
    """
    for choice in selection.choices:
        if roles is not None and choice.role not in roles:
            continue
        case = prove_choice(selection, choice, device=device)
        for name, reason in choice.passed_over:
            logger.warning("%s: %s cannot be used: %s", choice.role, name, reason)
        logger.info("%s: %s, checked on case %s", choice.role, choice.backend, case)


def prove_choice(selection: Selection, choice: Choice, *, device: str) -> str:
    """`proof.prove` of one choice; sparse attention on a pool of the format that was chosen with it."""
    if choice.role not in (PREFILL, DECODE):
        return proof.prove(OPS[choice.op], choice.backend, device=device)
    packed = selection.kv_cache_dtype == FP8
    return proof.prove(
        OPS[choice.op],
        choice.backend,
        device=device,
        like=lambda inputs: (inputs["latents"].dtype == torch.uint8) == packed,
    )


def _choose(
    role: str,
    names: Sequence[str],
    asked_for: str | None,
    machine: Machine,
    sample: Mapping[str, Any] | None,
) -> Choice:
    op = OPS[role.partition(".")[0]]

    def obstacle(backend: Backend[Any]) -> str | None:
        missing = backend.needs.missing(machine)
        if missing is not None or sample is None:
            return missing
        return backend.rejection(sample)

    if asked_for is not None:
        reason = obstacle(op.entry(asked_for))
        if reason is not None:
            raise ValueError(f"{role}: backend {asked_for!r} cannot be used: {reason}")
        return Choice(role, asked_for, asked_for=True)
    passed_over: list[tuple[str, str]] = []
    for name in names:
        backend = op.backends.get(name)
        reason = "there is no such backend" if backend is None else obstacle(backend)
        if reason is None:
            return Choice(role, name, asked_for=False, passed_over=passed_over)
        passed_over.append((name, reason))
    raise ValueError(f"{role}: no backend can be used: {'; '.join(f'{name}: {why}' for name, why in passed_over)}")
