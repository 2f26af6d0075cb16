"""The ranks as the API server sees them: a child process with one connection, restarted when it ends.

The child gets the path of a Unix socket in the server's private folder, and connects to it once.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import socket
import stat
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from seqpar.serve.api import log
from seqpar.serve.messages import (
    HEAD,
    SOCKET,
    Alive,
    Answer,
    Cancel,
    Change,
    Changed,
    Failed,
    Finish,
    ImageRequest,
    ImageResult,
    Partial,
    Ready,
    ServedModel,
    Step,
    ToRanks,
    ToServer,
    VideoResult,
    length,
    packed,
)

STARTER = "SEQPAR_STARTER"  # environment of the child: the process with which it exits
WITHIN_S = 600.0  # seconds in which too many exits of children stop the server
LEAVE_S = 7.0  # for a child to exit, and from SIGTERM to SIGKILL: it gives its own ranks 5 s
IDLE_LEAVE_S = 2.0  # for a child without a request, before SIGTERM
OUTPUT_S = 1.0  # for the output of a child that has exited to be read
TAIL, LONGEST_LINE = 20, 1 << 16  # lines of a child's output that are kept, and bytes of one
PREFIX, LOCK = "seqpar-serve-", ".seqpar-serve.lock"


@contextmanager
def private_folder() -> Iterator[tuple[Path, int]]:
    """Make a folder of mode 0700 for the socket, files of the ranks and decoded pixels.

    Yields it and its locked file, with which a child keeps the folder while it lives. The folder is removed at the end,
    and at the start the folders of servers that were killed: those without a lock, because a process id may belong to
    another process by now.
    """
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        _remove_if_abandoned(lock)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        new = folder / f"{LOCK}.new"
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            new.rename(folder / LOCK)  # so that no lock is ever seen that is not held yet
            yield folder, file
        finally:
            os.close(file)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_if_abandoned(lock: Path) -> None:
    """Remove the folder of a lock, if it is this user's and no living process holds the lock."""
    try:
        about = lock.parent.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
            return
        file = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # it was just removed
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(lock.parent, ignore_errors=True)
    finally:
        os.close(file)


@dataclass(frozen=True)
class Ended:
    """Why no child is started again: the exit code of the server, and a message for people."""

    code: int
    text: str


class RanksEndedError(Exception):
    """The ranks exited during a request."""


@dataclass(frozen=True)
class Running:
    """The request that the ranks run. on_message: called with messages before the answer."""

    request: ImageRequest | Change
    answer: asyncio.Future[Answer | Changed]
    on_message: Callable[[Step | Partial], None]


