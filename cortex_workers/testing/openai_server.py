"""A local server that speaks the OpenAI protocols from a script, for tests through the real client.

::

    with OpenAIServer([{"call": [{"tool": "refund", "args": {"id": "17"}}]}, {"say": "Done."}]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)

It listens on the loopback only, answers ``/v1/chat/completions`` and ``/v1/responses``, streamed and not, in the
order of its answers, and refuses a conversation that the real API would refuse. Files and batches: `openai_batches`.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cortex_workers.testing import openai_batches
from cortex_workers.testing import openai_wire as wire
from cortex_workers.testing.openai_batches import Batches
from cortex_workers.testing.openai_wire import Answer

__all__ = ["Answer", "OpenAIServer", "Received"]

PROTOCOLS = {"/v1/chat/completions": "chat", "/v1/responses": "responses"}


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it came in; header names in lower case."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class OpenAIServer:
    """Answers requests from a list, in their order; a context manager.

    ``requests`` are what came in; ``hung_up`` is set when a client went away while a slow answer was due. The
    lines of a batch count as requests when ``batches`` ends it.
    """

    def __init__(self, answers: Sequence[Answer | dict[str, Any]]) -> None:
        self._answers = [_answer(given) for given in answers]
        self._lock = threading.Lock()
        self._received: list[Received] = []
        self._closing = threading.Event()
        self.arrived = threading.Event()
        self.hung_up = threading.Event()
        self.batches = Batches(lambda path, body: self.take(Received(path, {}, body)))
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    @property
    def base_url(self) -> str:
        """What OPENAI_BASE_URL is set to."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def requests(self) -> list[Received]:
        """The requests so far, oldest first."""
        with self._lock:
            return list(self._received)

    def __enter__(self) -> OpenAIServer:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def take(self, received: Received) -> tuple[int, Answer]:
        """Record a request and give it its number and answer."""
        with self._lock:
            self._received.append(received)
            number = len(self._received)
        self.arrived.set()
        if number > len(self._answers):
            return number, Answer(status=400, message="the script has no more answers")
        wrong = wire.malformed(PROTOCOLS.get(received.path, "chat"), received.body)
        return number, Answer(status=400, message=wrong) if wrong else self._answers[number - 1]

    def wait(self, seconds: float, connection: socket.socket) -> bool:
        """Wait before a slow answer; False when the client or the test went away."""
        connection.settimeout(0.02)
        pause = threading.Event()
        for _ in range(int(seconds / 0.02)):
            if self._closing.is_set():
                return False
            try:
                if connection.recv(1, socket.MSG_PEEK) == b"":
                    self.hung_up.set()
                    return False
                pause.wait(0.02)
            except TimeoutError:
                continue
            except OSError:
                self.hung_up.set()
                return False
        connection.settimeout(None)
        return True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that go away are part of the tests."""


def _answer(given: Answer | dict[str, Any]) -> Answer:
    if isinstance(given, Answer):
        return given
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
    }
    return Answer(**fields)


def _handler(owner: OpenAIServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Keep the test's output clean."""

        def do_GET(self) -> None:
            self._files_and_batches(b"")

        def do_DELETE(self) -> None:
            self._files_and_batches(b"")

        def _files_and_batches(self, data: bytes) -> None:
            headers = {key.lower(): value for key, value in self.headers.items()}
            status, body, retry_after = owner.batches.answer(self.command, self.path, headers, data)
            _send(self, status, body, headers={"retry-after": retry_after} if retry_after else {})

        def do_POST(self) -> None:
            length = int(self.headers.get("content-length", 0))
            data = self.rfile.read(length)
            if self.path.startswith(openai_batches.PATHS):
                self._files_and_batches(data)
                return
            body = json.loads(data or b"{}")
            headers = {key.lower(): value for key, value in self.headers.items()}
            number, answer = owner.take(Received(self.path, headers, body))
            if answer.slow_s and not owner.wait(answer.slow_s, self.connection):
                self.close_connection = True
            elif answer.cut == "before":
                _break(self)
            elif answer.body is not None:
                _send(self, answer.status, answer.body.encode())
            elif self.path not in PROTOCOLS:
                _send(self, 404, json.dumps(wire.error_body(Answer(status=404))).encode())
            elif answer.status != 200:
                extra = {"retry-after": answer.retry_after} if answer.retry_after else {}
                _send(self, answer.status, json.dumps(wire.error_body(answer)).encode(), headers=extra)
            elif body.get("stream"):
                _stream(self, _events(self.path, answer, number, body), cut=answer.cut == "mid")
            else:
                build = wire.chat_body if PROTOCOLS[self.path] == "chat" else wire.response_body
                _send(self, 200, json.dumps(build(answer, number)).encode(), cut=answer.cut == "mid")

    return Handler


def _events(path: str, answer: Answer, number: int, body: dict[str, Any]) -> Iterator[str]:
    if PROTOCOLS[path] == "responses":
        return wire.response_events(answer, number)
    with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    return wire.chat_events(answer, number, with_usage=with_usage)


def _send(
    handler: BaseHTTPRequestHandler,
    status: int,
    data: bytes,
    *,
    cut: bool = False,
    headers: Mapping[str, str] | None = None,
) -> None:
    handler.send_response(status)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-length", str(len(data)))
    for name, value in (headers or {}).items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(data[: len(data) // 2] if cut else data)
    if cut:
        _break(handler)


def _stream(handler: BaseHTTPRequestHandler, events: Iterator[str], *, cut: bool) -> None:
    handler.send_response(200)
    handler.send_header("content-type", "text/event-stream")
    handler.send_header("transfer-encoding", "chunked")
    handler.end_headers()
    lines = list(events)
    for line in lines[: len(lines) // 2] if cut else lines:
        data = f"data: {line}\n\n".encode()
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        handler.wfile.flush()
    if cut:
        _break(handler)
    else:
        handler.wfile.write(b"0\r\n\r\n")


def _break(handler: BaseHTTPRequestHandler) -> None:
    """Reset the connection, as a crashed proxy does."""
    handler.wfile.flush()
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True
