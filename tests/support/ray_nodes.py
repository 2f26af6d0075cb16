"""Two nodes of Ray on addresses of this machine alone, their applications and their processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.front import LIMIT_S, ROOT, until

# a proxy of Serve that is not ready after five seconds is killed, which on a busy machine is each one
PATIENCE = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60"}
START_S = 150.0  # for replicas, each of which imports and loads, to run
REPLICA = "ray::ServeReplica:"  # how the command lines of Serve's replicas begin


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def processes(begin: str) -> list[int]:
    """The processes whose command line begins with a text."""
    pids: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError):  # it has ended
            if path.read_bytes().replace(b"\0", b" ").decode(errors="replace").startswith(begin):
                pids.append(int(path.parent.name))
    return sorted(pids)


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    children = [x for path in Path(f"/proc/{pid}/task").glob("*/children") for x in path.read_text().split()]
    return [pid, *(descendant for child in children for descendant in tree(int(child)))]


@dataclass
class Nodes:
    """Two nodes. raylets: their process ids. port: of the ingress."""

    process: subprocess.Popen[str]
    raylets: list[int]
    folder: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=LIMIT_S)

    def deploy(self, config: dict[str, Any]) -> None:
        file = self.folder / "serve.json"  # JSON is YAML, too
        file.write_text(json.dumps(config))
        self._say(str(file))

    def running(self, name: str, count: int) -> None:
        """Wait until an application has so many running replicas, and nothing else exists."""
        expected = {f"{name}/Replica": {"RUNNING": count}, f"{name}/Ingress": {"RUNNING": 1}}
        until(lambda: self._say("states") == expected, START_S)

    def replicas(self, name: str) -> list[int]:
        """The process ids of an application's replicas on these nodes."""
        return [pid for pid in processes(f"{REPLICA}{name}:Replica") if parent(pid) in self.raylets]

    def _say(self, line: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


@contextmanager
def two_nodes(folder: Path, port: int, **variables: str) -> Generator[Nodes]:
    """Start two nodes whose processes have some variables; at the end nothing of them runs."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    told = {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", **PATIENCE, **variables}
    words = [sys.executable, "-m", "tests.support.ray_cluster"]
    pipe = subprocess.PIPE
    with (folder / "ray.log").open("w") as log:
        process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=log, text=True, env=told)
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first, (folder / "ray.log").read_text()
            yield Nodes(process, **json.loads(first), folder=folder, port=port)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(LIMIT_S)
            finally:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
