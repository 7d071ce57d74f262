"""What a worker was asked to do: the command line, checked once and then frozen.

`parse` turns arguments into a `LaunchConfig`; everything after it reads plain fields. Flags of the SGLang launch
command that mean something here are taken under their own names; the rest of that guide's flags are in
`launch_flags.py`, each with the values it may have or the reason why it is refused.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from baleen_worker import kernel_flags, launch_flags, logit_processors
from baleen_worker.cache.host import WritePolicy
from baleen_worker.cache.prefix import PAGE_SIZE_TOKENS
from baleen_worker.flag_values import (
    chunked_prefill_size,
    fraction,
    integer,
    json_object,
    kv_cache_dtype,
    named_place,
    number,
)
from baleen_worker.waiting import Policy

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
RUNNERS = ("model", "fake")
SCHEDULE_POLICIES = tuple(policy.value for policy in Policy)
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "fp8_e4m3")
LOG_LEVELS = ("debug", "info", "warning", "error")


class ConfigError(ValueError):
    """The command line asks for something that cannot be done; the message is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class FakeConfig:
    """Behaviour of `--runner fake`, for tests and measurements of everything around the model."""

    step_ms: float = 0.0
    poison_token_id: int | None = None
    script: Path | None = None


@dataclass(frozen=True, slots=True)
class HostCacheConfig:
    """Host memory as a second tier of the prefix cache.

    `size_gb` gigabytes of it (10^9 bytes); None: `ratio` times the pages of the device.
    """

    write_policy: str = WritePolicy.WRITE_THROUGH.value
    ratio: float = 2.0
    size_gb: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What the rank process needs: model, device, memory and schedule. Equal on every rank.

    `max_total_tokens` bounds the pages; without it they fill `mem_fraction_static` of the device's memory.
    `chunked_prefill_size` is the token budget of one step, decodes included; -1 computes any prompt in one step.
    `context_length` only lowers the model's own. `model_overrides` is a JSON object of keys of config.json, or "".
    `logit_processors`: name and "module:attribute" of each plugin that requests may name.
    `constraint_compile_ms`: how long a grammar may take; `constraint_cache_mib`: memory for compiled ones.
    `arithmetic`: see `model_kernels`. `kernel_backends`: roles of kernels and the backends asked for them.
    `cuda_graph_max_bs`: rows that a decode graph may have; `cuda_graph_bs`: the sizes that are captured, () for ours.
    `uniform_routing`: experts are picked evenly, at random.
    `poison_freed_pages`: for tests, so that a page that is read after it was given back spoils what reads it.
    `radix_cache_max_tokens` bounds what the prefix cache keeps beyond running requests; without it, the pages do.
    `host_cache`: None for no second tier.
    """

    model_dir: Path
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    kv_cache_dtype: str = "auto"
    max_total_tokens: int | None = None
    mem_fraction_static: float = 0.85
    max_running_requests: int = 256
    max_queued_requests: int = 4096
    chunked_prefill_size: int = 2048
    context_length: int | None = None
    logit_processors: tuple[tuple[str, str], ...] = ()
    constraint_compile_ms: int = 1000
    constraint_cache_mib: int = 256
    page_size: int = PAGE_SIZE_TOKENS
    disable_overlap_schedule: bool = False
    disable_radix_cache: bool = False
    poison_freed_pages: bool = False
    radix_cache_max_tokens: int | None = None
    host_cache: HostCacheConfig | None = None
    schedule_policy: str = "fcfs"
    schedule_conservativeness: float = 1.0
    priority_scheduling_preemption_threshold: int = 10
    seed: int = 0
    model_overrides: str = ""
    runner: str = "model"
    fake: FakeConfig = FakeConfig()
    log_level: str = "info"
    arithmetic: str = "auto"
    kernel_backends: tuple[tuple[str, str], ...] = ()
    disable_cuda_graph: bool = False
    cuda_graph_max_bs: int | None = None
    cuda_graph_bs: tuple[int, ...] = ()
    uniform_routing: bool = False


class KvEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`--kv-events-config`, as JSON. Addresses are ZMQ's; one with `*` is bound, any other is connected to.

    `buffer_steps`: batches kept for replay. `hwm`: batches that may wait for a slow subscriber, which then loses some.
    """

    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000
    enable_kv_cache_events: bool = True

    def __post_init__(self) -> None:
        if self.publisher not in ("zmq", "null"):
            raise ValueError(f"publisher {self.publisher!r} is not known: use zmq or null")
        if self.buffer_steps < 1 or self.hwm < 1:
            raise ValueError("buffer_steps and hwm must be at least 1")

    @property
    def enabled(self) -> bool:
        """Whether anything is published."""
        return self.publisher == "zmq" and self.enable_kv_cache_events


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """What only the head process needs: where it listens and how it is supervised."""

    host: str = "127.0.0.1"
    port: int = 30001
    model_id: str = ""
    supervised: bool = False
    metrics_port: int | None = None
    kv_events: KvEventsConfig | None = None


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    head: HeadConfig
    worker: WorkerConfig


