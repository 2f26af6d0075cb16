"""A server that benches start and ask: `seqpar serve` as a child of the bench."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
LIMIT_S = 900.0


@contextmanager
def server(
    models: Sequence[str], ranks: int, words: Sequence[str]
) -> Iterator[tuple[subprocess.Popen[str], int, list[str]]]:
    """Start a server on ranks, on GPUs where the machine has them; yield process, port and the lines of its log.

    words: further flags. More lines are added to the log as they come; the last ones are printed if an error ends it.
    """
    count = ["--gpus" if torch.cuda.is_available() else "--ranks", str(ranks)]
    every = ["serve", *models, *count, "--port", "0", "--restarts", "1000", *words]
    process = started(every)
    lines, stderr = list[str](), process.stderr
    assert stderr is not None
    reader = threading.Thread(target=lambda: lines.extend(line.rstrip() for line in stderr), daemon=True)
    reader.start()
    try:
        yield process, _port(process, lines), lines
    except BaseException:
        print(*lines[-20:], sep="\n", file=sys.stderr, flush=True)
        raise
    finally:
        if process.poll() is None:
            process.kill()
        reader.join(10)
        stderr.close()


def started(words: Sequence[str]) -> subprocess.Popen[str]:
    """Start `seqpar WORDS`, with a pipe for its stderr."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-m", "seqpar.cli", *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)


def ended(words: Sequence[object]) -> subprocess.CompletedProcess[str]:
    """`seqpar WORDS` after its end, with its output."""
    command = [sys.executable, "-m", "seqpar.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _port(process: subprocess.Popen[str], lines: list[str]) -> int:
    while not (listening := [line for line in lines if '"event": "listening"' in line]):
        if process.poll() is not None:
            raise RuntimeError(f"got no server, but exit code {process.poll()}: {lines[-5:]}")
        time.sleep(0.1)
    return json.loads(listening[0])["port"]


def a_rank(front: int, drawn: random.Random) -> int | None:
    """The process of a rank, if the ranks are up: a child of the front's child that starts them; no other has any."""
    ranks = processes(front)
    return drawn.choice(ranks) if ranks else None


def processes(front: int) -> list[int]:
    """The processes of the ranks that an API server has started."""
    return [rank for child in _children(front) for rank in _children(child)]


def used(process: int) -> dict[str, int]:
    """Memory (MiB), open files and threads of a process."""
    folder = Path(f"/proc/{process}")
    pages = int((folder / "statm").read_text().split()[1])
    counts = {name: len([*(folder / part).iterdir()]) for name, part in (("files", "fd"), ("threads", "task"))}
    return {"memory": pages * os.sysconf("SC_PAGE_SIZE") >> 20, **counts}


def _children(process: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))
    except OSError:
        return []


def until_ready(port: int) -> None:
    end = time.monotonic() + LIMIT_S
    while status(port, "/ready") != 200:
        if time.monotonic() > end:
            raise RuntimeError(f"got a server that is not ready after {LIMIT_S} s")
        time.sleep(0.2)


def status(port: int, path: str) -> int:
    line = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        line.request("GET", path)
        return line.getresponse().status
    finally:
        line.close()


def text_of(port: int, path: str, method: str = "GET") -> str:
    line = HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        line.request(method, path)
        return line.getresponse().read().decode()
    finally:
        line.close()


def asked(port: int, body: dict[str, Any], kept: HTTPConnection | None = None) -> Any:
    """The answer to a request for pictures. Raises RuntimeError for anything but pictures.

    kept: a connection to use and leave open, in place of a new one.
    """
    line = kept or HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        line.request("POST", "/v1/images/generations", json.dumps(body), {"content-type": "application/json"})
        answer = line.getresponse()
        text = answer.read().decode()
    finally:
        if kept is None:
            line.close()
    if answer.status != 200:
        raise RuntimeError(f"got {answer.status} {text[:300]}, expected pictures")
    return json.loads(text)


def get(port: int, path: str, method: str = "GET") -> Any:
    return json.loads(text_of(port, path, method))
