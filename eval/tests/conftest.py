"""A server of the OpenAI API on a real socket that answers as a test scripts it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

# The body of a chat request -> (status, body); None drops the connection without an answer.
Script = Callable[[dict[str, Any]], tuple[int, Any] | None]


class ScriptedServer:
    """Serves the models `names`. `requests` holds the bodies of all chat requests."""

    def __init__(self, script: Script, names: tuple[str, ...]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, {"object": "list", "data": [{"id": name} for name in names]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append(body)
                server.headers.append(dict(self.headers))
                answer = script(body)
                if answer is None:
                    self.close_connection = True
                else:
                    self._send(*answer)

            def _send(self, status: int, body: Any) -> None:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                del format, args

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., ScriptedServer]]:
    """Starts scripted servers, and ends them with the test."""
    servers: list[ScriptedServer] = []

    def start(script: Script, *names: str) -> ScriptedServer:
        servers.append(ScriptedServer(script, names or ("m",)))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
