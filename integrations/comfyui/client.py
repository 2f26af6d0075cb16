"""Requests to `seqpar serve`, by the standard library alone. Nothing here imports torch, ComfyUI or seqpar."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

POLL_S = 0.1  # between two calls of `check` while nothing arrives
QUIET_S = 60.0  # without a byte from the server, which sends one every 15 s
JSON = "application/json"
Check = Callable[[], None]  # raises to stop: the connection closes, and the server then cancels the job
Body = tuple[str, bytes]  # content type and content


class ServerError(RuntimeError):
    """What the server answers, or why it does not, in one sentence. status: of HTTP, None without an answer."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Server:
    """A running server. key: None where it has no keys."""

    url: str
    key: str | None = field(default=None, repr=False)

    def get(self, path: str, check: Check) -> bytes:
        return b"".join(self._parts("GET", path, None, check, False))

    def json(self, method: str, path: str, check: Check, body: Body | None = None) -> Any:
        return json.loads(b"".join(self._parts(method, path, body, check, False)))

    def events(self, path: str, body: Body, check: Check) -> Generator[dict[str, Any]]:
        """Yield the events of a streamed answer; ServerError for one that is an error."""
        for line in self._parts("POST", path, body, check, True):
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if event["type"] == "error":
                    raise ServerError(event["error"]["message"])
                yield event

    def _parts(self, method: str, path: str, body: Body | None, check: Check, lines: bool) -> Generator[bytes]:
        """Yield a body, whole or in lines. A thread reads it, so that `check` is called while nothing arrives."""
        where = urlsplit(self.url)
        kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
        if where.scheme not in ("http", "https") or not where.hostname:
            raise ServerError(f"{self.url!r} is no address of a server; use one such as http://127.0.0.1:8000")
        connection = kind(where.hostname, where.port, timeout=QUIET_S)
        parts = queue.SimpleQueue[bytes | Exception | None]()
        sockets, stopped = list[socket.socket](), threading.Event()

        def read() -> None:
            headers = {} if body is None else {"content-type": body[0]}
            if self.key is not None:
                headers["authorization"] = f"Bearer {self.key}"
            try:
                connection.connect()
                sockets.append(connection.sock)
                if stopped.is_set():
                    return
                connection.request(method, where.path.rstrip("/") + path, None if body is None else body[1], headers)
                with connection.getresponse() as response:
                    if response.status >= 300:
                        raise _refused(response.status, response.read())
                    for part in response if lines else [response.read()]:
                        parts.put(part)
                parts.put(None)
            except (OSError, http.client.HTTPException, ServerError) as error:
                parts.put(error)
            finally:
                connection.close()

        threading.Thread(target=read, daemon=True).start()
        try:
            while True:
                check()
                with contextlib.suppress(queue.Empty):
                    part = parts.get(timeout=POLL_S)
                    if part is None:
                        return
                    if isinstance(part, ServerError):
                        raise part
                    if isinstance(part, Exception):
                        reason = str(part) or type(part).__name__
                        advice = "start it with `seqpar serve`, or name another address"
                        raise ServerError(f"the server at {self.url} does not answer ({reason}); {advice}") from part
                    yield part
        finally:
            stopped.set()
            for sock in sockets:  # the thread closes it, which must not happen while it reads
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


def _refused(status: int, content: bytes) -> ServerError:
    """The error that an answer of the server, or of a proxy before it, describes."""
    try:
        text = json.loads(content)["error"]["message"]
    except (ValueError, TypeError, KeyError):
        text = f"the server answers with status {status}"
    return ServerError(text, status)


def as_json(fields: Mapping[str, Any]) -> Body:
    return JSON, json.dumps(fields).encode()


def as_form(fields: Mapping[str, Any], files: Sequence[tuple[str, bytes]]) -> Body:
    """A multipart form. files: (field, content)."""
    mark = secrets.token_hex(16)
    parts = [
        *((name, "", value if isinstance(value, str) else json.dumps(value)) for name, value in fields.items()),
        *((name, '; filename="file"', content) for name, content in files),
    ]
    body = bytearray()
    for name, more, content in parts:
        body += f'--{mark}\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n'.encode()
        body += (content.encode() if isinstance(content, str) else content) + b"\r\n"
    return f"multipart/form-data; boundary={mark}", bytes(body + f"--{mark}--\r\n".encode())


def file_of(event: Mapping[str, Any]) -> bytes:
    """The file in an event of a stream."""
    return base64.b64decode(event["b64_json"])