def parse(arguments: Sequence[str]) -> LaunchConfig:
    """Checked configuration. Raises ConfigError; `--help` prints and exits as argparse does."""
    values = vars(_parser().parse_args(list(arguments)))
    model_dir = _model_dir(values)
    worker = WorkerConfig(
        model_dir=model_dir,
        dtype=values["dtype"],
        device=values["device"],
        load_format=values["load_format"],
        kv_cache_dtype=values["kv_cache_dtype"],
        max_total_tokens=values["max_total_tokens"],
        mem_fraction_static=values["mem_fraction_static"],
        max_running_requests=values["max_running_requests"],
        max_queued_requests=values["max_queued_requests"],
        chunked_prefill_size=values["chunked_prefill_size"],
        context_length=values["context_length"],
        logit_processors=_logit_processors(values),
        constraint_compile_ms=values["constraint_compile_ms"],
        constraint_cache_mib=values["constraint_cache_mib"],
        disable_overlap_schedule=values["disable_overlap_schedule"],
        disable_radix_cache=values["disable_radix_cache"],
        poison_freed_pages=values["poison_freed_pages"],
        radix_cache_max_tokens=values["radix_cache_max_tokens"],
        host_cache=_host_cache(values),
        schedule_policy=values["schedule_policy"],
        schedule_conservativeness=values["schedule_conservativeness"],
        priority_scheduling_preemption_threshold=values["priority_scheduling_preemption_threshold"],
        seed=values["seed"],
        model_overrides=values["json_model_override_args"] or "",
        runner=values["runner"],
        fake=FakeConfig(
            step_ms=values["fake_step_ms"],
            poison_token_id=values["fake_poison_token_id"],
            script=values["fake_script"],
        ),
        log_level=values["log_level"],
        arithmetic=values["arithmetic"],
        kernel_backends=kernel_flags.chosen(values),
        disable_cuda_graph=values["disable_cuda_graph"],
        cuda_graph_max_bs=values["cuda_graph_max_bs"],
        cuda_graph_bs=tuple(sorted(set(values["cuda_graph_bs"]))),
        uniform_routing=values["uniform_routing"],
    )
    head = HeadConfig(
        host=values["host"],
        port=values["port"],
        model_id=values["served_model_name"] or model_dir.resolve().name,
        supervised=values["supervised"],
        metrics_port=values["metrics_port"],
        kv_events=values["kv_events_config"],
    )
    return LaunchConfig(head=head, worker=worker)


