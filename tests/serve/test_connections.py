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
from starlette.types import Receive, Scope, Send

from seqpar.serve.api import log
from seqpar.serve.api.connections import HEAD_BYTES, IDLE_S, STALLED_S, Connections, allow_files, listening
from seqpar.serve.api.server import HttpServer, http_server
from tests.support.front import LIMIT_S, running, until

SOON_S = 0.3  # the timeout of headers in tests
LATE_S = 20.0  # for what comes soon unless the machine is busy
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9999\r\n\r\n"
HALF = GET[:20]
LARGE = b"GET / HTTP/1.1\r\nhost: localhost\r\nx: %s\r\n\r\n" % (b"y" * (HEAD_BYTES + 1))
# each client sends the first text at once, and a byte of the second again and again
SLOW: dict[str, tuple[bytes, bytes]] = {
    "nothing": (b"", b""),
    "half of the headers": (HALF, b""),
    "headers, slowly": (b"GET / HTTP/1.1\r\nx: ", b"y"),
    "half of the second headers": (GET + HALF, b""),
    "the second headers, slowly": (GET + b"GET / HTTP/1.1\r\nx: ", b"y"),
    "a body that nobody reads, slowly": (POST, b"y"),
}


class App:
    """An application that answers at once, or holds requests of /hold until it is told."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.release = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        self.paths.append(scope["path"])
        if scope["path"] == "/hold":
            await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


Open = Callable[[bytes], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@asynccontextmanager
async def serving(connections: Connections) -> AsyncIterator[tuple[App, HttpServer, Open]]:
    """Serve in this process; yield also a function that connects and sends something."""
    app, listener = App(), listening("127.0.0.1", 0)
    server, port = http_server(app, connections), listener.getsockname()[1]
    writers: list[asyncio.StreamWriter] = []

    async def connect(text: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        writer.write(text)
        await writer.drain()
        return reader, writer

    task = asyncio.create_task(server.serve([listener]))
    try:
        async with asyncio.timeout(LATE_S):
            while not server.started:
                await asyncio.sleep(0.01)
            yield app, server, connect
    finally:
        app.release.set()
        for writer in writers:
            writer.close()
        server.should_exit = True
        await task


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """Return what the server sends until it closes the connection, by a reset, too."""
    received = b""
    try:
        while part := await reader.read(4096):
            received += part
    except ConnectionResetError:
        pass
    return received


def test_accepted_connections_send_at_once_and_give_up_on_clients_that_do_not_read() -> None:
    async def options() -> tuple[int, int]:
        async with serving(Connections(9)) as (_, server, connect):
            await connect(b"")
            while not server.server_state.connections:
                await asyncio.sleep(0.01)
            (connection,) = server.server_state.connections
            accepted = connection.transport.get_extra_info("socket")  # pyright: ignore
            return tuple(  # pyright: ignore
                accepted.getsockopt(socket.IPPROTO_TCP, each) for each in (socket.TCP_NODELAY, socket.TCP_USER_TIMEOUT)
            )

    assert asyncio.run(options()) == (1, 1000 * STALLED_S)


@pytest.mark.parametrize("kind", SLOW)
def test_slow_clients_are_closed(kind: str) -> None:
    at_once, then = SLOW[kind]

    async def seconds() -> tuple[float, bytes]:
        async with serving(Connections(9, SOON_S)) as (_, _, connect):
            begun = time.monotonic()
            reader, writer = await connect(at_once)
            closed = asyncio.create_task(all_of(reader))
            while not closed.done():
                if then and not writer.is_closing():
                    writer.write(then)
                await asyncio.wait([closed], timeout=SOON_S / 5)
            return time.monotonic() - begun, await closed

    after_s, answer = asyncio.run(seconds())
    assert after_s >= SOON_S * 0.9
    assert answer.count(b"200 OK") == (at_once[:30].count(GET[:30]) or kind.startswith("a body"))


def test_a_new_connection_takes_the_place_of_the_one_that_is_idle_longest() -> None:
    async def talked() -> None:
        async with serving(Connections(3)) as (app, _, connect):
            held, _ = await connect(GET.replace(b"/", b"/hold", 1))
            while app.paths != ["/hold"]:
                await asyncio.sleep(0.01)
            kept, writer = await connect(GET)
            assert b"ok" in await kept.readuntil(b"ok")
            unfinished, _ = await connect(HALF)
            newest, _ = await connect(GET)
            async with asyncio.timeout(IDLE_S - 1):  # before it is closed for being idle
                assert await kept.read() == b""
            await newest.readuntil(b"ok")
            await connect(GET.replace(b"/", b"/hold", 1))
            assert await all_of(unfinished) == b""
            await connect(GET.replace(b"/", b"/hold", 1))
            assert await all_of(newest) == b""
            while len(app.paths) < 5:
                await asyncio.sleep(0.01)
            refused, _ = await connect(b"")  # all have requests in progress
            head, _, body = (await all_of(refused)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert json.loads(body)["error"]["code"] == "busy"
            app.release.set()
            await held.readuntil(b"ok")
            await (await connect(GET))[0].readuntil(b"ok")
            writer.close()

    asyncio.run(talked())


@pytest.mark.parametrize(("text", "count"), [(LARGE, 0), (LARGE[:-4], 0), (GET + LARGE, 1)])
def test_long_headers_are_refused_before_they_are_parsed(text: bytes, count: int) -> None:
    async def answer() -> tuple[bytes, int]:
        async with serving(Connections(9)) as (app, _, connect):
            return await all_of((await connect(text))[0]), len(app.paths)

    sent, reached = asyncio.run(answer())
    assert (sent.count(b"HTTP/1.1 431 "), sent.count(b"HTTP/1.1 "), reached) == (1, count + 1, count)


def test_frequent_events_are_one_line_per_second(capsys: pytest.CaptureFixture[str]) -> None:
    async def logged(handler: logging.Handler) -> None:
        logger = logging.Logger("other")
        logger.addHandler(handler)
        for number in range(50):
            logger.warning("of another package")
            for name, often in (("ours", False), ("often", True)):
                record = logging.LogRecord(log.LOGGER, logging.INFO, "", 0, name, (), None)
                record.often, record.facts = often, {"number": number}
                handler.handle(record)
        await asyncio.sleep(2.5 * log.OFTEN_S)
        logger.warning("of another package")

    handler = log.RateLimited()
    handler.setFormatter(log.JsonLines())
    asyncio.run(logged(handler))
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    counts = {name: [each.get("count") for each in lines if each["event"] == name] for name in ("often", "ours")}
    assert counts == {"often": [None, 49], "ours": [None] * 50}
    assert [each.get("count") for each in lines if each["event"] == "of another package"] == [None, 49, None]
    assert [each["number"] for each in lines if each["event"] == "often"] == [0, 49]


def test_many_connections_with_unfinished_headers_do_not_deafen_a_server(tmp_path: Path) -> None:
    """The front may open 512 files, and 700 clients connect."""
    before = f"""
