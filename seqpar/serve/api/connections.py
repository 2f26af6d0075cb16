"""Limits on TCP connections, for clients that connect and then send nothing, or send slowly.

uvicorn parses requests, but waits for their headers without a timeout and accepts any number of connections.
"""

from __future__ import annotations

import asyncio
import re
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from seqpar.serve.api import log
from seqpar.serve.api.errors import Problem

HEAD_S = 10.0  # for the headers of a request to arrive
HEAD_BYTES = 1 << 14  # of the headers of a request
IDLE_S = 5  # for the next request on a kept connection to begin
STALLED_S = 60.0  # for a client to take the next bytes of an answer
HEAD_END = re.compile(rb"\n\r?\n")
ACCEPTED = 32  # connections that the event loop accepts before it does anything else
WAITING = 1024  # connections that the kernel holds until they are accepted
OWN_FILES = 256  # file descriptors for everything but connections and their downloads
BUSY = Problem(503, "busy", "the server has too many open requests; retry later", headers={"retry-after": "1"})
TOO_LONG = Problem(431, "too_large", f"the headers have more than {HEAD_BYTES} bytes; send fewer or shorter ones")


def listening(host: str, port: int) -> socket.socket:
    """Open the server's socket; OSError names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=WAITING)
    except OSError as error:
        raise OSError(f"cannot listen at --host {host} --port {port}: {error.strerror or error}") from error
    # Accepted sockets inherit both options. asyncio sets TCP_NODELAY itself only where a socket's protocol is not 0;
    # without it, the body of an answer waits about 40 ms for the client's acknowledgement of the headers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(STALLED_S * 1000))
    return listener


def allow_files(connections: int) -> None:
    """Raise this process's limit of open files to what so many connections need; ValueError if that is not allowed.

    A connection that downloads a result also holds its file. Refused connections are open until the event loop closes
    them, a few batches later.
    """
    needed = 2 * connections + 4 * ACCEPTED + OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        most = (hard - 4 * ACCEPTED - OWN_FILES) // 2
        way_out = f"use at most --connections {most}, or raise" if most > 0 else "raise"
        raise ValueError(
            f"--connections {connections} needs {needed} open files, `ulimit -Hn` allows {hard}; {way_out} the limit"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@dataclass(eq=False)
class Connections:
    """The open connections of a server. most: how many. head_s: timeout of a request's headers.

    on_refused(status): called for each answer to a connection without a request.

    idle: connections without a request in progress, the one that has been idle longest first.
    """

    most: int
    head_s: float = HEAD_S
    on_refused: Callable[[int], None] = lambda status: None
    open: set[Connection] = field(default_factory=set["Connection"])
    idle: dict[Connection, None] = field(default_factory=dict["Connection", None])

    def make_room(self) -> bool:
        """Close the connection that has been idle longest; return whether there was one."""
        # a client that still receives an answer is not idle
        oldest = next((idle for idle in self.idle if not idle.transport.get_write_buffer_size()), None)
        if oldest is None:
            return False
        self.forget(oldest)
        oldest.transport.abort()
        return True

    def forget(self, connection: Connection) -> None:
        """Count a connection no longer."""
        self.open.discard(connection)
        self.idle.pop(connection, None)


class Connection(H11Protocol):
    """uvicorn's connection, with timeouts and limits. among: all connections of the server."""

    def __init__(self, *arguments: Any, among: Connections, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._among = among
        self._late: asyncio.TimerHandle | None = None  # runs while the headers of a request are expected

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if len(self._among.open) >= self._among.most:
            if not self._among.make_room():
                self._refuse("connection refused, all others have requests in progress", BUSY)
                return
            log.often("idle connection closed for a new one", level=30, connections=self._among.most)
        self._among.open.add(self)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._among.forget(self)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def handle_events(self) -> None:
        """Parse what has arrived, except for headers that are too long."""
        if self.conn.their_state is h11.IDLE:
            arrived = self.conn.trailing_data[0]
            if len(arrived) > HEAD_BYTES and HEAD_END.search(arrived[:HEAD_BYTES]) is None:
                self._refuse("request with too long headers", TOO_LONG)
                return
        super().handle_events()

    def send_400_response(self, msg: str) -> None:
        self._among.on_refused(400)
        super().send_400_response(msg)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Start or stop the timeout of the headers, as the state of the connection requires."""
        in_progress = self.cycle is not None and not self.cycle.response_complete
        is_idle = self in self._among.open and not in_progress and not self.transport.is_closing()
        if is_idle:
            self._among.idle.setdefault(self)
        else:
            self._among.idle.pop(self, None)
        # between two requests uvicorn's timeout runs, until a byte arrives
        if is_idle and self.timeout_keep_alive_task is None:
            self._late = self._late or self.loop.call_later(self._among.head_s, self._close_late)
        elif self._late is not None:
            self._late.cancel()
            self._late = None

    def _close_late(self) -> None:
        log.often("connection closed, headers did not arrive in time", level=30, after_s=self._among.head_s)
        self.transport.close()

    def _refuse(self, event: str, problem: Problem) -> None:
        """Answer a connection without a request, and close it."""
        self._among.on_refused(problem.status)
        log.often(event, level=30, client=self.client and self.client[0])
        body = msgspec.json.encode({"error": problem.shape})
        headers = {**problem.headers, "content-type": "application/json", "content-length": len(body)}
        lines = [f"HTTP/1.1 {problem.status} ", *(f"{name}: {value}" for name, value in headers.items())]
        self.transport.write("\r\n".join([*lines, "connection: close", "", ""]).encode() + body)
        self.transport.close()
