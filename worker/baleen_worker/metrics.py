"""The worker's own Prometheus metrics, served by the head when `--metrics-port` asks for it. Owns names and registry.

The gateway's /metrics covers requests; these cover what only the worker sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import Metric

    from baleen_worker.output import Load

_GAUGES = {
    "running_requests": "Requests that hold a slot.",
    "waiting_requests": "Requests in the queue.",
    "used_pages": "KV pages held by requests.",
    "cached_pages": "KV pages that only the prefix cache holds.",
    "total_pages": "KV pages that requests can hold.",
    "host_pages": "KV pages kept in host memory.",
    "host_capacity_pages": "KV pages that host memory may keep.",
    "waiting_prompt_tokens": "Prompt tokens not yet computed.",
}
_COUNTERS = {
    "steps": "Engine steps.",
    "generated_tokens": "Tokens generated.",
    "prompt_tokens": "Prompt tokens computed.",
    "cached_tokens": "Prompt tokens found in the prefix cache.",
    "host_stored_pages": "KV pages copied to host memory.",
    "host_fetched_pages": "KV pages copied back from host memory.",
    "sent_pages": "KV pages that other workers have read.",
    "received_pages": "KV pages read from other workers.",
    "stale_reads": "Reads of KV pages that were somebody else's by then.",
    "damaged_reads": "Reads of KV pages that came with another generation or digest than announced.",
    "failed_transfers": "Transfers that the other worker failed.",
    "dropped_peers": "Connections of strangers to the transfer port, and of peers that broke its protocol.",
    "preemptions": "Requests that made way for others and were computed again.",
}
_REFUSED_CALLS = "baleen_worker_refused_calls"


class WorkerCollector(Collector):
    """Reads the rank's latest load, and the head's own count, at each scrape, so that nothing is counted twice."""

    def __init__(self, model_id: str, load: Callable[[], Load], num_refused: Callable[[], int]) -> None:
        self._model_id = model_id
        self._load = load
        self._num_refused = num_refused

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        for families, descriptions in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for field, description in descriptions.items():
                family = families(f"baleen_worker_{field}", description, labels=["model"])
                family.add_metric([self._model_id], getattr(load, field))
                yield family
        refused = CounterMetricFamily(_REFUSED_CALLS, "Calls without the right key.", labels=["model"])
        refused.add_metric([self._model_id], self._num_refused())
        yield refused


def serve_metrics(
    host: str, port: int, model_id: str, load: Callable[[], Load], num_refused: Callable[[], int]
) -> None:
    """Serves /metrics from a thread of its own. Raises OSError when the port is taken."""
    registry = CollectorRegistry()
    registry.register(WorkerCollector(model_id, load, num_refused))
    start_http_server(port, addr=host, registry=registry)
