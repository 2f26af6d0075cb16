"""Clients that connect and send nothing, too slowly or too much; and the latency of an answer on a kept connection."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from seqpar.serve.api import gate, log, server
from seqpar.serve.api.connections import HEAD_BYTES, IDLE_S, STALLED_S, Connections, allow_files, listening
from seqpar.serve.api.errors import ProblemError
from seqpar.serve.api.server import HttpServer, http_server
from tests.support.front import LIMIT_S, Running, running, until

SOON_S = 0.3  # the timeout of headers in tests
LATE_S = 20.0  # for what takes milliseconds unless the machine is busy
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
HOLD = GET.replace(b"/", b"/hold", 1)
POST = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9999\r\n\r\n"
HALF = GET[:20]
LARGE = b"GET / HTTP/1.1\r\nhost: localhost\r\nx: %s\r\n\r\n" % (b"y" * (HEAD_BYTES + 1))
# a client sends the first text at once, and the second again and again; and gets so many answers
SLOW = [
    (b"", b"", 0),
    (HALF, b"", 0),
    (b"GET / HTTP/1.1\r\nx: ", b"y", 0),
    (GET + HALF, b"", 1),
    (GET + b"GET / HTTP/1.1\r\nx: ", b"y", 1),
    (POST, b"y", 1),  # a body that the application does not read
]
Connect = Callable[[bytes], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class App:
    """An application that answers at once, or holds requests of /hold."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.release = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        if scope["path"] == "/hold":
            await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def count(self, requests: int) -> None:
        while len(self.paths) < requests:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(connections: Connections) -> AsyncIterator[tuple[App, HttpServer, Connect]]:
    """Serve in this process; yield also a function that connects and sends something."""
    app, listener = App(), listening("127.0.0.1", 0)
    http, port = http_server(app, connections), listener.getsockname()[1]
    writers: list[asyncio.StreamWriter] = []

    async def connect(text: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        writer.write(text)
        await writer.drain()
        return reader, writer

    task = asyncio.create_task(http.serve([listener]))
    try:
        async with asyncio.timeout(LATE_S):
            while not http.started:
                await asyncio.sleep(0.01)
            yield app, http, connect
    finally:
        app.release.set()
        for writer in writers:
            writer.close()
        http.should_exit = True
        await task


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """Everything until the server closes or resets the connection."""
    received = b""
    with suppress(ConnectionResetError):
        while part := await reader.read(4096):
            received += part
    return received


def test_accepted_connections_send_at_once_and_time_out_on_clients_that_do_not_read() -> None:
    async def options() -> list[int]:
        async with serving(Connections(9)) as (_, http, connect):
            await connect(b"")
            while not http.server_state.connections:
                await asyncio.sleep(0.01)
            (connection,) = http.server_state.connections
            accepted = connection.transport.get_extra_info("socket")  # pyright: ignore
            return [accepted.getsockopt(socket.IPPROTO_TCP, x) for x in (socket.TCP_NODELAY, socket.TCP_USER_TIMEOUT)]

    assert asyncio.run(options()) == [1, 1000 * STALLED_S]


def test_slow_clients_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_S", 1)

    async def client(connect: Connect, at_once: bytes, then: bytes, count: int) -> None:
        begun = time.monotonic()
        reader, writer = await connect(at_once)
        closed = asyncio.create_task(all_of(reader))
        while not closed.done():
            if then and not writer.is_closing():
                writer.write(then)
            await asyncio.wait([closed], timeout=SOON_S / 5)
        assert time.monotonic() - begun >= SOON_S * 0.9
        assert (await closed).count(b"200 OK") == count

    async def all_clients() -> None:
        async with serving(Connections(9, SOON_S)) as (_, _, connect):
            await asyncio.gather(*(client(connect, *case) for case in SLOW))

    asyncio.run(all_clients())


def test_a_new_connection_replaces_the_one_that_is_idle_longest() -> None:
    async def talk() -> None:
        async with serving(Connections(3)) as (app, _, connect):
            held, _ = await connect(HOLD)
            await app.count(1)
            kept, writer = await connect(GET)
            assert b"ok" in await kept.readuntil(b"ok")
            unfinished, _ = await connect(HALF)
            newest, _ = await connect(GET)
            async with asyncio.timeout(IDLE_S - 1):  # before it is closed for being idle
                assert await kept.read() == b""
            await newest.readuntil(b"ok")
            await connect(HOLD)
            assert await all_of(unfinished) == b""
            await connect(HOLD)
            assert await all_of(newest) == b""
            await app.count(5)
            refused, _ = await connect(b"")  # all have requests in progress
            head, _, body = (await all_of(refused)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert json.loads(body)["error"]["code"] == "busy"
            app.release.set()
            await held.readuntil(b"ok")
            await (await connect(GET))[0].readuntil(b"ok")
            writer.close()

    asyncio.run(talk())


@pytest.mark.parametrize(("text", "count"), [(LARGE, 0), (LARGE[:-4], 0), (GET + LARGE, 1)])
def test_long_headers_are_refused_before_they_are_parsed(text: bytes, count: int) -> None:
    async def answer() -> tuple[bytes, int]:
        async with serving(Connections(9)) as (app, _, connect):
            return await all_of((await connect(text))[0]), len(app.paths)

    sent, reached = asyncio.run(answer())
    assert (sent.count(b"HTTP/1.1 431 "), sent.count(b"HTTP/1.1 "), reached) == (1, count + 1, count)


def test_frequent_events_are_one_line_per_second(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "OFTEN_S", 0.1)

    async def logged(handler: logging.Handler) -> None:
        logger = logging.Logger("other")
        logger.addHandler(handler)
        for number in range(50):
            logger.warning("of another package")
            for name, often in (("ours", False), ("often", True)):
                record = logging.LogRecord(log.LOGGER, logging.INFO, "", 0, name, (), None)
                record.every_s, record.facts = 0.1 if often else None, {"number": number}
                handler.handle(record)
        while handler._held:  # pyright: ignore
            await asyncio.sleep(0.01)
        logger.warning("of another package")

    handler = log.RateLimited()
    handler.setFormatter(log.JsonLines())
    asyncio.run(logged(handler))
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    counts = {"ours": [None] * 50, "often": [None, 49], "of another package": [None, 49, None]}
    assert {name: [x.get("count") for x in lines if x["event"] == name] for name in counts} == counts
    assert [line["number"] for line in lines if line["event"] == "often"] == [0, 49]


def test_many_connections_with_unfinished_headers_do_not_deafen_a_server(tmp_path: Path) -> None:
    """The server may open 512 files, and 700 clients connect."""
    before = f"""
import functools, resource
from seqpar.serve.api import server
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
server.Connections = functools.partial(server.Connections, head_s={5 * SOON_S})
"""
    with running(tmp_path, "--connections", "64", before=before) as front:
        clients = list[socket.socket]()

        def health_s() -> float:
            begun, line = time.monotonic(), HTTPConnection("127.0.0.1", front.port, timeout=LIMIT_S)
            line.request("GET", "/health")
            assert line.getresponse().status == 200
            line.close()
            return time.monotonic() - begun

        try:
            for _ in range(700):
                clients.append(socket.create_connection(("127.0.0.1", front.port), LIMIT_S))
                clients[-1].sendall(HALF)
            assert health_s() < 5.0
            for client in clients:
                with suppress(ConnectionResetError):
                    assert client.recv(1) == b""
            assert health_s() < 5.0
        finally:
            for client in clients:
                client.close()
        until(lambda: any(event.get("count") for event in front.events))
        assert len(front.events) < 40


def test_a_body_that_does_not_arrive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODY_S", 0.01)

    async def receive() -> Message:
        await asyncio.sleep(0.001)
        return {"type": "http.request", "body": b"x", "more_body": True}

    with pytest.raises(ProblemError, match=r"did not arrive within 0\.01 s; retry") as error:
        asyncio.run(gate.read_body((gate.JSON,), Headers({"content-type": gate.JSON}), receive))
    assert error.value.problem.status == 408


def test_connections_need_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for hard, advice in ((400, "use at most --connections 8"), (385, "raise the limit"), (300, "raise the limit")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (hard, hard))
        with pytest.raises(ValueError, match=f"needs 584 open files, .*allows {hard}; {advice}"):
            allow_files(100)


@pytest.mark.bench
def test_health_on_a_kept_connection_takes_at_most_3_ms(front: Running) -> None:
    line, times = HTTPConnection("127.0.0.1", front.port, timeout=LIMIT_S), list[float]()
    for _ in range(200):
        begun = time.perf_counter()
        line.request("GET", "/health")
        line.getresponse().read()
        times.append(1000 * (time.perf_counter() - begun))
    line.close()
    print(f"/health on a kept connection: median {statistics.median(times):.2f} ms")
    assert statistics.median(times) <= 3.0
