"""Flags of the SGLang launch guide that need no field of ours: one table, one row a flag.

A row either lists the values that describe what this worker does anyway (the flag is then accepted, and says so in
`--help`), or gives the sentence with which it is refused. Both the older `--nsa-*` and the newer `--dsa-*` spellings
are rows. Owns no behaviour: a flag with an effect is in `config.py`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class LaunchFlag:
    """`takes_value` False: a switch. `accepts`: values that hold here; empty and not `any_value`: always refused.

    `why` is cause and mend, for `--help` or for the refusal.
    """

    names: tuple[str, ...]
    why: str
    takes_value: bool = True
    accepts: tuple[str, ...] = ()
    any_value: bool = False

    @property
    def refused(self) -> bool:
        """Whether no use of the flag is accepted."""
        return not self.accepts and not self.any_value


def _switch(name: str, why: str) -> LaunchFlag:
    return LaunchFlag((name,), why, takes_value=False, accepts=("",))


def _no_switch(name: str, why: str) -> LaunchFlag:
    return LaunchFlag((name,), why, takes_value=False)


_ONE_RANK = "this worker runs one rank; start several workers and give all their addresses to the gateway"
_GATEWAY = "text belongs to the gateway: pass it to `gateway serve`"
_SPECULATIVE = "speculative decoding is not built: leave it out"
_DISAGGREGATION = "pages travel over tcp and are reserved with their request: leave it out"
_CONTEXT_PARALLEL = "context parallelism is not built: leave it out"
_HOST_TIER = "the host tier copies whole pages and ends there: leave it out"
_HISPARSE = "latents live on the device, whole, while a request runs: leave it out"
_LORA = "LoRA is not built: merge the adapter into the checkpoint"


def _one(*names: str) -> LaunchFlag:
    return LaunchFlag(names, _ONE_RANK, accepts=("1",))


def _refuse(why: str, *names: str) -> list[LaunchFlag]:
    return [LaunchFlag((name,), why) for name in names]


LAUNCH_FLAGS: tuple[LaunchFlag, ...] = (
    # Already true of this worker, or without effect on it.
    _switch("--trust-remote-code", "no effect: code in a model folder is never run"),
    _switch("--enable-mixed-chunk", "already so: prefill chunks and decodes share a step"),
    _switch(
        "--enable-priority-scheduling",
        "already so: a higher priority is served first; see --priority-scheduling-preemption-threshold",
    ),
    _switch("--disable-custom-all-reduce", "no effect: one rank reduces nothing"),
    _switch("--skip-server-warmup", "no effect: there is no warm-up request"),
    _switch("--enable-metrics", "already so: the gateway serves /metrics; see --metrics-port for the worker's own"),
    LaunchFlag(("--dist-init-addr", "--nccl-init-addr"), "no effect: one process needs no rendezvous", any_value=True),
    LaunchFlag(("--tokenizer-worker-num",), "no effect: the gateway tokenizes", any_value=True),
    # One value describes what is built.
    LaunchFlag(
        ("--attention-backend",),
        "attention is the model's own: use dsa or nsa; --dsa-prefill-backend and --dsa-decode-backend choose kernels",
        accepts=("dsa", "nsa"),
    ),
    LaunchFlag(("--sampling-backend",), "sampling is PyTorch's: use pytorch", accepts=("pytorch",)),
    LaunchFlag(("--page-size",), "pages hold 64 tokens", accepts=("64",)),
    LaunchFlag(("--stream-interval",), "every step is streamed", accepts=("1",)),
    LaunchFlag(("--load-balance-method",), "one rank has nothing to balance", accepts=("auto", "round_robin")),
    LaunchFlag(("--node-rank",), _ONE_RANK, accepts=("0",)),
    _one("--tp", "--tp-size", "--tensor-parallel-size"),
    _one("--dp", "--dp-size", "--data-parallel-size"),
    _one("--ep", "--ep-size", "--expert-parallel-size"),
    _one("--pp", "--pp-size", "--pipeline-parallel-size"),
    _one("--nnodes"),
    _one("--attn-dp-size"),
    _one("--attn-cp-size"),
    _one("--dcp-size"),
    _one("--moe-dp-size"),
    _one("--moe-dense-tp-size"),
    LaunchFlag(("--moe-a2a-backend",), "one rank exchanges no experts", accepts=("none",)),
    LaunchFlag(("--deepep-mode",), "one rank exchanges no experts", accepts=("auto",)),
    LaunchFlag(("--radix-eviction-policy",), "cached pages go least recently used first: use lru", accepts=("lru",)),
    # Not built.
    _no_switch("--enable-dp-attention", _ONE_RANK),
    _no_switch("--enable-dp-lm-head", _ONE_RANK),
    _no_switch("--enable-eplb", _ONE_RANK),
    _no_switch("--enable-two-batch-overlap", _ONE_RANK),
    _no_switch("--enable-single-batch-overlap", _ONE_RANK),
    *_refuse(_ONE_RANK, "--ep-num-redundant-experts", "--eplb-rebalance-num-iterations"),
    _no_switch("--enable-prefill-cp", _CONTEXT_PARALLEL),
    _no_switch("--enable-dsa-prefill-context-parallel", _CONTEXT_PARALLEL),
    _no_switch("--enable-nsa-prefill-context-parallel", _CONTEXT_PARALLEL),
    *_refuse(_CONTEXT_PARALLEL, "--cp-strategy", "--dsa-prefill-cp-mode", "--nsa-prefill-cp-mode"),
    *_refuse(
        _SPECULATIVE,
        "--speculative-algorithm",
        "--speculative-algo",
        "--speculative-num-steps",
        "--speculative-eagle-topk",
        "--speculative-num-draft-tokens",
        "--speculative-draft-model-path",
        "--speculative-dsa-topk-backend",
    ),
    _no_switch("--speculative-use-rejection-sampling", _SPECULATIVE),
    *_refuse(
        _DISAGGREGATION,
        "--disaggregation-decode-extra-slots",
        "--disaggregation-decode-polling-interval",
        "--num-reserved-decode-tokens",
    ),
    *_refuse(_HOST_TIER, "--hicache-io-backend", "--hicache-mem-layout", "--hicache-storage-backend"),
    _no_switch("--enable-hisparse", _HISPARSE),
    *_refuse(_HISPARSE, "--hisparse-config"),
    _no_switch("--enable-lora", _LORA),
    *_refuse(_LORA, "--lora-paths", "--lora-backend"),
    *_refuse("a checkpoint's own quantization is read from its config.json: leave it out", "--quantization"),
    LaunchFlag(("--retraction-policy",), "the shortest output makes way: use length", accepts=("length",)),
    *_refuse("a step's budget is --chunked-prefill-size: use that", "--max-prefill-tokens"),
    *_refuse(
        _GATEWAY,
        "--tool-call-parser",
        "--reasoning-parser",
        "--chat-template",
        "--tokenizer-path",
        "--api-key",
        "--admin-api-key",
    ),
)


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds every row to the parser; a refused use ends in `parser.error` with the row's sentence."""
    group = parser.add_argument_group("accepted for compatibility with SGLang's launch command")
    for flag in LAUNCH_FLAGS:
        group.add_argument(
            *flag.names,
            action=_Check,
            flag=flag,
            dest=argparse.SUPPRESS,
            nargs=_nargs(flag),
            metavar="|".join(flag.accepts) or "VALUE" if flag.takes_value else None,
            help=argparse.SUPPRESS if flag.refused else flag.why,
        )


def _nargs(flag: LaunchFlag) -> int | str | None:
    if not flag.takes_value:
        return 0
    return "+" if flag.any_value else None


class _Check(argparse.Action):
    def __init__(self, *, flag: LaunchFlag, **options: Any) -> None:
        super().__init__(**options)
        self._flag = flag

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        flag = self._flag
        name = option_string or flag.names[0]
        if flag.refused:
            parser.error(f"{name} cannot be honoured: {flag.why}")
        if flag.takes_value and not flag.any_value and values not in flag.accepts:
            parser.error(f"{name} {values} cannot be honoured: {flag.why}")
