"""The server that a replica starts: a plain process, which ends when the replica does."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import httpx

# the kernel kills the server when the actor has died in whatever way; its ranks then end by themselves
BOUND = ("setpriv", "--pdeathsig", "KILL", "--")
POLL_S = 0.2  # between questions whether it is ready
LEAVE_S = 60.0  # from SIGTERM to SIGKILL; it has ended its jobs before
TAIL = 20  # lines that are kept


class Child:
    """A running server, as soon as it is ready; RuntimeError with its last words if it ends before."""

    def __init__(self, command: Sequence[str]) -> None:
        words = [*BOUND, *command]
        self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self._tail, self._listens = deque[str](maxlen=TAIL), threading.Event()
        self._port = 0
        threading.Thread(target=self._pump, daemon=True).start()
        while not self._is_ready():
            if self._process.poll() is not None:
                raise RuntimeError(self._last_words())
            time.sleep(POLL_S)

    @property
    def url(self) -> str:
        """Return where it listens."""
        return f"http://127.0.0.1:{self._port}"

    def check(self) -> None:
        """Raise RuntimeError if it has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(self._last_words())

    def end(self) -> None:
        """End it, if it has not ended."""
        self._process.terminate()
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _is_ready(self) -> bool:
        try:
            return self._listens.is_set() and httpx.get(f"{self.url}/ready", trust_env=False).is_success
        except httpx.TransportError:  # it is about to end, or very busy
            return False

    def _pump(self) -> None:
        """Hand its log on, and note where it listens."""
        for line in self._lines():
            print(line, end="", file=sys.stderr, flush=True)
            self._tail.append(line.rstrip())
            if not self._listens.is_set() and line.startswith("{") and json.loads(line)["event"] == "listening":
                self._port = json.loads(line)["port"]
                self._listens.set()

    def _lines(self) -> Iterator[str]:
        return iter(self._process.stderr or ())

    def _last_words(self) -> str:
        errors = [line for line in self._tail if line.startswith("error:")]
        return errors[-1] if errors else f"error: the server ended with exit code {self._process.poll()}; see its log"
