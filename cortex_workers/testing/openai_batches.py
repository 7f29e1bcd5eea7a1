"""Files and batches of the local OpenAI server: as much as a client needs, refused where the real API refuses.

::

    with OpenAIServer([{"say": "Done."}]) as server:
        ...                      # a client submits
        server.batches.end()     # each of its lines takes the next answer

Nothing ends by itself: a test says when, and how.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any, Literal

from cortex_workers.testing import openai_wire as wire
from cortex_workers.testing.openai_wire import Answer

PATHS = ("/v1/files", "/v1/batches")
ENDPOINTS = {"/v1/chat/completions": wire.chat_body, "/v1/responses": wire.response_body}
End = Literal["completed", "failed", "expired", "cancelled"]
Take = Callable[[str, dict[str, Any]], tuple[int, Answer]]


class Refused(Exception):
    """The answer to a request that the real API refuses."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Batches:
    """The files and batches of one server. ``calls`` are the requests so far, as ``GET /v1/batches/batch_1``."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._lock = threading.Lock()
        self._files: dict[str, bytes] = {}
        self._batches: dict[str, dict[str, Any]] = {}
        self._sent: list[dict[str, Any]] = []
        self._made = 0
        self._trouble: deque[tuple[str, int, str]] = deque()
        self.calls: list[str] = []

    # --- What a test says ----------------------------------------------------------------------------------------

    def trouble(self, what: str, status: int, times: int = 1, retry_after: str = "") -> None:
        """Answer the next requests that begin with a text (``GET /v1/batches``) with an error status."""
        self._trouble.extend([(what, status, retry_after)] * times)

    def end(self, how: End = "completed") -> None:
        """End every batch that runs. Completed, each line takes the next answer of the script; else none does."""
        with self._lock:
            running = [each for each in self._batches.values() if each["status"] == "in_progress"]
        for batch in running:
            self._end(batch, how)

    def forget(self) -> None:
        """Lose everything, as a provider does after its retention."""
        with self._lock:
            self._files.clear()
            self._batches.clear()

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of every batch, in order; they are remembered when a client has deleted its file."""
        with self._lock:
            return list(self._sent)

    @property
    def files(self) -> list[str]:
        """The ids of the files that are kept."""
        with self._lock:
            return list(self._files)

    # --- What a client asks --------------------------------------------------------------------------------------

    def answer(
        self, method: str, path: str, headers: Mapping[str, str], data: bytes
    ) -> tuple[int, bytes, str]:
        """Status, body, and the ``retry-after`` header, where there is one."""
        call = f"{method} {path}"
        with self._lock:
            self.calls.append(call)
            if self._trouble and call.startswith(self._trouble[0][0]):
                _, status, retry_after = self._trouble.popleft()
                return status, _json(wire.error_body(Answer(status=status))), retry_after
            try:
                if not headers.get("authorization", "").startswith("Bearer "):
                    raise Refused(401, "no key")
                return 200, self._route(method, path, headers, data), ""
            except Refused as error:
                answer = Answer(status=error.status, message=str(error))
                return error.status, _json(wire.error_body(answer)), ""

    def _route(self, method: str, path: str, headers: Mapping[str, str], data: bytes) -> bytes:
        match method, path.removeprefix("/v1/").split("/"):
            case "POST", ["files"]:
                return _json(self._upload(headers, data))
            case "GET", ["files", file_id, "content"]:
                return self._file(file_id)
            case "DELETE", ["files", file_id]:
                self._file(file_id)
                del self._files[file_id]
                return _json({"id": file_id, "object": "file", "deleted": True})
            case "POST", ["batches"]:
                return _json(self._create(json.loads(data or b"{}")))
            case "GET", ["batches", batch_id] if batch_id in self._batches:
                return _json(self._batches[batch_id])
        raise Refused(404, "there is no such thing")

    def _upload(self, headers: Mapping[str, str], data: bytes) -> dict[str, Any]:
        fields = _fields(headers.get("content-type", ""), data)
        if fields.get("purpose") != b"batch":
            raise Refused(400, "purpose is batch here")
        if not fields.get("file"):
            raise Refused(400, "the file is empty")
        return self._keep(fields["file"])

    def _keep(self, content: bytes) -> dict[str, Any]:
        self._made += 1
        file_id = f"file-{self._made}"
        self._files[file_id] = content
        return {
            "id": file_id,
            "object": "file",
            "bytes": len(content),
            "created_at": wire.CREATED,
            "filename": "batch.jsonl",
            "purpose": "batch",
            "status": "processed",
        }

    def _file(self, file_id: str) -> bytes:
        if file_id not in self._files:
            raise Refused(404, f"there is no file {file_id}")
        return self._files[file_id]

    def _create(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked.get("completion_window") != "24h":
            raise Refused(400, "completion_window is 24h")
        if asked.get("endpoint") not in ENDPOINTS:
            raise Refused(400, "endpoint is not one of a batch")
        if asked.get("input_file_id") not in self._files:
            raise Refused(400, "there is no such input file")
        self._made += 1
        batch: dict[str, Any] = {
            "id": f"batch_{self._made}",
            "object": "batch",
            "endpoint": asked["endpoint"],
            "input_file_id": asked["input_file_id"],
            "completion_window": "24h",
            "status": "in_progress",
            "created_at": wire.CREATED,
            "errors": None,
            "output_file_id": None,
            "error_file_id": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
        }
        wrong = list(_wrong_lines(self._files[batch["input_file_id"]], batch["endpoint"]))
        if wrong:
            batch.update(status="failed", errors={"object": "list", "data": wrong})
        else:
            self._sent += self._lines(batch)
            batch["request_counts"]["total"] = len(self._lines(batch))
        self._batches[batch["id"]] = batch
        return batch

    def _lines(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        text = self._files[batch["input_file_id"]].decode()
        return [json.loads(line) for line in text.split("\n")]

    def _end(self, batch: dict[str, Any], how: End) -> None:
        with self._lock:
            lines = self._lines(batch)
        done = [self._done(line, batch["endpoint"]) for line in lines] if how == "completed" else []
        bad = [line for line in done if line["response"]["status_code"] != 200]
        good = [line for line in done if line not in bad]
        if how == "expired":
            bad = [_unrun(line["custom_id"]) for line in lines]
        with self._lock:
            for name, some in (("output_file_id", good), ("error_file_id", bad)):
                if some:
                    batch[name] = self._keep(b"\n".join(_json(line) for line in some))["id"]
            if how == "failed":
                error = {"code": "invalid", "message": "no", "line": None, "param": None}
                batch["errors"] = {"object": "list", "data": [error]}
            batch["request_counts"].update(completed=len(good), failed=len(bad))
            batch["status"] = how

    def _done(self, line: dict[str, Any], endpoint: str) -> dict[str, Any]:
        number, answer = self._take(endpoint, line["body"])
        body = wire.error_body(answer) if answer.status != 200 else ENDPOINTS[endpoint](answer, number)
        response = {"status_code": answer.status, "request_id": f"req_{number}", "body": body}
        return {
            "id": f"batch_req_{number}",
            "custom_id": line["custom_id"],
            "response": response,
            "error": None,
        }


def _unrun(custom_id: str) -> dict[str, Any]:
    error = {"code": "batch_expired", "message": "not executed before the window ended"}
    return {"id": f"batch_req_{custom_id}", "custom_id": custom_id, "response": None, "error": error}


def _wrong_lines(content: bytes, endpoint: str) -> Any:
    """What the real API finds when it validates an input file."""
    seen: set[str] = set()
    for number, text in enumerate(content.decode().split("\n"), start=1):
        line = json.loads(text)
        body = line.get("body")
        wrong = (
            not isinstance(line.get("custom_id"), str)
            or line["custom_id"] in seen
            or (line.get("method"), line.get("url")) != ("POST", endpoint)
            or not isinstance(body, dict)
            or not body.get("model")
            or bool(body.get("stream"))
        )
        if wrong:
            yield {"code": "invalid_line", "message": "malformed line", "line": number, "param": None}
        seen.add(str(line.get("custom_id")))


def _fields(content_type: str, data: bytes) -> dict[str, bytes]:
    """The fields of a form upload."""
    head = f"content-type: {content_type}\r\n\r\n".encode()
    message = BytesParser(policy=HTTP).parsebytes(head + data)
    found: dict[str, bytes] = {}
    for part in message.iter_parts() if message.is_multipart() else ():
        name = part.get_param("name", header="content-disposition")
        payload = part.get_payload(decode=True)
        found[str(name)] = payload if isinstance(payload, bytes) else b""
    return found


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
