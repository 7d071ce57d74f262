"""The report of `python -m baleen_kernels doctor`, for people: machine, selection, proof, and what could be added."""

from __future__ import annotations

from baleen_kernels import proof, selection
from baleen_kernels.machine import PACKAGES, Machine, describe
from baleen_kernels.registry import OPS


def report(*, device: str, kv_cache_dtype: str, check: bool) -> int:
    """Prints the report; returns 1 if a chosen backend does not work, else 0."""
    machine = describe(device)
    print(machine_line(machine))
    for key, package in PACKAGES.items():
        version = machine.versions.get(key)
        print(f"  {package.distribution:18} {version or '-'}")
    chosen = selection.select(machine, kv_cache_dtype=kv_cache_dtype)
    print(f"\nKernels chosen, with {chosen.kv_cache_dtype} latents:")
    failed = 0
    for choice in chosen.choices:
        state = "not checked"
        if check:
            try:
                case = selection.prove_choice(chosen, choice, device="cpu" if machine.arch == "cpu" else "cuda")
                state = f"right on case {case}"
            except proof.WrongResultError as error:
                failed += 1
                state = f"WRONG: {error}"
        print(f"  {choice.role:22} {choice.backend:16} {state}")
    additions = [
        (choice.role, name, reason)
        for choice in chosen.choices
        for name, reason in choice.passed_over
        if not OPS[choice.op].entry(name).needs.unwritten
    ]
    if additions:
        print("\nBetter ones that cannot run here:")
        for role, name, reason in additions:
            print(f"  {role}: {name}: {reason}")
    if failed:
        print(f"\n{failed} of the chosen kernels do not work on this machine.")
    return 1 if failed else 0


def machine_line(machine: Machine) -> str:
    """The machine in one line."""
    memory = f", {machine.memory_bytes / 2**30:.0f} GiB" if machine.memory_bytes else ""
    tools = f", nvcc at {machine.tools['nvcc']}" if "nvcc" in machine.tools else ", no nvcc"
    return f"{machine.name} ({machine.arch}){memory}{tools}"
