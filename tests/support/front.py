"""An API server in its own process with fake ranks, on a free port, and its clients."""

from __future__ import annotations

import base64
import io
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
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import openai
from PIL import Image

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
# without certificates, which take long to read; the server closes connections that are idle for 5 s
HTTP: dict[str, Any] = {"verify": False, "timeout": LIMIT_S, "limits": httpx.Limits(keepalive_expiry=1.0)}
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 10, 3), np.uint8)
T = TypeVar("T")


def until(holds: Callable[[], T | None], limit_s: float = LIMIT_S) -> T:
    """The first true result of a function; TimeoutError after a long time."""
    end = time.monotonic() + limit_s
    while not (result := holds()):
        if time.monotonic() > end:
            raise TimeoutError("what the test waits for did not happen")
        time.sleep(0.02)
    return result


def file_of(pixels: np.ndarray = PIXELS, kind: str = "png") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def opened(file: str | bytes | None) -> Image.Image:
    """The image of a file, or of its base64 text."""
    return Image.open(io.BytesIO(base64.b64decode(file or "") if not isinstance(file, bytes) else file))


def keys_in(folder: Path, terms: str = "") -> str:
    """The path of a file with the keys of ada and bob. terms: of ada."""
    file = folder / "keys"
    file.write_text(f"# who may send requests\nada: key-of-ada {terms}\nbob: key-of-bob\n")
    file.chmod(0o600)
    return str(file)


@dataclass
class Running:
    """A running API server. lines: what it has written to stderr. folder: of its fake ranks."""

    process: subprocess.Popen[str]
    folder: Path
    lines: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None  # of stderr, alive as long as there may be more lines

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines[:] if line.startswith("{")]

    def event(self, name: str, **facts: Any) -> dict[str, Any]:
        """The first line of the log with this name and facts, as soon as it is written."""

        def written() -> dict[str, Any] | None:
            has_ended = self.reader is not None and not self.reader.is_alive()
            line = next((event for event in self.events if {**event, **facts, "event": name} == event), None)
            if line is None and has_ended:
                raise RuntimeError(f"the server has ended without {name}: {self.lines[-5:]}")
            return line

        return until(written)

    @cached_property
    def port(self) -> int:
        return self.event("listening")["port"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {key}"}, **HTTP)

    def openai(self, key: str, retries: int = 0) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(**HTTP)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=retries, http_client=http)

    @cached_property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, **HTTP)

    @cached_property
    def ai(self) -> openai.OpenAI:
        return self.openai("none")

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs, in order of arrival."""
        return self.http.get("/v1/jobs").json()["data"]

    @property
    def heard(self) -> list[dict[str, Any]]:
        """Messages to the ranks."""
        file = self.folder / "heard"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def orders(self) -> list[dict[str, Any]]:
        return [message for message in self.heard if message["type"] == "request"]

    @property
    def prompts(self) -> list[str]:
        return [order["prompt"] for order in self.orders]

    def release(self, name: str) -> None:
        """End the waiting of the prompt `hold NAME`."""
        (self.folder / name).touch()

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        return self.process.wait(LIMIT_S)


@contextmanager
def running(folder: Path, *words: str, wait: bool = True, fake: bool = True, before: str = "") -> Generator[Running]:
    """Start a server whose fake ranks use a folder; kill it at the end.

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
            front.event("ready")
        yield front
    finally:
        for name in {"http", "ai"} & vars(front).keys():
            getattr(front, name).close()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(LIMIT_S)
            finally:
                process.kill()
        reader.join(LIMIT_S)
        stderr.close()
