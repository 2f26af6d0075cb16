"""An API server for tests: it starts the ranks, sends them requests, and keeps all their messages."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from seqpar.cli.main import main
from seqpar.serve.messages import (
    Answer,
    Cancel,
    Change,
    Changed,
    Failed,
    Finish,
    ImageRequest,
    Partial,
    Ready,
    Step,
    ToServer,
    packed,
    read,
)
from seqpar.serve.ranks.loop import SOCKET
from tests.cli.processes import environment
from tests.support.forks import Forked
from tests.support.front import until
from tests.support.pool import server

LIMIT_S = 90  # for a message: loading on a busy machine takes the longest


@dataclass
class Driver:
    """The connection with the ranks. steps, partial: by the request's id."""

    line: socket.socket
    process: Forked
    ready: Ready
    folder: Path
    steps: dict[str, list[int]] = field(default_factory=dict)
    partial: dict[str, list[Partial]] = field(default_factory=dict)

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    @property
    def errors(self) -> str:
        return (self.folder / "errors").read_text()

    def ask(self, order: ImageRequest, on_step: Callable[[Step], object] = lambda step: None) -> Answer | None:
        """The answer to a request; None if the ranks have exited."""
        self.line.sendall(packed(order))
        while (message := read(self.line, ToServer)) is not None:
            if isinstance(message, Answer):
                assert message.id == order.id
                return message
            if isinstance(message, Partial):
                self.partial.setdefault(message.id, []).append(message)
            if isinstance(message, Step):
                self.steps.setdefault(message.id, []).append(message.index)
                on_step(message)
        return None

    def change(self, *load: str, unload: tuple[str, ...] = ()) -> Changed | Failed | None:
        """The answer to a change of the loaded models; None if the ranks have exited."""
        self.line.sendall(packed(Change("change", load, unload)))
        while (message := read(self.line, ToServer)) is not None:
            if isinstance(message, Changed | Failed):
                return message
        return None

    def cancel_at(self, order: ImageRequest, index: int) -> Answer | None:
        """Cancel a request at one of its steps."""
        return self.ask(order, lambda step: step.index == index and self.line.sendall(packed(Cancel(order.id))))

    def finish(self) -> int | None:
        """Stop the ranks, and return the exit code."""
        self.line.sendall(packed(Finish()))
        return self.process.wait(LIMIT_S)

    def ranks(self) -> list[int]:
        """The process ids of the ranks, in their order."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return sorted(map(int, children))


@contextmanager
def replica(folder: Path, ranks: int, *words: str) -> Iterator[Driver]:
    """Start ranks with the models and flags `words`, and yield when they are ready; at the end none of them runs."""
    path = str(folder / "front")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(1)
        listening.setblocking(False)
        flags, errors = ["replica", *words, "--ranks", ranks], folder / "errors"
        server()
        process = Forked(main, flags, environment() | {SOCKET: path}, folder / "output", errors)
        try:
            until(lambda: process.poll() is not None or select.select([listening], [], [], 0)[0], LIMIT_S)
            assert process.poll() is None, errors.read_text()
            line, _ = listening.accept()
            line.settimeout(LIMIT_S)
            ready = read(line, ToServer)
            assert isinstance(ready, Ready), errors.read_text()
            with line:
                yield Driver(line, process, ready, folder)
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGTERM)
            process.wait(LIMIT_S)
