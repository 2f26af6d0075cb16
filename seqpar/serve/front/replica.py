"""The ranks as the front sees them: a child process, one connection from it, and a new child when one ends.

The child gets the path of a Unix socket in a folder that only this user can reach, and connects to it once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from seqpar.serve.front import log
from seqpar.serve.messages import (
    HEAD,
    Alive,
    Answer,
    Cancel,
    Failed,
    Finish,
    ImageRequest,
    ImageResult,
    Partial,
    Ready,
    Step,
    ToRanks,
    ToServer,
    VideoResult,
    length,
    packed,
)

SOCKET = "SEQPAR_SERVE"  # environment of the child: the path of the socket, beside which its files are
STARTER = "SEQPAR_STARTER"  # environment of the child: the process whose end ends it
WITHIN_S = 600.0  # seconds in which too many ends of children end the front
LEAVE_S = 7.0  # for a child to end, and from SIGTERM to SIGKILL: it gives its own ranks 5 s
IDLE_LEAVE_S = 2.0  # for a child without an order, before SIGTERM
LAST_WORDS_S = 1.0  # for what an ended child has written to be read
TAIL, LONGEST_LINE = 20, 1 << 16  # lines of a child's output that are kept, and bytes of one


@dataclass(frozen=True)
class Ended:
    """Why no child is started again: the exit code of the front, and a message for people."""

    code: int
    text: str


class RanksEndedError(Exception):
    """The ranks have ended while they made a picture."""


@dataclass(frozen=True)
class Running:
    """The order that is with the ranks. told is called with what they say before the answer."""

    order: ImageRequest
    answer: asyncio.Future[Answer]
    told: Callable[[Step | Partial], None]


class Replica:
    """The child and its connection. lock: a file that the child holds. most: ends of children in ten minutes that end
    the front.

    The second end by one picture does not count, so that it takes as many requests as `most` to end a front.

    on_restart is called when a child is started again.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, lock: int, most: int, on_restart: Callable[[], None]
    ) -> None:
        self._command, self._path, self._lock = command, folder / "ranks", lock
        self._most, self._on_restart = most, on_restart
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._running: Running | None = None
        self._during: str | None = None  # the picture whose order has no answer, whatever attempt it was
        self._finishing = False
        self._tail: deque[str] = deque(maxlen=TAIL)
        self.ready = asyncio.Event()
        self.known: Ready | None = None  # what the last ranks that were ready have loaded
        self.memory: tuple[int, ...] = ()

    async def keep(self) -> Ended:
        """Start the child, and start it again when it ends; return when that must not go on."""
        loop, ends, blamed = asyncio.get_running_loop(), deque[float](maxlen=self._most), None
        while True:
            code = await self._life()
            if self._finishing:
                return Ended(0, "the server has ended")
            if self.known is None:
                return Ended(code or 1, self._last_words(code))
            before, blamed = blamed, self._during
            if blamed is None or blamed != before:  # a request that ends ranks twice does so once, for this
                ends.append(loop.time())
            if len(ends) == self._most and ends[-1] - ends[0] < WITHIN_S:
                text = f"error: the ranks ended {self._most} times in {WITHIN_S / 60:g} minutes; see the log"
                return Ended(1, text)
            log.event("the ranks are started again", level=30, code=code)
            self._on_restart()

    async def run(self, order: ImageRequest, told: Callable[[Step | Partial], None]) -> Answer:
        """Send an order and return its answer. Raises RanksEndedError. The ranks must be ready and have no order."""
        running = Running(order, asyncio.get_running_loop().create_future(), told)
        self._running, self._during = running, order.id.rpartition("/")[0]
        self._send(order)
        try:
            answer = await running.answer
            self._during = None
            return answer
        finally:
            self._running = None

    def cancel(self, id_: str) -> None:
        """Ask the ranks to give an order up; its answer still comes."""
        self._send(Cancel(id_))

    def give_up(self) -> None:
        """End the child, which does not do what it is told; another one is started."""
        self._hang_up()

    async def finish(self, keeper: asyncio.Task[Ended]) -> None:
        """Let the ranks end after the running order, and kill what is left. keeper: the task of `keep`."""
        self._finishing = True
        if keeper.done():
            return
        self._send(Finish())
        if self._writer is None:  # it loads, and hears nothing
            self._signal(signal.SIGTERM)
        await asyncio.wait([keeper], timeout=IDLE_LEAVE_S if self._running is None else LEAVE_S)
        for number in (signal.SIGTERM, signal.SIGKILL):  # after SIGTERM it ends all of its ranks, also stopped ones
            if not keeper.done():
                self._signal(number)
                await asyncio.wait([keeper], timeout=LEAVE_S)
        await asyncio.wait([keeper])

    async def _life(self) -> int:
        """Run one child until it ends or its connection does; return its exit code, 128 + n for a signal n."""
        self._path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._path))
            listener.listen(1)
            listener.setblocking(False)
            process = self._process = await self._start()
            log.event("ranks started", process=process.pid)
            pumps = [asyncio.create_task(self._tell_lines(each)) for each in (process.stdout, process.stderr) if each]
            talk, ended = asyncio.create_task(self._talk(listener)), asyncio.create_task(process.wait())
            try:
                await asyncio.wait([talk, ended], return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait([talk], timeout=LAST_WORDS_S if ended.done() else None)
            finally:
                self._hang_up()
                await self._end_group(ended)
                await asyncio.wait(pumps, timeout=LAST_WORDS_S)
                for task in (talk, ended, *pumps):
                    task.cancel()
        code = process.returncode or 0
        return code if code >= 0 else 128 - code

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *self._command,
            env={**os.environ, SOCKET: str(self._path), STARTER: str(os.getpid())},
            pass_fds=(self._lock,),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,  # a group of its own, which Ctrl-C in a terminal does not reach
        )

    async def _talk(self, listener: socket.socket) -> None:
        """Accept the child's connection, and take its messages until it ends or sends what is none."""
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        listener.close()
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        try:
            while True:
                head = await reader.readexactly(HEAD)
                text = await reader.readexactly(length(head))
                self._take(msgspec.msgpack.decode(text, type=ToServer))
        except (asyncio.IncompleteReadError, ConnectionError):
            log.event("the connection to the ranks has ended", self._request)
        except (ValueError, msgspec.MsgspecError) as error:
            log.event("the ranks sent what is no message; they are ended", self._request, level=40, error=str(error))

    def _take(self, message: ToServer) -> None:
        running = self._running
        match message:
            case Ready():
                self.known = message
                self.ready.set()
                log.event("ready", ranks=message.ranks, device=message.device, loaded_s=message.loaded_s)
            case Alive():
                self.memory = message.memory
            case Step() | Partial() if running is not None and running.order.id == message.id:
                running.told(message)
            case ImageResult() | VideoResult() | Failed() if running is not None and running.order.id == message.id:
                self.memory = self.memory if isinstance(message, Failed) else message.memory or self.memory
                if not running.answer.done():
                    running.answer.set_result(message)
            case _:
                log.event("the ranks spoke of an order that is not theirs", message.id, level=30)

    def _send(self, message: ToRanks) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(packed(message))

    def _hang_up(self) -> None:
        """Close the connection; the order that ran has no answer."""
        self.ready.clear()
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        if self._running is not None and not self._running.answer.done():
            self._running.answer.set_exception(RanksEndedError())

    async def _end_group(self, ended: asyncio.Task[int]) -> None:
        """See that the child ends, with all processes of its group: of itself, by SIGTERM, or by SIGKILL.

        A child whose ranks fail tells why and ends them, for which it needs time. Without its connection it ends, too.
        """
        await asyncio.wait([ended], timeout=LEAVE_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._signal(number)
            await asyncio.wait([ended], timeout=LEAVE_S)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):  # nothing of the group is left
                os.killpg(self._process.pid, number)

    async def _tell_lines(self, stream: asyncio.StreamReader) -> None:
        """Log what the child prints, with the request that runs."""
        rest = b""
        while chunk := await stream.read(LONGEST_LINE):
            *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
            if len(rest) > LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            self._tell(lines)
        self._tell([rest])

    def _tell(self, lines: Sequence[bytes]) -> None:
        for line in (each.decode(errors="replace").rstrip() for each in lines if each.strip()):
            self._tail.append(line)
            log.event("ranks", self._request, line=line)

    @property
    def _request(self) -> str | None:
        return None if self._running is None else self._running.order.id.partition("/")[0]

    def _last_words(self, code: int) -> str:
        """Return what a child that was never ready has said of its end."""
        errors = [line for line in self._tail if line.startswith("error:")]
        return errors[-1] if errors else f"error: the ranks ended with exit code {code} before they were ready"
