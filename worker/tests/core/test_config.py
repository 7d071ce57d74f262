"""The command line: what it means, what it refuses and in which words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from baleen_worker.command_line import parse
from baleen_worker.config import ConfigError, DisaggregationConfig, HostCacheConfig
from baleen_worker.keys import read_key
from baleen_worker.launch_flags import LAUNCH_FLAGS
from baleen_worker.transfer.lending import Backend

WORKER = Path(__file__).resolve().parents[2]


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(arguments)
    return str(caught.value)


@pytest.mark.parametrize("form", [["{}"], ["--model", "{}"], ["--model-path", "{}"]])
def test_the_model_may_be_named_in_three_ways(tmp_path: Path, form: list[str]) -> None:
    config = parse([part.format(tmp_path) for part in form])
    assert config.worker.model_dir == tmp_path
    assert config.head.model_id == tmp_path.name


def test_the_values_of_our_own_flags_arrive(tmp_path: Path) -> None:
    line = (
        "--host 0.0.0.0 --port 0 --dtype bfloat16 --device cpu --load-format dummy --kv-cache-dtype bf16 "
        "--max-total-tokens 128 --mem-fraction-static 0.5 --max-running-requests 3 --max-queued-requests 4 "
        "--chunked-prefill-size 192 --context-length 77 --served-model-name whale --supervised --log-level DEBUG "
        "--disable-overlap-schedule --watchdog-timeout 12.5 "
        "--disable-radix-cache --radix-cache-max-tokens 640 --schedule-policy lpm --schedule-conservativeness 0.5 "
        "--priority-scheduling-preemption-threshold 3 "
        "--insecure-listen --seed 5 --metrics-port 9000 --runner fake --fake-step-ms 1.5 --fake-poison-token-id 8"
    )
    config = parse([str(tmp_path), *line.split()])
    worker, head = config.worker, config.head
    assert (head.host, head.port, head.model_id, head.supervised, head.metrics_port) == (
        "0.0.0.0",
        0,
        "whale",
        True,
        9000,
    )
    assert (worker.dtype, worker.device, worker.load_format, worker.kv_cache_dtype) == (
        "bfloat16",
        "cpu",
        "dummy",
        "bfloat16",
    )
    assert (worker.max_total_tokens, worker.mem_fraction_static, worker.context_length) == (128, 0.5, 77)
    assert (worker.max_running_requests, worker.max_queued_requests, worker.chunked_prefill_size) == (3, 4, 192)
    assert (worker.runner, worker.fake.step_ms, worker.fake.poison_token_id) == ("fake", 1.5, 8)
    assert (worker.seed, worker.log_level, worker.watchdog_timeout_s) == (5, "debug", 12.5)
    assert worker.disable_overlap_schedule
    assert (worker.disable_radix_cache, worker.radix_cache_max_tokens, worker.schedule_policy) == (True, 640, "lpm")
    assert (worker.schedule_conservativeness, worker.priority_scheduling_preemption_threshold) == (0.5, 3)


def test_flags_of_the_launch_guide_are_taken_where_they_are_true_here(tmp_path: Path) -> None:
    line = (
        "--trust-remote-code --tp 1 --dp-size 1 --ep 1 --pp-size 1 --nnodes 1 --node-rank 0 --page-size 64 "
        "--attention-backend nsa --radix-eviction-policy lru "
        "--disaggregation-mode null --dist-init-addr 10.0.0.1:5000"
    )
    assert parse([str(tmp_path), *line.split()]) == parse([str(tmp_path)])


@pytest.mark.parametrize(
    "backend",
    ["flashmla_sparse", "flashmla_kv", "flashmla_auto", "fa3", "tilelang", "triton", "torch", "trtllm", "aiter"],
)
def test_backends_of_sparse_attention_have_the_names_that_users_know(backend: str, tmp_path: Path) -> None:
    for prefix in ("--dsa", "--nsa"):
        config = parse([str(tmp_path), f"{prefix}-prefill-backend", backend, f"{prefix}-decode-backend", backend])
        assert dict(config.worker.kernel_backends) == {"mla_slots.prefill": backend, "mla_slots.decode": backend}


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--tp", "8", "one rank"),
        ("--dp", "2", "one rank"),
        ("--nnodes", "2", "one rank"),
        ("--attention-backend", "fa3", "use dsa or nsa"),
        ("--nsa-prefill-backend", "flashinfer", "invalid choice: 'flashinfer'"),
        ("--dsa-decode-backend", "nonsense", "invalid choice: 'nonsense'"),
        ("--cuda-graph-max-bs", "0", "from 1 to 256"),
        ("--page-size", "1", "64 tokens"),
        ("--speculative-algorithm", "EAGLE", "speculative decoding is not built"),
        ("--disaggregation-mode", "both", "invalid choice"),
        ("--disaggregation-transfer-backend", "ucx", "invalid choice"),
        ("--disaggregation-transfer-backend", "tcp", "without --disaggregation-mode prefill or decode"),
        ("--disaggregation-bootstrap-port", "8998", "without --disaggregation-mode prefill"),
        ("--disaggregation-ib-device", "mlx5_0", "without --disaggregation-mode prefill or decode"),
        ("--quantization", "fp8", "config.json"),
        ("--tool-call-parser", "deepseekv32", "gateway"),
        ("--chat-template", "x.jinja", "gateway"),
        ("--chunked-prefill-size", "100", "multiple of 64"),
        ("--chunked-prefill-size", "0", "multiple of 64"),
        ("--port", "65536", "from 0 to 65535"),
        ("--max-running-requests", "0", "from 1"),
        ("--mem-fraction-static", "1.5", "between 0 and 1"),
        ("--mem-fraction-static", "nan", "between 0 and 1"),
        ("--dtype", "float16", "invalid choice"),
        ("--logit-processor", "upper", "NAME=MODULE:ATTRIBUTE"),
        ("--logit-processor", "upper=module", "NAME=MODULE:ATTRIBUTE"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_a_reason(tmp_path: Path, flag: str, value: str, words: str) -> None:
    message = refusal(str(tmp_path), flag, value)
    assert flag in message
    assert words in message
    assert "\n" not in message


def test_a_worker_of_one_half(tmp_path: Path) -> None:
    line = "--disaggregation-mode prefill --disaggregation-transfer-backend tcp --disaggregation-bootstrap-port 0"
    timers = "--disaggregation-progress-s 2 --disaggregation-lease-s 3.5"
    config = parse([str(tmp_path), *line.split(), *timers.split()]).worker
    assert config.disaggregation == DisaggregationConfig(True, "127.0.0.1", 0, None, 2.0, 3.5)
    default = parse([str(tmp_path), "--disaggregation-mode", "prefill"]).worker.disaggregation
    assert default == DisaggregationConfig(prefills=True)
    assert default is not None
    assert default.port == 8998
    decode = parse([str(tmp_path), "--disaggregation-mode", "decode"]).worker.disaggregation
    assert decode == DisaggregationConfig(prefills=False)
    assert "0.0.0.0" in refusal(str(tmp_path), "--disaggregation-mode", "prefill", "--host", "0.0.0.0")


def test_pages_travel_as_the_operator_says(tmp_path: Path) -> None:
    half = [str(tmp_path), "--disaggregation-mode", "decode", "--disaggregation-transfer-backend"]
    for name in ("tcp", "cuda_ipc", "nixl", "auto"):
        config = parse([*half, name]).worker.disaggregation
        assert config is not None
        assert config.backend is Backend(name)
    for elsewhere in (["--device", "cpu"], ["--runner", "fake"]):
        assert "cuda_ipc moves pages between GPUs" in refusal(*half, "cuda_ipc", *elsewhere)
    assert "mooncake is refused" in refusal(*half, "mooncake")


def test_networks_that_ask_for_no_key_are_named(tmp_path: Path) -> None:
    half = [str(tmp_path), "--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl"]
    alone, named = parse(half).worker.disaggregation, parse([*half, "--disaggregation-ib-device", "mlx5_0,eth0"])
    assert alone is not None
    assert alone.devices == "lo"
    assert named.worker.disaggregation is not None
    assert named.worker.disaggregation.devices == "mlx5_0,eth0"
    assert "empty name" in refusal(*half, "--disaggregation-ib-device", "eth0,")
    assert "without --disaggregation-transfer-backend nixl" in refusal(*half[:-2], "--disaggregation-ib-device", "eth0")


def test_pages_are_served_beyond_this_host_to_those_who_know_a_secret_alone(tmp_path: Path) -> None:
    key = tmp_path / "key"
    prefill = [str(tmp_path), "--disaggregation-mode", "prefill", "--disaggregation-host"]
    assert "--disaggregation-key-file" in refusal(*prefill, "10.1.2.3")
    assert "cannot be read" in refusal(*prefill, "10.1.2.3", "--disaggregation-key-file", str(key))
    key.write_text("short\n")
    assert "5 bytes" in refusal(*prefill, "10.1.2.3", "--disaggregation-key-file", str(key))
    key.write_text("0123456789abcdef\n")
    config = parse([*prefill, "10.1.2.3", "--disaggregation-key-file", str(key)]).worker.disaggregation
    assert config == DisaggregationConfig(prefills=True, host="10.1.2.3", key_file=key)
    assert read_key(key, "--flag") == b"0123456789abcdef"
    shared = parse([*prefill, "10.1.2.3", "--worker-key-file", str(key)])
    assert shared.worker.disaggregation == config
    assert shared.head.key_file == key
    for wild in ("0.0.0.0", "::"):
        assert "name one address" in refusal(*prefill, wild, "--disaggregation-key-file", str(key))


def test_pages_may_be_reached_at_another_address_than_they_are_served_on(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef\n")
    prefill = [str(tmp_path), "--disaggregation-mode", "prefill"]
    advertise = "--disaggregation-advertise-address"
    for address in ("pages.example:9000", "[fd00::1]:9000", "127.0.0.1:1"):
        config = parse([*prefill, advertise, address]).worker.disaggregation
        assert config == DisaggregationConfig(prefills=True, advertised=address)
    everywhere = [*prefill, "--disaggregation-host", "0.0.0.0", advertise, "10.1.2.3:9000"]
    assert "--disaggregation-key-file" in refusal(*everywhere)
    config = parse([*everywhere, "--disaggregation-key-file", str(key)]).worker.disaggregation
    assert config == DisaggregationConfig(prefills=True, host="0.0.0.0", key_file=key, advertised="10.1.2.3:9000")
    for wrong in ("9000", ":9000", "host:", "host:0", "host:65536", "host:http", "fd00::1:9000"):
        assert "HOST:PORT" in refusal(*prefill, advertise, wrong)


def test_a_decode_worker_has_no_port_and_no_host_tier(tmp_path: Path) -> None:
    decode = [str(tmp_path), "--disaggregation-mode", "decode"]
    assert "no effect" in refusal(*decode, "--disaggregation-bootstrap-port", "0")
    assert "no effect" in refusal(*decode, "--disaggregation-host", "127.0.0.1")
    assert "no effect" in refusal(*decode, "--disaggregation-advertise-address", "127.0.0.1:1")
    assert "between steps" in refusal(*decode, "--enable-hierarchical-cache")


def test_logit_processors_are_named_once_and_need_logits(tmp_path: Path) -> None:
    two = ["--logit-processor", "a=m:f", "--logit-processor", "b=m.n:c.f"]
    assert parse([str(tmp_path), *two]).worker.logit_processors == (("a", "m:f"), ("b", "m.n:c.f"))
    assert "a twice" in refusal(str(tmp_path), *two, "--logit-processor", "a=m:g")
    assert "fake runner" in refusal(str(tmp_path), "--runner", "fake", *two)
    assert parse([str(tmp_path), "--runner", "fake"]).worker.logit_processors == ()


def test_every_row_of_the_table_does_what_it_says(tmp_path: Path) -> None:
    plain = parse([str(tmp_path)])
    for flag in LAUNCH_FLAGS:
        for name in flag.names:
            for value in flag.accepts or (("anything",) if flag.any_value else ()):
                assert parse([str(tmp_path), name, *([value] if value else [])]) == plain
            if flag.refused or (not flag.any_value and flag.takes_value):
                message = refusal(str(tmp_path), name, *(["anything"] if flag.takes_value else []))
                assert name in message
                assert flag.why in message


def test_unknown_flags_models_twice_and_no_model_are_refused(tmp_path: Path) -> None:
    assert "--no-such-flag" in refusal(str(tmp_path), "--no-such-flag")
    assert "no model named" in refusal()
    assert "twice" in refusal(str(tmp_path), "--model", str(tmp_path.parent))
    assert "not a folder" in refusal(str(tmp_path / "absent"))
    assert "unrecognized" in refusal(str(tmp_path), "--mem-fraction", "0.5")


def test_a_bad_command_line_ends_in_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "baleen_worker", str(tmp_path), "--tp", "8"],
        cwd=WORKER,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: --tp 8 cannot be honoured: ")
    assert done.stderr.count("\n") == 1


def test_the_host_tier_is_described_once_or_not_at_all(tmp_path: Path) -> None:
    def host_cache(*flags: str) -> HostCacheConfig | None:
        return parse([str(tmp_path), *flags]).worker.host_cache

    on = "--enable-hierarchical-cache"
    assert host_cache() is None
    assert host_cache(on) == HostCacheConfig("write_through", 2.0, None)
    assert host_cache(on, "--hicache-ratio", "1.5", "--hicache-size", "0") == HostCacheConfig(
        "write_through", 1.5, None
    )
    write_back = host_cache(on, "--hicache-size", "80", "--hicache-write-policy", "write_back")
    assert write_back == HostCacheConfig("write_back", 2.0, 80.0)
    assert "add --enable-hierarchical-cache" in refusal(str(tmp_path), "--hicache-size", "80")
    assert "keep one" in refusal(str(tmp_path), on, "--disable-radix-cache")
    assert "keep one" in refusal(str(tmp_path), on, "--hicache-size", "80", "--hicache-ratio", "2")
    assert "use --hicache-ratio" in refusal(str(tmp_path), on, "--hicache-size", "80", "--runner", "fake")
    assert "invalid choice" in refusal(str(tmp_path), on, "--hicache-write-policy", "write_through_selective")
    assert "cannot be honoured" in refusal(str(tmp_path), on, "--hicache-storage-backend", "file")
