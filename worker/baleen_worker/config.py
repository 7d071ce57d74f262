"""What a worker was asked to do, checked and frozen: plain fields, read by everything after `command_line.parse`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from baleen_worker.cache.host import WritePolicy
from baleen_worker.cache.prefix import PAGE_SIZE_TOKENS
from baleen_worker.transfer.lending import Backend


class ConfigError(ValueError):
    """The command line asks for something that cannot be done; the message is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class FakeConfig:
    """Behaviour of `--runner fake`, for tests and measurements of everything around the model."""

    step_ms: float = 0.0
    poison_token_id: int | None = None
    deadly_token_id: int | None = None
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
class DisaggregationConfig:
    """A worker that serves one half of requests.

    `prefills`: it computes prompts, and serves their pages on `port` of `host` (0: any); else it generates answers.
    `advertised`: host:port at which decode workers reach that port, where it is another one.
    `key_file` holds what both halves know and nobody else; None: only this host can connect.
    `backend`: how pages travel. `devices`: cards and networks that NIXL may use.
    `progress_s`: how long a silent peer is waited for; `lease_s`: how long pages are held for one.
    """

    prefills: bool
    host: str = "127.0.0.1"
    port: int = 8998
    key_file: Path | None = None
    progress_s: float = 10.0
    lease_s: float = 30.0
    advertised: str | None = None
    backend: Backend = Backend.TCP
    devices: str = "lo"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What the rank process needs: model, device, memory and schedule. Equal on every rank.

    `max_total_tokens` bounds the pages; without it they fill `mem_fraction_static` of the device's memory.
    `chunked_prefill_size` is the token budget of one step, decodes included; -1 computes any prompt in one step.
    `context_length` only lowers the model's own. `model_overrides` is a JSON object of keys of config.json, or "".
    `logit_processors`: name and "module:attribute" of each plugin that requests may name.
    `constraint_compile_ms`: processor time that a grammar may take; `constraint_cache_mib`: memory for compiled ones.
    `arithmetic`: see `model_kernels`. `kernel_backends`: roles of kernels and the backends asked for them.
    `cuda_graph_max_bs`: rows that a decode graph may have; `cuda_graph_bs`: the sizes that are captured, () for ours.
    `uniform_routing`: experts are picked evenly, at random.
    `poison_freed_pages`: for tests, so that a page that is read after it was given back spoils what reads it.
    `radix_cache_max_tokens` bounds what the prefix cache keeps beyond running requests; without it, the pages do.
    `watchdog_timeout_s`: how long the runner may take for half a step before the rank ends itself.
    `host_cache`: None for no second tier. `disaggregation`: None for a worker that serves whole requests alone.
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
    watchdog_timeout_s: float = 300.0
    arithmetic: str = "auto"
    kernel_backends: tuple[tuple[str, str], ...] = ()
    disable_cuda_graph: bool = False
    cuda_graph_max_bs: int | None = None
    cuda_graph_bs: tuple[int, ...] = ()
    uniform_routing: bool = False
    disaggregation: DisaggregationConfig | None = None


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

    @property
    def binds_endpoint(self) -> bool:
        """Whether subscribers come to `endpoint`; else it is a subscriber's own address."""
        return "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith(("ipc://", "inproc://"))


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """What only the head process needs: where it listens, for whom, and how it is supervised.

    `key_file` holds what this worker shares with its gateways; None: whoever reaches it may call.
    """

    host: str = "127.0.0.1"
    port: int = 30001
    model_id: str = ""
    supervised: bool = False
    metrics_port: int | None = None
    key_file: Path | None = None
    kv_events: KvEventsConfig | None = None


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    head: HeadConfig
    worker: WorkerConfig