class _Parser(argparse.ArgumentParser):
    """Reports a bad command line as an exception, so that one place decides how a failed start looks."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m baleen_worker",
        description="Serve one model to gateways over gRPC.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model_dir", nargs="?", type=Path, metavar="MODEL_DIR", help="folder with config.json and safetensors files")
    add("--model", "--model-path", dest="model_flag", type=Path, metavar="DIR", help="the same, as a flag")
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--port", type=integer(0, 65535), default=30001, help="port to listen on, 0 for a free one (default 30001)")
    add("--served-model-name", metavar="NAME", help="model id to announce (default: last part of MODEL_DIR)")
    add("--supervised", action="store_true", help="report as JSON lines on stdout and exit when stdin closes")
    add("--log-level", choices=LOG_LEVELS, default="info", type=str.lower)
    add(
        "--kv-events-config",
        type=_kv_events,
        metavar="JSON",
        help='publish what the prefix cache holds over ZMQ, e.g. {"endpoint": "tcp://*:5557"}',
    )
    add("--metrics-port", type=integer(1, 65535), metavar="PORT", help="serve Prometheus metrics on this port too")

    add = parser.add_argument_group("model").add_argument
    add("--dtype", choices=DTYPES, default="auto", help="auto: float32 on CPU, bfloat16 on GPU")
    add("--device", choices=DEVICES, default="auto")
    add("--load-format", choices=LOAD_FORMATS, default="auto", help="dummy: random weights, no files read")
    add("--seed", "--random-seed", type=integer(0, 2**63 - 1), default=0, help="seed of dummy weights")
    add(
        "--json-model-override-args",
        type=json_object,
        metavar="JSON",
        help="keys of config.json to replace, e.g. '{\"index_topk_freq\": 4}'",
    )
    add("--context-length", type=integer(1), metavar="TOKENS", help="lower the model's context length")

    add = parser.add_argument_group("memory and schedule").add_argument
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", type=kv_cache_dtype)
    add("--max-total-tokens", type=integer(PAGE_SIZE_TOKENS), metavar="TOKENS", help="capacity of the page pool")
    add("--mem-fraction-static", type=fraction, default=0.85, help="device memory for weights and pages")
    add("--max-running-requests", type=integer(1, 4096), default=256)
    add("--max-queued-requests", type=integer(1), default=4096, help="waiting requests before new ones are refused")
    add(
        "--chunked-prefill-size",
        type=chunked_prefill_size,
        default=2048,
        metavar="TOKENS",
        help="token budget of one step, decodes included; a multiple of 64, or -1 for whole prompts (default 2048)",
    )
    add(
        "--disable-overlap-schedule",
        action="store_true",
        help="collect a step before the next one is planned; always so on a CPU",
    )
    add("--poison-freed-pages", action="store_true", help="fill pages with NaN when they are given back, for tests")
    add("--disable-radix-cache", action="store_true", help="no request reuses what was computed for another")
    add(
        "--radix-cache-max-tokens",
        type=integer(0),
        metavar="TOKENS",
        help="tokens that the prefix cache keeps beyond running requests (default: all that fit)",
    )
    add(
        "--enable-hierarchical-cache",
        action="store_true",
        help="keep pages in host memory too, and copy them back instead of computing them again",
    )
    add(
        "--hicache-ratio",
        type=number(0.01, 1000.0),
        metavar="RATIO",
        help="pages in host memory for each page of the device (default 2)",
    )
    add("--hicache-size", type=number(0.0, 1e6), metavar="GB", help="host memory for pages, instead of a ratio")
    add(
        "--hicache-write-policy",
        choices=[policy.value for policy in WritePolicy],
        help="copy a page to the host as soon as it is full (default), or when the device evicts it",
    )
    add(
        "--schedule-policy",
        choices=SCHEDULE_POLICIES,
        default="fcfs",
        help="order of waiting requests of one priority and cache salt; lpm: longest cached prefix first",
    )
    add(
        "--schedule-conservativeness",
        type=number(0.0, 10.0),
        default=1.0,
        metavar="FACTOR",
        help="scales the growth that admission expects of running requests; more of it, fewer preemptions",
    )
    add(
        "--priority-scheduling-preemption-threshold",
        type=integer(0),
        default=10,
        metavar="DIFFERENCE",
        help="a request takes the place of a running one whose priority is lower by more than this (default 10)",
    )

    kernel_flags.add_to(parser)

    add = parser.add_argument_group("sampling").add_argument
    add(
        "--logit-processor",
        type=named_place,
        action="append",
        default=[],
        metavar="NAME=MODULE:ATTRIBUTE",
        help="a plugin that requests may name in logit_processors; may be repeated. Installed ones need no flag",
    )

    add(
        "--constraint-compile-ms",
        type=integer(10, 600_000),
        default=1000,
        metavar="MS",
        help="time for a schema or grammar to compile before it is refused (default %(default)s)",
    )
    add(
        "--constraint-cache-mib",
        type=integer(1),
        default=256,
        metavar="MIB",
        help="memory for compiled schemas and grammars (default %(default)s)",
    )

    add = parser.add_argument_group("tests and measurements").add_argument
    add("--runner", choices=RUNNERS, default="model", help="fake: checked deterministic tokens, no model")
    add(
        "--fake-step-ms",
        type=number(0.0, 60_000.0),
        default=0.0,
        metavar="MS",
        help="how long a step of the fake runner takes",
    )
    add("--fake-poison-token-id", type=integer(0), metavar="ID", help="the fake runner raises at this prompt token")
    add("--fake-script", type=Path, metavar="FILE", help="answers for the fake runner to replay (JSON lines)")

    launch_flags.add_to(parser)
    return parser


def _model_dir(values: dict[str, Any]) -> Path:
    positional, flag = values["model_dir"], values["model_flag"]
    if positional is not None and flag is not None and positional != flag:
        raise ConfigError(f"the model is named twice, as {positional} and as {flag}: keep one")
    chosen: Path | None = positional if positional is not None else flag
    if chosen is None:
        raise ConfigError("no model named: give MODEL_DIR, a folder with config.json")
    if not chosen.is_dir():
        raise ConfigError(f"{chosen} is not a folder: MODEL_DIR is a folder with config.json and safetensors files")
    return chosen


def _host_cache(values: dict[str, Any]) -> HostCacheConfig | None:
    names = ("hicache_ratio", "hicache_size", "hicache_write_policy")
    given = [f"--{name.replace('_', '-')}" for name in names if values[name] is not None]
    if not values["enable_hierarchical_cache"]:
        if given:
            raise ConfigError(f"{given[0]} has no effect alone: add --enable-hierarchical-cache, or leave it out")
        return None
    if values["disable_radix_cache"]:
        raise ConfigError(
            "--enable-hierarchical-cache extends the cache that --disable-radix-cache turns off: keep one"
        )
    if values["hicache_size"] and values["hicache_ratio"]:
        raise ConfigError("--hicache-size and --hicache-ratio both say how large the tier is: keep one")
    if values["hicache_size"] and values["runner"] == "fake":
        raise ConfigError("--hicache-size has no meaning for the fake runner's pages: use --hicache-ratio")
    return HostCacheConfig(
        write_policy=values["hicache_write_policy"] or WritePolicy.WRITE_THROUGH.value,
        ratio=values["hicache_ratio"] or 2.0,
        size_gb=values["hicache_size"] or None,  # 0 is SGLang's word for none
    )


def _logit_processors(values: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Plugins of the command line and of installed distributions. The fake runner has no logits to process."""
    given: list[tuple[str, str]] = values["logit_processor"]
    if values["runner"] == "fake":
        if given:
            raise ConfigError("--logit-processor has no effect on the fake runner, which has no logits: leave it out")
        return ()
    names = [name for name, _ in given]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--logit-processor names {twice} twice: keep one")
    return tuple((logit_processors.installed() | dict(given)).items())


def _kv_events(text: str) -> KvEventsConfig:
    try:
        return msgspec.json.decode(text, type=KvEventsConfig)
    except ValueError as error:  # msgspec's errors among them
        raise argparse.ArgumentTypeError(str(error)) from None
