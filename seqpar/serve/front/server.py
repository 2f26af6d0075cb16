"""Puts the front together, runs it, and takes it apart: requests first, then the ranks, then the socket."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from seqpar.serve.front import log
from seqpar.serve.front.app import create_app
from seqpar.serve.front.command import ServeArgs
from seqpar.serve.front.connections import (
    ACCEPTED,
    HEAD_BYTES,
    IDLE_S,
    WAITING,
    Connection,
    Connections,
    allow_files,
    listening,
)
from seqpar.serve.front.dispatch import Dispatch
from seqpar.serve.front.errors import Problem
from seqpar.serve.front.files import FileStore, FolderStore
from seqpar.serve.front.folder import JobFolder
from seqpar.serve.front.gate import is_loopback
from seqpar.serve.front.jobs import Queue, ServedJob
from seqpar.serve.front.keys import Keys, read_keys
from seqpar.serve.front.metrics import Metrics
from seqpar.serve.front.pictures import Pictures
from seqpar.serve.front.private import private_folder
from seqpar.serve.front.replica import Ended, Replica
from seqpar.serve.front.sharing import shared
from seqpar.serve.front.speeds import Speeds
from seqpar.serve.front.state import Front

ANSWERS_S = 5.0  # for answers to reach their clients at the end
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # they end the server
ENDING = Problem(503, "ending", "the server ends and takes no more requests; ask another one, or later")


class Server(uvicorn.Server):
    """uvicorn without handlers of signals: ours let running requests end first."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals as they are."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(WAITING)  # uvicorn's backlog is also how many connections asyncio accepts together


@dataclass(frozen=True)
class Assembly:
    """All that runs."""

    front: Front
    dispatch: Dispatch
    server: Server


async def run(args: ServeArgs, child: Sequence[str]) -> Ended:
    """Serve until a signal, or until the ranks cannot go on. ValueError for wrong flags, OSError for a port in use."""
    keys = None if args.keys is None else read_keys(args.keys)
    if keys is None and not is_loopback(args.host):
        raise ValueError(f"got --host {args.host} without --keys, expected keys where other machines can ask; add them")
    allow_files(args.connections)
    jobs = None if args.jobs is None else JobFolder(args.jobs)
    if jobs is not None:
        jobs.open()
    stop = _stopped_by_signals()  # from here on no signal ends this process before its folder is removed
    with private_folder() as (folder, lock), listening(args.host, args.port) as listener:
        log.start()
        host, port = listener.getsockname()[:2]
        log.event("listening", host=host, port=port, models=args.models)
        parts = _put_together(args, keys, child, folder, lock, jobs)
        try:
            async with shared(parts.front) as tasks:
                return await _serve(parts, listener, args.grace_s, stop, tasks)
        finally:
            parts.dispatch.pictures.close()


def _stopped_by_signals() -> asyncio.Event:
    """Return what is set by a signal that ends the server; one that is ignored, as by nohup, stays ignored."""
    stop = asyncio.Event()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _put_together(
    args: ServeArgs, keys: Keys | None, child: Sequence[str], folder: Path, lock: int, jobs: JobFolder | None
) -> Assembly:
    speeds = Speeds()

    def ended(job: ServedJob) -> None:
        end = job.state if job.problem is None else job.problem.code
        metrics.ends.labels(end).inc()
        order = job.wanted.order
        told = {"request": job.id, "model": order.model, "pictures": job.wanted.count, "steps": job.wanted.steps}
        job.span.end(None if job.problem is None else end, **told, state=job.state)
        log.event("ended", job.id, state=job.state, code=None if job.problem is None else job.problem.code)

    pictures = Pictures(folder)
    queue = Queue(args.queue, args.keep_s, speeds, ended)
    replica = Replica(child, folder, lock, args.restarts, lambda: metrics.restarts.inc())
    metrics = Metrics(lambda: queue.length, lambda: replica.memory)
    kept = args.keep_s, args.keep_bytes
    files = FolderStore(jobs, *kept) if jobs else FileStore(*kept)
    dispatch = Dispatch(queue, replica, pictures, files, speeds, metrics, args.stuck_s)
    about = args.deadline_s, args.video_deadline_s, args.keep_s, args.show_prompts, int(time.time()), jobs
    front = Front(queue, replica, files, pictures, metrics, *about)
    return Assembly(
        front, dispatch, http_server(create_app(front, keys, frozenset({args.host})), Connections(args.connections))
    )


def http_server(app: ASGIApp, connections: Connections) -> Server:
    """Return the server of an application, which listens when it is started."""
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
        timeout_graceful_shutdown=int(ANSWERS_S),
    )
    return Server(config)


async def _serve(
    parts: Assembly, listener: socket.socket, grace_s: float, stop: asyncio.Event, others: Sequence[asyncio.Task[None]]
) -> Ended:
    """Run all tasks until the first ends or a signal comes; then end what runs in order. others: that go on."""
    keeper = asyncio.create_task(parts.front.replica.keep())
    server = asyncio.create_task(parts.server.serve([listener]))
    orders, stopped = asyncio.create_task(parts.dispatch.forever()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([keeper, server, orders, stopped, *others], return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            log.event("ending", grace_s=grace_s)
            await _drained(parts.front.queue, grace_s)
    finally:
        parts.front.queue.close(ENDING, also_running=True)
        await parts.front.replica.finish(keeper)
        parts.server.should_exit = True
        await server
        stopped.cancel()
        orders.cancel()
    await asyncio.wait([orders])
    if not orders.cancelled():
        orders.result()  # raises what ended it: a bug, whose traceback ends this process
    return keeper.result()


async def _drained(queue: Queue, grace_s: float) -> None:
    """Take no more requests, and wait until those that run have ended, or for the time they are given."""
    queue.close(ENDING, also_running=False)
    if running := [asyncio.create_task(job.done.wait()) for job in queue.active]:
        await asyncio.wait(running, timeout=grace_s)
