"""Two nodes of Ray on addresses of this machine alone, for tests: started, given an application, and looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
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
    """Return the process id of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def processes(begin: str) -> list[int]:
    """Return the processes whose command line begins with a text."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().replace(b"\0", b" ").decode(errors="replace").startswith(begin):
                found.append(int(path.parent.name))
        except FileNotFoundError:  # it has ended
            continue
    return sorted(found)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    return [int(each) for path in Path(f"/proc/{pid}/task").glob("*/children") for each in path.read_text().split()]


def tree(pid: int) -> list[int]:
    """Return a process and all that it, and they, have started."""
    return [pid, *(each for child in children(pid) for each in tree(child))]


@dataclass
class Nodes:
    """Two nodes. raylets: their process ids. url: where requests go."""

    process: subprocess.Popen[str]
    address: str
    raylets: list[int]
    folder: Path
    variables: Mapping[str, str]
    port: int

    @property
    def url(self) -> str:
        """Return where the ingress answers."""
        return f"http://127.0.0.1:{self.port}"

    def http(self) -> httpx.Client:
        """Return a client."""
        return httpx.Client(base_url=self.url, timeout=LIMIT_S)

    def states(self) -> dict[str, dict[str, int]]:
        """Return how many replicas of each deployment are in which state."""
        return self._say("states")

    def deploy(self, config: dict[str, Any]) -> None:
        """Deploy what a config file says."""
        file = self.folder / "serve.json"  # which is YAML, too
        file.write_text(json.dumps(config))
        self._say(str(file))

    def running(self, name: str, count: int) -> None:
        """Wait until an application has so many replicas that run, and nothing else exists."""
        expected = {f"{name}/Replica": {"RUNNING": count}, f"{name}/Ingress": {"RUNNING": 1}}
        until(lambda: self.states() == expected, START_S)

    def replicas(self, name: str) -> list[int]:
        """Return the process ids of an application's replicas on these nodes."""
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
            yield Nodes(process, **json.loads(first), folder=folder, variables=told, port=port)
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
