"""A front in a process of its own, before fake ranks: started on a free port, and asked by the clients of tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai

LIMIT_S = 60.0  # for what takes milliseconds unless the machine is busy
ROOT = Path(__file__).resolve().parents[2]
CHILD = [sys.executable, "-u", "-m", "tests.support.fake_replica"]
RUN = """
import sys
from seqpar.cli.signals import quick_exit
from seqpar.serve.api.command import main
code = main(sys.argv[1:], CHILD)
print("torch was loaded" if "torch" in sys.modules else "torch was not loaded", file=sys.stderr)
quick_exit(code)  # as the command does
"""


@dataclass
class Running:
    """A front that runs. lines: what it has written to stderr."""

    process: subprocess.Popen[str]
    folder: Path
    lines: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None  # of stderr, alive as long as there may be more lines

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return the log."""
        return [json.loads(line) for line in self.lines[:] if line.startswith("{")]

    def event(self, name: str, **facts: Any) -> dict[str, Any]:
        """Return the first line of the log of this name and facts, as soon as there is one."""

        def found() -> dict[str, Any] | None:
            has_ended = self.reader is not None and not self.reader.is_alive()
            line = next((each for each in self.events if {**each, **facts, "event": name} == each), None)
            if line is None and has_ended:
                raise RuntimeError(f"the front has ended without {name}: {self.lines[-5:]}")
            return line

        return until(found)

    @property
    def url(self) -> str:
        """Return where it listens."""
        return f"http://127.0.0.1:{self.event('listening')['port']}"

    def http(self, key: str | None = None) -> httpx.Client:
        """Return a client; the caller closes it. It speaks HTTP alone, and reads no certificates, which takes long."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=LIMIT_S, verify=False)

    def openai(self, key: str = "none", retries: int = 0) -> openai.OpenAI:
        """Return the client of OpenAI."""
        http = openai.DefaultHttpxClient(verify=False)  # as above
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=retries, timeout=LIMIT_S, http_client=http
        )

    @property
    def heard(self) -> list[dict[str, Any]]:
        """Return what the ranks have heard."""
        file = self.folder / "heard"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def prompts(self) -> list[str]:
        """Return the prompts of all orders that the ranks have heard."""
        return [each["prompt"] for each in self.heard if each["type"] == "request"]

    def end(self, number: int = signal.SIGTERM) -> int:
        """End the front by a signal and return its exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Return the exit code."""
        return self.process.wait(LIMIT_S)

    def ready(self) -> None:
        """Wait until the ranks are ready."""
        self.event("ready")


T = TypeVar("T")


def until(found: Callable[[], T | None], limit_s: float = LIMIT_S) -> T:
    """Return what a function returns, as soon as it is true; an error after a long time."""
    end = time.monotonic() + limit_s
    while not (result := found()):
        if time.monotonic() > end:
            raise TimeoutError("what the test waits for did not come")
        time.sleep(0.02)
    return result


@contextmanager
def running(folder: Path, *words: str, wait: bool = True, fake: bool = True, before: str = "") -> Generator[Running]:
    """Start a front whose fake ranks use a folder; kill it at the end.

    wait: until the ranks are ready. fake: False for real ranks of the models and flags in `words`. before: what the
    process runs first.
    """
    child = CHILD if fake else None
    command = [sys.executable, "-c", f"CHILD = {child!r}\n{before}\n{RUN}", "--port", "0", *words]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = {**os.environ, "PYTHONPATH": path, "FAKE_FOLDER": str(folder)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=variables)
    front = Running(process, folder)
    stderr = process.stderr
    assert stderr is not None
    reader = front.reader = threading.Thread(target=lambda: front.lines.extend(line.rstrip("\n") for line in stderr))
    reader.start()
    try:
        if wait:
            front.ready()
        yield front
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(LIMIT_S)
            finally:
                process.kill()
        reader.join(LIMIT_S)
        stderr.close()
