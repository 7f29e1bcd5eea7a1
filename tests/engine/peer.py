"""A peer elsewhere: a small HTTP server on the loopback with tasks of its own, and the transport that talks to it."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cortex_workers.errors import TransportBusy, TransportFailed
from cortex_workers.ports import PeerReply, PeerTask
from cortex_workers.schemas.a2a import Address, Envelope


@dataclass
class Peer:
    """What the server does with messages, and what it has seen. A task is begun once for each delivery."""

    answers: str = "task"
    refusals: int = 0
    content: str = "9 EUR"
    done: bool = False
    broken: bool = False
    seen: list[dict[str, Any]] = field(default_factory=list)
    polls: int = 0
    tasks: dict[str, str] = field(default_factory=dict)
    port: int = 0


class _Handler(BaseHTTPRequestHandler):
    peer: Peer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        peer, body = self.peer, self._body()
        if peer.refusals > 0:
            peer.refusals -= 1
            self._say(503, {"error": "busy"})
            return
        peer.seen.append(body)
        if peer.broken:
            self._say(500, {"error": "broken"})
        elif peer.answers == "message":
            self._say(200, {"content": peer.content})
        else:
            task = peer.tasks.setdefault(body["delivery"], f"task-{len(peer.tasks) + 1}")
            self._say(200, {"task": task})

    def do_GET(self) -> None:
        self.peer.polls += 1
        if self.peer.broken:
            self._say(500, {"error": "broken"})
        elif self.peer.done:
            self._say(200, {"content": self.peer.content})
        else:
            self._say(200, {"task": self.path.removeprefix("/tasks/")})

    def _body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return found

    def _say(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def a_peer(**how: Any) -> Iterator[Peer]:
    """A peer that serves for as long as a block lasts."""
    peer = Peer(**how)
    handler = type("Handler", (_Handler,), {"peer": peer})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    peer.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield peer
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class HttpTransport:
    """Carries messages to the agents of one node over HTTP."""

    def __init__(self, peer: Peer, node: str = "paris") -> None:
        self.peer = peer
        self.node = node

    def handles(self, address: Address) -> bool:
        return address.node == self.node

    def deliver(self, envelope: Envelope, receiver: Address, delivery_id: str) -> PeerReply | PeerTask:
        body = {
            "delivery": delivery_id,
            "to": receiver.agent,
            "from": envelope.sender,
            "performative": envelope.performative,
            "content": envelope.content,
            "reply_with": envelope.reply_with,
        }
        return self._read(self._call("POST", "/messages", body))

    def poll(self, task_id: str, receiver: Address) -> PeerReply | PeerTask:
        return self._read(self._call("GET", f"/tasks/{task_id}"))

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"http://127.0.0.1:{self.peer.port}{path}", data=data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 503:
                raise TransportBusy("the peer is busy") from None
            raise TransportFailed(f"the peer said {error.code}") from None
        except urllib.error.URLError as error:
            raise TransportBusy(f"nobody listens: {error.reason}") from None

    def _read(self, found: dict[str, Any]) -> PeerReply | PeerTask:
        if "task" in found:
            return PeerTask(found["task"], poll_after_s=2.0)
        return PeerReply(found["content"])