class Replica:
    """The child and its connection. lock: a file that the child holds. on_restart: called when it is started again.

    command: the child's; words after it name the models to load, if others were loaded before. turn: held during a
    request to the ranks, which run one at a time. most: ends of children within WITHIN_S that stop the server. The
    second end by one image does not count, so that as many requests as `most` are needed to end a server.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, lock: int, most: int, on_restart: Callable[[], None]
    ) -> None:
        self._command, self._path, self._lock = command, folder / "ranks", lock
        self._most, self._on_restart = most, on_restart
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._running: Running | None = None
        self._during: str | None = None  # the image without an answer, in whichever attempt
        self._finishing = False
        self._tail: deque[str] = deque(maxlen=TAIL)
        self.ready, self.turn = asyncio.Event(), asyncio.Lock()
        self.facts: Ready | None = None  # of the last ranks that were ready
        self.memory: tuple[int, ...] = ()

    async def supervise(self) -> Ended:
        """Run the child, and start it again when it ends; return when that must not go on."""
        loop, ends, blamed = asyncio.get_running_loop(), deque[float](maxlen=self._most), None
        while True:
            code = await self._run_child()
            if self._finishing:
                return Ended(0, "the server has ended")
            if self.facts is None:
                errors = [line for line in self._tail if line.startswith("error:")]
                unknown = f"error: the ranks exited with code {code} before they were ready"
                return Ended(code or 1, errors[-1] if errors else unknown)
            before, blamed = blamed, self._during
            if blamed is None or blamed != before:  # an image that ends ranks twice counts once
                ends.append(loop.time())
            if len(ends) == self._most and ends[-1] - ends[0] < WITHIN_S:
                return Ended(1, f"error: the ranks exited {self._most} times in {WITHIN_S / 60:g} minutes; see the log")
            log.event("restarting ranks", level=30, code=code)
            self._on_restart()

    def model(self, name: str) -> ServedModel | None:
        """A model that the ranks know."""
        return next((model for model in self.facts.models if model.name == name), None) if self.facts else None

    def swap_s(self, name: str) -> float:
        """Predicted seconds until a model is loaded, 0 if it is: of its last load, or the longest of other models."""
        model = self.model(name)
        if model is None or model.loaded or self.facts is None:
            return 0.0
        return model.load_s or max((other.load_s or 0.0 for other in self.facts.models), default=0.0)

    async def run(self, request: ImageRequest, on_message: Callable[[Step | Partial], None]) -> Answer:
        """Run a request; the caller has the turn, and the ranks are ready. Raises RanksEndedError."""
        answer = await self._ask(request, on_message)
        assert not isinstance(answer, Changed)
        return answer

    async def change(self, change: Change) -> Failed | None:
        """Change the loaded models, as `run`; return why they are still those before, if they are."""
        answer = await self._ask(change, lambda message: None)
        return answer if isinstance(answer, Failed) else None

    async def _ask(
        self, request: ImageRequest | Change, on_message: Callable[[Step | Partial], None]
    ) -> Answer | Changed:
        if not self.ready.is_set():  # they exited between a change and the request that needs it
            raise RanksEndedError
        running = Running(request, asyncio.get_running_loop().create_future(), on_message)
        self._running, self._during = running, request.id.rpartition("/")[0]
        self._send(request)
        try:
            answer = await running.answer
            self._during = None
            return answer
        finally:
            self._running = None

    def cancel(self, id_: str) -> None:
        """Cancel a request on the ranks; its answer still comes."""
        self._send(Cancel(id_))

    def terminate(self) -> None:
        """End a child that does not respond; another one is started."""
        self._disconnect()

    async def finish(self, supervisor: asyncio.Task[Ended]) -> None:
        """Let the ranks exit after the running request, and kill what is left. supervisor: the task of `supervise`."""
        self._finishing = True
        if supervisor.done():
            return
        self._send(Finish())
        if self._writer is None:  # it loads, and reads no message
            self._signal(signal.SIGTERM)
        await asyncio.wait([supervisor], timeout=IDLE_LEAVE_S if self._running is None else LEAVE_S)
        for number in (signal.SIGTERM, signal.SIGKILL):  # after SIGTERM it ends all of its ranks, also stopped ones
            if not supervisor.done():
                self._signal(number)
                await asyncio.wait([supervisor], timeout=LEAVE_S)
        await asyncio.wait([supervisor])

    async def _run_child(self) -> int:
        """Run one child until it or its connection ends; return its exit code, 128 + n for signal n."""
        self._path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._path))
            listener.listen(1)
            listener.setblocking(False)
            pipe = asyncio.subprocess.PIPE
            loaded = [model.name for model in self.facts.models if model.loaded] if self.facts else []
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command,
                *(["--first", *loaded] if self.facts else []),
                env={**os.environ, SOCKET: str(self._path), STARTER: str(os.getpid())},
                pass_fds=(self._lock,),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,  # its own process group, which Ctrl-C in a terminal does not reach
            )
            log.event("ranks started", process=process.pid, state="loading models; /ready is 503 until they run")
            pumps = [asyncio.create_task(self._log_output(pipe)) for pipe in (process.stdout, process.stderr) if pipe]
            talk, exited = asyncio.create_task(self._talk(listener)), asyncio.create_task(process.wait())
            try:
                await asyncio.wait([talk, exited], return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait([talk], timeout=OUTPUT_S if exited.done() else None)
            finally:
                self._disconnect()
                await self._end_group(exited)
                await asyncio.wait(pumps, timeout=OUTPUT_S)
                for task in (talk, exited, *pumps):
                    task.cancel()
        code = process.returncode or 0
        return code if code >= 0 else 128 - code

    async def _talk(self, listener: socket.socket) -> None:
        """Accept the child's connection, and handle its messages until it disconnects or sends a malformed one."""
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        listener.close()
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        try:
            while True:
                head = await reader.readexactly(HEAD)
                body = await reader.readexactly(length(head))
                self._handle(msgspec.msgpack.decode(body, type=ToServer))
        except (asyncio.IncompleteReadError, ConnectionError):
            log.event("ranks disconnected", self._job_id)
        except (ValueError, msgspec.MsgspecError) as error:
            log.event("malformed message from ranks, terminating them", self._job_id, level=40, error=str(error))

    def _handle(self, message: ToServer) -> None:
        running = self._running
        match message:
            case Ready():
                self.facts = message
                self.ready.set()
                log.event("ready", ranks=message.ranks, device=message.device, loaded_s=message.loaded_s)
            case Alive():
                self.memory = message.memory
            case Step() | Partial() if running is not None and running.request.id == message.id:
                running.on_message(message)
            case ImageResult() | VideoResult() | Failed() | Changed() if running and running.request.id == message.id:
                if isinstance(message, Changed):
                    self.facts = message.ready
                self.memory = getattr(message, "memory", ()) or self.memory
                if not running.answer.done():
                    running.answer.set_result(message)
            case _:
                log.event("unexpected message from ranks", message.id, level=30)

    def _send(self, message: ToRanks) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(packed(message))

    def _disconnect(self) -> None:
        """Close the connection; the running request has no answer."""
        self.ready.clear()
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        if self._running is not None and not self._running.answer.done():
            self._running.answer.set_exception(RanksEndedError())

    async def _end_group(self, exited: asyncio.Task[int]) -> None:
        """See that the child exits, with all processes of its group: on its own, by SIGTERM, or by SIGKILL.

        A child whose ranks fail reports why and ends them, for which it needs time. Without its connection it exits.
        """
        await asyncio.wait([exited], timeout=LEAVE_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._signal(number)
            await asyncio.wait([exited], timeout=LEAVE_S)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):  # nothing of the group is left
                os.killpg(self._process.pid, number)

    async def _log_output(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(LONGEST_LINE):
            *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
            if len(rest) > LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            self._log_lines(lines)
        self._log_lines([rest])

    def _log_lines(self, lines: Sequence[bytes]) -> None:
        for line in (line.decode(errors="replace").rstrip() for line in lines if line.strip()):
            self._tail.append(line)
            log.event("ranks", self._job_id, line=line)

    @property
    def _job_id(self) -> str | None:
        return None if self._running is None else self._running.request.id.partition("/")[0]