import functools, resource
from seqpar.serve.api import server
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
server.Connections = functools.partial(server.Connections, head_s={5 * SOON_S})
"""
    with running(tmp_path, "--connections", "64", before=before) as front:
        port, clients = front.event("listening")["port"], list[socket.socket]()

        def health_s() -> float:
            begun, line = time.monotonic(), HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
            line.request("GET", "/health")
            assert line.getresponse().status == 200
            line.close()
            return time.monotonic() - begun

        try:
            for _ in range(700):
                clients.append(socket.create_connection(("127.0.0.1", port), LIMIT_S))
                clients[-1].sendall(HALF)
            assert health_s() < 5.0
            for client in clients:
                with suppress(ConnectionResetError):
                    assert client.recv(1) == b""
            assert health_s() < 5.0
        finally:
            for client in clients:
                client.close()
        until(lambda: any(each.get("count") for each in front.events))
        assert len(front.events) < 40


@pytest.mark.parametrize(
    ("hard", "expected"),
    [
        (400, "needs 484 open files, .*allows 400; use at most --connections 16"),
        (300, "needs 484 open files, .*allows 300; raise the limit"),
    ],
)
def test_connections_need_open_files(hard: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))
    with pytest.raises(ValueError, match=expected):
        allow_files(100)


@pytest.mark.bench
def test_health_on_a_kept_connection_takes_at_most_3_ms(tmp_path: Path) -> None:
    with running(tmp_path) as front:
        line, times = HTTPConnection("127.0.0.1", front.event("listening")["port"], timeout=LIMIT_S), list[float]()
        for _ in range(200):
            begun = time.perf_counter()
            line.request("GET", "/health")
            line.getresponse().read()
            times.append(1000 * (time.perf_counter() - begun))
        line.close()
    print(f"/health on a kept connection: median {statistics.median(times):.2f} ms")
    assert statistics.median(times) <= 3.0
