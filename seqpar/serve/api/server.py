"""Assembles the API server, runs it, and shuts it down: requests first, then the ranks, then the socket."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from seqpar.serve.api import log
from seqpar.serve.api.app import create_app
from seqpar.serve.api.codec import Codec
from seqpar.serve.api.command import ServeArgs
from seqpar.serve.api.connections import (
    ACCEPTED,
    HEAD_BYTES,
    IDLE_S,
    WAITING,
    Connection,
    Connections,
    allow_files,
    listening,
)
from seqpar.serve.api.dispatch import Dispatch
from seqpar.serve.api.errors import Problem
from seqpar.serve.api.files import JobFolder
from seqpar.serve.api.gate import is_loopback
from seqpar.serve.api.jobs import Queue, ServerJob
from seqpar.serve.api.keys import KeyFile, KeyTerms
from seqpar.serve.api.records import RecordWriter
from seqpar.serve.api.replica import Ended, Replica, private_folder
from seqpar.serve.api.state import ApiServer
from seqpar.serve.api.telemetry import Metrics

ANSWERS_S = 5.0  # for answers to reach their clients at the end, and for records to be written
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # they stop the server
ENDING = Problem(503, "ending", "the server is shutting down; use another server, or retry later")


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers: ours let running requests finish first."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(WAITING)  # uvicorn's backlog is also how many connections asyncio accepts together


def http_server(app: ASGIApp, connections: Connections, trusted_proxies: Sequence[str] = ()) -> HttpServer:
    """The HTTP server of an application, which listens when it is started."""
    config = uvicorn.Config(
        app,
        http=cast("Any", partial(Connection, among=connections)),
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_keep_alive=IDLE_S,
        backlog=ACCEPTED,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=bool(trusted_proxies),
        forwarded_allow_ips=list(trusted_proxies),
        timeout_graceful_shutdown=int(ANSWERS_S),
    )
    return HttpServer(config)


async def run(args: ServeArgs, child: Sequence[str] | None) -> Ended:
    """Serve until a signal, or until the ranks cannot go on. ValueError for invalid flags, OSError for a used port.

    child: the command that starts the ranks, in place of `seqpar replica`.
    """
    keys = None if args.keys is None else KeyFile(args.keys)
    if keys is None and not is_loopback(args.host):
        raise ValueError(f"--host {args.host} is reachable from other machines and requires --keys")
    allow_files(args.connections)
    kept = args.keep_s, args.keep_bytes
    shared = None if args.jobs is None else JobFolder(args.jobs, *kept)
    stop = _stopped_by_signals()  # from here on no signal ends this process before its folder is removed
    if keys is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, keys.reload)
    with private_folder() as (folder, lock), listening(args.host, args.port) as listener:
        log.start()
        host, port = listener.getsockname()[:2]
        name = args.server or secrets.token_hex(4)
        log.event("listening", host=host, port=port, models=args.models, server=name)

        def on_end(job: ServerJob) -> None:
            code = None if job.problem is None else job.problem.code
            waited_s = None if job.started is None else job.started - job.arrived
            metrics.ended(job.spec.request.model, code or job.state, waited_s, time.time() - job.arrived)
            facts = {"model": job.spec.request.model, "pictures": job.spec.count, "steps": job.spec.steps}
            job.span.end(code, request=job.id, **facts, state=job.state)
            log.event("ended", job.id, state=job.state, code=code, **job.computed)
            if server.keeps_records:
                writer.ended(job)

        def terms(key: str) -> KeyTerms:
            if keys is not None:
                return keys.keys.terms.get(key, KeyTerms())
            # without proxies all clients are this machine, which has all places
            return KeyTerms() if args.trusted_proxies else KeyTerms(places=args.queue)

        def loaded() -> dict[str, bool]:
            return {} if replica.facts is None else {model.name: model.loaded for model in replica.facts.models}

        codec, queue = Codec(folder), Queue(args.queue, args.keep_s, on_end, terms, lambda model: replica.swap_s(model))
        replica = Replica(child or args.replica, folder, lock, args.restarts, lambda: metrics.restarts.inc())
        metrics = Metrics(
            lambda: queue.length, lambda: len(queue.active) - queue.length, lambda: replica.memory, loaded
        )
        store = shared or JobFolder(folder, *kept)
        named = {other: names[0] for names in args.names() for other in names}
        server = ApiServer(args, name, queue, replica, store, codec, metrics, int(time.time()), terms, named)
        dispatch = Dispatch(server)
        app = create_app(server, keys, frozenset({args.host}))
        connections = Connections(args.connections, on_refused=lambda status: metrics.answered("", "", status))
        http = http_server(app, connections, args.trusted_proxies)
        writer = RecordWriter(server)
        background = [asyncio.create_task(writer.run())]
        if keys is not None:
            background.append(asyncio.create_task(keys.watch()))
        for task in background:
            task.add_done_callback(lambda task: stop.set())  # a bug in it stops the server
        try:
            return await _serve(server, dispatch, http, listener, stop)
        finally:
            codec.close()
            writer.close()
            for task in background[1:]:
                task.cancel()
            await asyncio.wait(background, timeout=ANSWERS_S)
            for task in background:
                if task.done() and not task.cancelled():
                    task.result()  # raises what ended it


def _stopped_by_signals() -> asyncio.Event:
    """An event that is set by a signal; an ignored signal, as by nohup, stays ignored."""
    stop = asyncio.Event()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _serve(
    server: ApiServer, dispatch: Dispatch, http: HttpServer, listener: socket.socket, stop: asyncio.Event
) -> Ended:
    """Run all tasks until the first one ends or a signal arrives; then shut down in order."""
    supervisor = asyncio.create_task(server.replica.supervise())
    serving = asyncio.create_task(http.serve([listener]))
    dispatching, stopped = asyncio.create_task(dispatch.forever()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([supervisor, serving, dispatching, stopped], return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            log.event("ending", grace_s=server.args.grace_s)
            server.queue.close(ENDING, also_running=False)
            if running := [asyncio.create_task(job.done.wait()) for job in server.queue.active]:
                await asyncio.wait(running, timeout=server.args.grace_s)
    finally:
        server.queue.close(ENDING, also_running=True)
        await server.replica.finish(supervisor)
        http.should_exit = True
        await serving
        stopped.cancel()
        dispatching.cancel()
    await asyncio.wait([dispatching])
    if not dispatching.cancelled():
        dispatching.result()  # raises what ended it: a bug, whose traceback ends this process
    return supervisor.result()
