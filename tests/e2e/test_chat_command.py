"""`gateway chat` as people meet it: on a terminal, on a pipe, with a server that runs and with one of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.processes import GATEWAY_BINARY, MICRO_MODEL, Gateway, serve_arguments, wait_for
from harness.script import END, PLAY, Line, call, calls, write_script
from harness.terminal import Terminal

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
TROUBLE = "\x1b]0;owned\x07 done."
LINES = [
    *PLAY,
    Line("Add 1 and 1.", "Adding." + calls(call("add", {"a": 1, "b": 1})) + END),
    Line("2", "That is two." + END),
    Line("Misbehave.", TROUBLE + END),
    Line("Never stop.", " and on and on" * 2000),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A scripted model that takes its time."""
    script = write_script(tmp_path_factory.mktemp("chat") / "chat.jsonl", LINES)
    with Gateway(*serve_arguments("fake", "--fake-step-ms", "5", "--fake-script", str(script))) as gateway:
        yield gateway.ready()


@pytest.fixture
def terminal(server: Gateway, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Opens a terminal with `gateway chat` in it."""
    opened: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        command = [str(GATEWAY_BINARY), "chat", server.url, *arguments]
        terminal = Terminal(command, env={"XDG_STATE_HOME": str(tmp_path)})
        opened.append(terminal)
        terminal.expect("Ctrl-D leaves")
        terminal.expect("> ")
        return terminal

    yield start
    for each in opened:
        each.__exit__(None, None, None)


def piped(*arguments: str, lines: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `gateway chat` on pipes."""
    command = [str(GATEWAY_BINARY), "chat", *arguments]
    return subprocess.run(
        command, input=lines, capture_output=True, text=True, timeout=120, env=os.environ | (env or {})
    )


def test_a_conversation_on_a_terminal(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    chat = terminal()
    chat.type("Say hello.\r")
    chat.expect("Hello there, friend.")
    chat.expect("tokens in")
    chat.expect("> ")
    chat.type("/think on\r")
    chat.expect("reasoning is on from now on")
    chat.type("Think first.\r")
    # Reasoning is dim, the answer is not.
    chat.expect_raw(b"\x1b[2mA")
    chat.expect(" greeting is due.")
    chat.expect("Hello.")
    chat.expect("> ")
    # The line editor remembers: two lines up is the first thing said.
    chat.type("\x1b[A\x1b[A\x1b[A")
    chat.expect("Say hello.")
    chat.type("\x03")
    chat.expect("Ctrl-D leaves")
    chat.type("/nonsense\r")
    chat.expect("there is no /nonsense")
    chat.type("/help\r")
    chat.expect("/quit")
    chat.type("\x04")
    assert chat.ended() == 0
    history = tmp_path / "baleen" / "chat_history"
    assert "Think first." in history.read_text("utf-8")
    assert history.stat().st_mode & 0o077 == 0


def test_control_c_stops_the_answer_and_not_the_conversation(
    terminal: Callable[..., Terminal], server: Gateway
) -> None:
    chat = terminal()
    chat.type("Never stop.\r")
    chat.expect("and on and on and on")
    chat.type("\x03")
    chat.expect("stopped")
    wait_for("the request is gone", lambda: server.metrics()["baleen_active_requests"] == 0)
    chat.type("Say hello.\r")
    chat.expect("Hello there, friend.")
    chat.type("/quit\r")
    assert chat.ended() == 0


def test_calls_are_printed_and_answered(terminal: Callable[..., Terminal], server: Gateway, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([ADD]), "utf-8")
    chat = terminal("--tools", str(tools))
    chat.type("Add 1 and 1.\r")
    chat.expect("Adding.")
    chat.expect('add {"a": 1, "b": 1}')
    chat.expect("what does add return?")
    chat.type("2\r")
    chat.expect("That is two.")
    done = piped(server.url, "--tools", str(tools), lines="Add 1 and 1.\n2\n")
    assert done.stdout == 'Adding.\nadd {"a": 1, "b": 1}\nThat is two.\n'


def test_what_a_model_writes_cannot_command_the_terminal(terminal: Callable[..., Terminal]) -> None:
    chat = terminal()
    chat.type("Misbehave.\r")
    shown = chat.expect_raw(b"done.")
    assert b"\x1b]0;" not in shown
    assert "␛]0;owned␇".encode() in shown


def test_on_a_pipe_only_answers_are_printed(server: Gateway) -> None:
    done = piped(server.url, lines="Say hello.\n\nSay hello.\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello there, friend.\n" * 2, "")
    thought = piped(server.url, "--think", lines="Think first.\n")
    assert (thought.returncode, thought.stdout, thought.stderr) == (0, "Hello.\n", "")


def test_mistakes_end_in_one_sentence(server: Gateway, tmp_path: Path) -> None:
    wrong_tools = tmp_path / "tools.json"
    wrong_tools.write_text("{}", "utf-8")
    for arguments, expected in [
        (["http://127.0.0.1:9"], "nothing answers at http://127.0.0.1:9"),
        (["https://example.org"], "https is not spoken"),
        ([server.url, "--model", "gpt"], "does not serve gpt; it serves micro"),
        ([server.url, "--tools", str(wrong_tools)], "should hold a list"),
        ([server.url, "--tools", "/nowhere"], "/nowhere"),
        ([server.url, "--", "--dtype", "auto"], "for a server started here"),
        (["/nowhere"], "/nowhere is not a model directory"),
    ]:
        done = piped(*arguments, lines="Say hello.\n")
        assert (done.returncode, done.stdout) == (1, ""), done
        assert done.stderr.startswith("error: ")
        assert expected in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_refused_turn_fails_the_pipe_and_the_next_one_goes_on(server: Gateway) -> None:
    done = piped(server.url, "--max-tokens", "99999999", lines="Say hello.\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert "max_tokens" in done.stderr


def test_a_key_is_asked_for_and_taken(start: Callable[..., Gateway]) -> None:
    gateway = start(*serve_arguments("fake", "--api-key", "open sesame"))
    refused = piped(gateway.url, lines="Hello\n")
    assert refused.returncode == 1
    assert "BALEEN_API_KEY" in refused.stderr
    done = piped(gateway.url, "--max-tokens", "3", lines="Hello\n", env={"BALEEN_API_KEY": "open sesame"})
    assert (done.returncode, done.stderr) == (0, "")


def test_it_starts_a_server_for_a_model_and_takes_it_along(tmp_path: Path) -> None:
    script = write_script(tmp_path / "chat.jsonl", LINES)
    flags = ["--runner", "fake", "--fake-script", str(script), "--fake-step-ms", "5", "--max-total-tokens", "65536"]
    command = [str(GATEWAY_BINARY), "chat", str(MICRO_MODEL), "--", *flags]
    with Terminal(command, env={"XDG_STATE_HOME": str(tmp_path)}) as chat:
        chat.expect("Ctrl-D leaves")
        chat.type("Never stop.\r")
        chat.expect("and on and on")
        # The worker is in reach of the terminal, and must not take this for its own.
        chat.type("\x03")
        chat.expect("stopped")
        chat.type("Say hello.\r")
        chat.expect("Hello there, friend.")
        # Before the prompt is back the terminal itself would take the key, and nobody reads it there.
        chat.expect("> ")
        chat.type("\x04")
        assert chat.ended() == 0
