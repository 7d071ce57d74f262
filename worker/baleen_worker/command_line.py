"""The worker's command line: every flag, and how the flags become a `LaunchConfig`.

Flags of the SGLang launch command that mean something here are taken under their own names; the rest of that guide's
flags are in `launch_flags.py`, each with the values it may have or the reason why it is refused.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from baleen_worker import disaggregation_flags, kernel_flags, launch_flags, logit_processors
from baleen_worker.access import check_listeners
from baleen_worker.cache.host import WritePolicy
from baleen_worker.cache.prefix import PAGE_SIZE_TOKENS
from baleen_worker.config import (
    ConfigError,
    FakeConfig,
    HeadConfig,
    HostCacheConfig,
    KvEventsConfig,
    LaunchConfig,
    WorkerConfig,
)
from baleen_worker.flag_values import (
    chunked_prefill_size,
    fraction,
    integer,
    json_object,
    kv_cache_dtype,
    named_place,
    number,
)
from baleen_worker.keys import read_key
from baleen_worker.waiting import Policy

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
RUNNERS = ("model", "fake")
SCHEDULE_POLICIES = tuple(policy.value for policy in Policy)
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "fp8_e4m3")
_KEY_VARIABLE = "BALEEN_WORKER_KEY_FILE"
LOG_LEVELS = ("debug", "info", "warning", "error")


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
            deadly_token_id=values["fake_deadly_token_id"],
            script=values["fake_script"],
        ),
        log_level=values["log_level"],
        watchdog_timeout_s=values["watchdog_timeout"],
        arithmetic=values["arithmetic"],
        kernel_backends=kernel_flags.chosen(values),
        disable_cuda_graph=values["disable_cuda_graph"],
        cuda_graph_max_bs=values["cuda_graph_max_bs"],
        cuda_graph_bs=tuple(sorted(set(values["cuda_graph_bs"]))),
        uniform_routing=values["uniform_routing"],
        disaggregation=disaggregation_flags.chosen(values),
    )
    head = HeadConfig(
        host=values["host"],
        port=values["port"],
        model_id=values["served_model_name"] or model_dir.resolve().name,
        supervised=values["supervised"],
        metrics_port=values["metrics_port"],
        kv_events=values["kv_events_config"],
        key_file=_key_file(values),
    )
    check_listeners(head, insecure=values["insecure_listen"])
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
    _add_serving(parser)
    _add_model(parser)
    _add_memory_and_schedule(parser)
    _add_prefix_cache(parser)
    disaggregation_flags.add_to(parser)
    kernel_flags.add_to(parser)
    _add_sampling(parser)
    _add_tests(parser)
    launch_flags.add_to(parser)
    return parser


def _add_serving(parser: argparse.ArgumentParser) -> None:
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
    add(
        "--worker-key-file",
        type=Path,
        default=os.environ.get(_KEY_VARIABLE) or None,
        metavar="FILE",
        help=f"a secret that this worker shares with its gateways; without the flag, {_KEY_VARIABLE} names the file",
    )
    add(
        "--insecure-listen",
        action="store_true",
        help="let other machines reach listeners that ask for no key, since the network keeps strangers away",
    )
    add(
        "--watchdog-timeout",
        type=number(0.1, 86_400.0),
        default=300.0,
        metavar="SECONDS",
        help="a worker whose device takes longer for half a step writes down its state and ends (default %(default)g)",
    )
    add("--metrics-port", type=integer(1, 65535), metavar="PORT", help="serve Prometheus metrics on this port too")


def _add_model(parser: argparse.ArgumentParser) -> None:
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


def _add_memory_and_schedule(parser: argparse.ArgumentParser) -> None:
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


def _add_prefix_cache(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("prefix cache").add_argument
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


def _add_sampling(parser: argparse.ArgumentParser) -> None:
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


def _add_tests(parser: argparse.ArgumentParser) -> None:
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
    add(
        "--fake-deadly-token-id", type=integer(0), metavar="ID", help="its process ends at a prompt that begins with it"
    )
    add("--fake-script", type=Path, metavar="FILE", help="answers for the fake runner to replay (JSON lines)")
    add("--poison-freed-pages", action="store_true", help="fill pages with NaN when they are given back, for tests")


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


def _key_file(values: dict[str, Any]) -> Path | None:
    named = values["worker_key_file"]
    if named is None:
        return None
    file = Path(named)
    read_key(file, "--worker-key-file")
    return file


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
