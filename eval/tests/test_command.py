"""The command against a scripted server: what counts as right, wrong or unanswered, and how it ends."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from baleen_eval import report
from baleen_eval.__main__ import main
from baleen_eval.suites import Choice, choose

PROBLEM = {"question": "Bela has 2 eggs and buys 3. How many?", "answer": "2 + 3 = 5\n#### 5"}


def message(content: str = "", calls: list[tuple[str, str]] | None = None) -> tuple[int, Any]:
    """A chat completion with that message."""
    fields: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        fields["tool_calls"] = [{"function": {"name": name, "arguments": text}} for name, text in calls]
    usage = {"prompt_tokens": 10, "completion_tokens": 2}
    return 200, {"choices": [{"message": fields, "finish_reason": "stop"}], "usage": usage}


def right_answers(suite: str, **choice: Any) -> Callable[[dict[str, Any]], tuple[int, Any]]:
    """A script that knows every answer."""
    known = {question.messages[-1].content: question.expected for question in choose(suite).questions(Choice(**choice))}

    def script(body: dict[str, Any]) -> tuple[int, Any]:
        expected = known[body["messages"][-1]["content"]]
        if suite != "tools":
            return message(expected)
        return message(calls=re.findall(r"(\w+)\((\{.*?\})\)(?= |$)", expected))

    return script


def run(server: Any, *arguments: str, out: Path | None = None) -> int:
    written = ["--json", str(out)] if out else []
    return main(["--base-url", server.url, *arguments, *written])


@pytest.mark.parametrize("suite", ["needle", "track", "arith", "tools"])
def test_right_answers_are_right(suite: str, serve: Any, tmp_path: Path) -> None:
    server = serve(right_answers(suite, seed=3, num=12, lengths=(512, 1024)))
    out = tmp_path / "out.json"
    assert run(server, "--suite", suite, "--seed", "3", "--num", "12", "--lengths", "512", "1024", out=out) == 0
    result = json.loads(out.read_text("utf-8"))
    count = 24 if suite in ("needle", "track") else 12
    assert (result["suite"], result["model"], result["n"]) == (suite, "m", count)
    assert (result["correct"], result["transport_errors"], result["accuracy"]) == (count, 0, 1.0)
    assert sum(bucket["n"] for bucket in result["by_bucket"].values()) == count
    assert result["seconds"] > 0
    assert result["prompt_tokens"] == 10 * count
    if suite == "needle":
        assert list(result["by_bucket"]) == list(result["by_depth"]) == ["512", "1024"]
        assert result["by_depth"]["512"]["0.00"]["n"] == 2


def test_a_wrong_answer_is_a_mistake_and_no_error(serve: Any, tmp_path: Path) -> None:
    server = serve(lambda _: message("The answer is -1."))
    assert run(server, "--suite", "arith", "--num", "5", out=tmp_path / "out.json") == 0
    result = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert (result["n"], result["correct"], result["transport_errors"], result["accuracy"]) == (5, 0, 0, 0.0)
    assert len(result["mistakes"]) == 5
    assert result["mistakes"][0]["got"] == "The answer is -1."


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (None, "disconnected"),
        ((500, {"error": {"message": "out of pages"}}), "status 500: out of pages"),
        ((429, b"slow down"), "status 429: slow down"),
        ((200, b"{"), "not a chat completion"),
        ((200, {"choices": []}), "not a chat completion"),
    ],
)
def test_what_is_no_answer_is_counted_apart(
    serve: Any, tmp_path: Path, broken: Any, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    right, turns = right_answers("arith", num=8), itertools.count()
    server = serve(lambda body: broken if next(turns) % 4 == 0 else right(body))
    arguments = ("--suite", "arith", "--num", "8", "--parallel", "1")
    assert run(server, *arguments, out=tmp_path / "out.json") == 1
    result = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert (result["n"], result["correct"], result["transport_errors"], result["accuracy"]) == (8, 6, 2, 1.0)
    assert result["mistakes"] == []
    assert named in capsys.readouterr().err


def test_questions_in_flight_stay_within_the_limit(serve: Any) -> None:
    import threading

    lock, running, most = threading.Lock(), [0], [0]
    gate = threading.Barrier(3, timeout=60)

    def script(_: dict[str, Any]) -> tuple[int, Any]:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        gate.wait()  # passes only when three are here at once
        with lock:
            running[0] -= 1
        return message("0")

    assert run(serve(script), "--suite", "arith", "--num", "9", "--parallel", "3") == 0
    assert most[0] <= 3


def test_rounds_repeat_the_questions_with_other_seeds(serve: Any, tmp_path: Path) -> None:
    server = serve(lambda _: message("0"))
    arguments = ("--suite", "arith", "--num", "3", "--repeat", "2", "--seed", "5", "--temperature", "0.7")
    assert run(server, *arguments, out=tmp_path / "out.json") == 0
    assert json.loads((tmp_path / "out.json").read_text("utf-8"))["n"] == 6
    assert sorted(body["seed"] for body in server.requests) == [5, 5, 5, 6, 6, 6]
    assert {body["temperature"] for body in server.requests} == {0.7}
    asked = [body["messages"][-1]["content"] for body in server.requests]
    assert len(set(asked)) == 3


def test_requests_say_what_the_question_needs(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server = serve(lambda _: message("0"))
    assert run(server, "--suite", "tools", "--num", "20") == 0
    assert {body["chat_template_kwargs"]["thinking"] for body in server.requests} == {False, True}
    assert all(tool["type"] == "function" for body in server.requests for tool in body["tools"])
    assert all(part["content"] for body in server.requests for part in body["messages"])
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
    assert run(server, "--suite", "tools", "--num", "2", "--thinking", "off", "--max-tokens", "7") == 0
    assert [body["chat_template_kwargs"]["thinking"] for body in server.requests[-2:]] == [False, False]
    assert server.requests[-1]["max_tokens"] == 7


def test_invariance_compares_two_servers(serve: Any, tmp_path: Path) -> None:
    def script(body: dict[str, Any]) -> tuple[int, Any]:
        return message(str(len(body["messages"][-1]["content"])))

    def drifting(body: dict[str, Any]) -> tuple[int, Any]:
        return message("other") if body.get("tools") else script(body)

    one, same, other = serve(script, "a"), serve(script, "b"), serve(drifting, "c")
    arguments = ("--suite", "invariance", "--num", "8")
    assert run(one, *arguments, "--against", same.url, out=tmp_path / "same.json") == 0
    assert json.loads((tmp_path / "same.json").read_text("utf-8"))["accuracy"] == 1.0
    assert run(one, *arguments, "--against", other.url, out=tmp_path / "other.json") == 0
    result = json.loads((tmp_path / "other.json").read_text("utf-8"))
    assert {key: tally["accuracy"] for key, tally in result["by_bucket"].items()}["tools"] == 0.0
    assert result["accuracy"] < 1.0
    assert "versus" in result["mistakes"][0]["got"]
    assert run(one, *arguments) == 0  # twice of itself


def test_a_plot_is_drawn(serve: Any, tmp_path: Path) -> None:
    server = serve(lambda _: message("0"))
    for suite, name in (("needle", "heat.svg"), ("arith", "bars.png")):
        plot = tmp_path / name
        assert run(server, "--suite", suite, "--num", "10", "--lengths", "512", "--plot", str(plot)) == 0
        assert plot.stat().st_size > 1000


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence with which the command refuses; it ends with exit code 2 and asks nothing."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line


def test_refusals_are_one_sentence(serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(lambda _: message("0"))
    base = ["--base-url", server.url, "--num", "1"]
    binary, no_json = tmp_path / "binary", tmp_path / "no.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    no_json.write_text("{}\n", "utf-8")
    cases = [
        (["--suite", "mmlu"], "there is no suite 'mmlu'; the suites are needle, "),
        (["--suite", "arith", "--model", "other"], "the server has no model 'other'; it has: m"),
        (["--suite", "gsm8k"], "name it with --data"),
        (["--suite", "gsm8k", "--data", str(tmp_path / "none")], "cannot be read: No such file"),
        (["--suite", "gsm8k", "--data", str(binary)], "is not text in UTF-8"),
        (["--suite", "gsm8k", "--data", str(no_json)], "question 1 of"),
        (["--suite", "needle", "--data", str(no_json)], "--data is read by"),
        (["--suite", "needle", "--against", server.url], "--against is for --suite invariance"),
        (["--suite", "invariance", "--temperature", "1"], "greedy"),
        (["--suite", "arith", "--json", str(tmp_path / "none" / "out")], "there is no folder"),
        (["--suite", "arith", "--json", str(tmp_path)], "is a folder"),
    ]
    for arguments, sentence in cases:
        assert sentence in refused([*base, *arguments], capsys)
    assert server.requests == []
    assert "no server answers" in refused(["--base-url", "http://127.0.0.1:9", "--suite", "arith"], capsys)
    assert "is no URL" in refused(["--base-url", "localhost", "--suite", "arith"], capsys)
    several = serve(lambda _: message("0"), "a", "b")
    assert "name one with --model" in refused(["--base-url", several.url, "--suite", "arith"], capsys)


def test_a_plot_without_matplotlib_is_refused_at_once(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda _: None)
    server = serve(lambda _: message("0"))
    arguments = ["--base-url", server.url, "--suite", "arith", "--plot", str(tmp_path / "p.svg")]
    assert "pip install 'baleen[eval]'" in refused(arguments, capsys)


def test_a_real_file_is_read(serve: Any, tmp_path: Path) -> None:
    data = tmp_path / "gsm8k.jsonl"
    data.write_text("\n".join(json.dumps(PROBLEM) for _ in range(5)), "utf-8")
    server = serve(lambda _: message("2 + 3 = 5. The answer is $5."))
    for suite in ("gsm8k", "arith"):
        out = tmp_path / f"{suite}.json"
        assert run(server, "--suite", suite, "--data", str(data), "--shots", "2", out=out) == 0
        result = json.loads(out.read_text("utf-8"))
        assert (result["n"], result["correct"]) == (3, 3)
        assert server.requests[-1]["messages"][-1]["content"].count("Question: ") == 3
