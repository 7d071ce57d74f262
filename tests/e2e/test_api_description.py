"""`/openapi.json` is true: its examples work, its fields are read, and property tests made from it find no 500.

The property tests are Schemathesis's: valid and invalid bodies, values on and beyond every bound, broken bodies and
headers. Every answer must be one that the description has, of the shape it has there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from harness.processes import ROOT, Gateway, serve_arguments
from jsonschema import Draft202012Validator

CONFIG = ROOT / "tests" / "api" / "schemathesis.toml"
# Methods the description does not have are tested in Rust; that sound bodies are taken depends on more than a schema
# can say (results answer calls, prompts fit the context).
LEFT_OUT = "unsupported_method,positive_data_acceptance"
# What is asked of them changes the gateway for every other test; test_survival.py uses them.
OPERATORS_PATHS = {"/workers", "/workers/drain", "/workers/remove"}
# What tests of a field may put there: one of each type, none of them meant.
STRANGERS: list[Any] = ["a word nobody expects", -7.25, True, [[{}]], {"unexpected": [None]}]


@pytest.fixture(scope="module")
def gateway(fake_stack: Gateway) -> Gateway:
    return fake_stack


@pytest.fixture(scope="module")
def terse_gateway() -> Iterator[Gateway]:
    """Its context is short, for most requests of a property test do not bound their answers."""
    with Gateway(*serve_arguments("fake", "--context-length", "192")) as gateway:
        yield gateway.ready()


@pytest.fixture(scope="module")
def http(gateway: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=120) as http:
        yield http


@pytest.fixture(scope="module")
def description(http: httpx.Client) -> dict[str, Any]:
    return http.get("/openapi.json").raise_for_status().json()


def operations(description: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], list[Any]]]:
    """Path, body schema and examples of every operation that takes a body."""
    for path, methods in description["paths"].items():
        body = methods.get("post", {}).get("requestBody")
        if body is not None:
            content = body["content"]["application/json"]
            yield path, content["schema"], [example["value"] for example in content["examples"].values()]


def fields(description: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Every field of an object, those of its parts included."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/components/schemas/")
        return fields(description, description["components"]["schemas"][name])
    found: dict[str, Any] = dict(schema.get("properties", {}))
    for part in [*schema.get("allOf", []), *schema.get("oneOf", [])]:
        found |= fields(description, part)
    return found


def test_every_example_is_answered(http: httpx.Client, description: dict[str, Any]) -> None:
    for path, _, examples in operations(description):
        for example in examples if path not in OPERATORS_PATHS else []:
            response = http.post(path, json=example)
            assert response.status_code == 200, f"{path} {example}: {response.text}"


def test_every_field_is_read(http: httpx.Client, description: dict[str, Any]) -> None:
    """A field that were ignored would not be missed, so each gets what its schema forbids and must be refused."""
    for path, schema, examples in operations(description):
        for name, field in fields(description, schema).items():
            validator = Draft202012Validator({**field, "components": description["components"]})
            forbidden = next(value for value in STRANGERS if not validator.is_valid(value))
            bodies = [{**example, name: forbidden} for example in examples]
            responses = [http.post(path, json=body) for body in bodies]
            refused = [response.json()["error"] for response in responses if response.status_code in (400, 501)]
            assert refused, f"{path} takes {forbidden!r} as {name}"
            assert any(name in error["message"] for error in refused), refused


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_every_event_is_as_described(gateway: Gateway, description: dict[str, Any], path: str) -> None:
    """To the last one, which is no JSON in some streams; answers are short, for long streams are not read whole."""
    operation = schemathesis.openapi.from_dict(description)[path]["POST"]
    for _, _, examples in (found for found in operations(description) if found[0] == path):
        for example in examples:
            limit = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 4}
            case = operation.Case(body={**example, **limit, "stream": True}, media_type="application/json")
            response = case.call_and_validate(base_url=gateway.url, timeout=120)
            assert response.headers["content-type"][0].startswith("text/event-stream")


def explore_with(gateway: Gateway, folder: Path, *arguments: str) -> tuple[Counter[str], str]:
    """Runs Schemathesis; returns how many answers had each status, and its report if one of them was wrong."""
    program = Path(sys.executable).with_name("schemathesis")
    folder.mkdir(exist_ok=True)
    counts = folder / "statuses.json"
    hooks = {"SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(CONFIG.parent), "STATUS_COUNTS": str(counts)}
    command = [str(program), "--config-file", str(CONFIG), "--no-color", "run", f"{gateway.url}/openapi.json"]
    command += ["--exclude-checks", LEFT_OUT, "--suppress-health-check", "all"]
    command += ["--request-timeout", "120", "--continue-on-failure", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | hooks, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    statuses = Counter[str](json.loads(counts.read_text("utf-8")))
    return statuses, "" if done.returncode == 0 else done.stdout[-20_000:]


@pytest.mark.timeout(900)
def test_some_requests_made_from_the_description(terse_gateway: Gateway, tmp_path: Path) -> None:
    settings = ["--phases", "examples,fuzzing", "--max-examples", "20", "--seed", "1"]
    statuses, report = explore_with(terse_gateway, tmp_path, *settings)
    assert not report, report
    assert statuses.total() > 150
    assert statuses["200"] > 0
    assert statuses["400"] > 0
    assert statuses["500"] == 0
    terse_gateway.wait_until_idle()


@pytest.mark.slow
@pytest.mark.timeout(14400)
def test_twenty_thousand_requests_made_from_the_description(
    terse_gateway: Gateway, description: dict[str, Any], tmp_path: Path
) -> None:
    """A process a path, two at a time: making requests takes far longer than answering them. Prints how many had each
    status."""
    settings = ["--phases", "examples,coverage,fuzzing", "--max-examples", "2000"]
    reports: list[str] = []

    def explore(numbered: tuple[int, str]) -> Counter[str]:
        number, path = numbered
        statuses, report = explore_with(terse_gateway, tmp_path / str(number), "--include-path", path, *settings)
        print(f"{path}: {dict(sorted(statuses.items()))}{' FAILED' if report else ''}", flush=True)
        reports.extend([report] if report else [])
        return statuses

    with ThreadPoolExecutor(2) as pool:
        statuses = sum(pool.map(explore, enumerate(description["paths"])), Counter[str]())
    print(f"{statuses.total()} requests: {dict(sorted(statuses.items()))}")
    assert not reports, "\n".join(reports)
    assert statuses.total() >= 20_000
    assert statuses["500"] == 0
    terse_gateway.wait_until_idle()
