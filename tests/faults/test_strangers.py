"""Other processes that reach a job: what they send runs nothing, and the job goes on or ends with one message.

The ranks are forked from a process that has imported torch, with the environment and the store that torchrun's agent
gives; `test_messages.py` tries each kind of message, and `tests/cli/test_doors.py` the ranks that `seqpar` starts.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from seqpar.cli.exits import guarded
from seqpar.mesh.errors import SMALL, VALUE, padded
from seqpar.mesh.mesh import Mesh, gathered
from seqpar.mesh.watch import Deadlines
from tests.mesh.test_messages import Bomb
from tests.support.meshes import comes
from tests.support.server import PRELOADED

KIND = tuple[int, float, list[str]]
ENDS_S = 60.0  # within which a job must end, on a busy machine too
SHORT = Deadlines(first_s=4.0, later_s=2.0, host_s=4.0)  # of a job that ends by them
LONG = Deadlines(first_s=ENDS_S, later_s=ENDS_S, host_s=ENDS_S)
CPU = torch.device("cpu")
TALKS_S = 1.5  # the ranks talk so long


def real(folder: Path, limits: Deadlines = LONG) -> None:
    """Be a rank that exchanges small values for some seconds."""

    def work(rank: int) -> None:
        mesh, end = Mesh.joined(CPU, deadlines=limits), time.monotonic() + TALKS_S
        while mesh.share(time.monotonic() < end, bool):
            mesh.on_all_ranks(lambda: None)
            assert mesh.collect((rank, 0.1, ["x"]), KIND) == [(0, 0.1, ["x"]), (1, 0.1, ["x"])]
        (folder / f"done {rank}").touch()

    guarded(work)


def impostor(folder: Path, message: bytes) -> None:
    """Join as a rank before the real one, and answer the first question with something else than a message."""
    mesh = Mesh.joined(CPU, deadlines=LONG)
    (folder / "joined").touch()
    with suppress(Exception):  # when the job ends
        mesh.share(None, bool)
        gathered(mesh.world, CPU, padded(message, SMALL), "strange")
        time.sleep(ENDS_S)


def scribbler(folder: Path, bomb: bytes) -> None:
    """Rewrite what the ranks have in the store, again and again."""
    port = int(os.environ["MASTER_PORT"])
    store: Any = dist.TCPStore("localhost", port, None, False, timedelta(seconds=10))  # pyright: ignore
    store = dist.PrefixStore("/worker/attempt_0", store)  # pyright: ignore[reportPrivateImportUsage]
    values = (bomb, b"", b"[" * 10000, b"\xff" * 100, b'{"beat": "x", "left": 1, "begun": []}', b"{}")
    with suppress(Exception):  # when the job ends
        for count in range(10**9):
            for rank in (0, 1):
                store.set(f"seqpar/heartbeat/{rank}", values[count % len(values)])
                store.set(f"seqpar/started/0/{rank}", values[count % len(values)])
                if count % 7 == 0:
                    store.delete_key(f"seqpar/heartbeat/{rank}")
            time.sleep(0.01)


def _forked(folder: Path, name: str, rank: int, port: int, work: Callable[..., None], *args: object) -> None:
    """Become a process of a job; its messages go to a file."""
    told = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(told, 1)
    os.dup2(told, 2)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({each: str(value) for each, value in place.items()})
    os.environ.update({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"})
    work(folder, *args)


class Job:
    """Processes around a store of torchrun's kind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._store: Any = dist.TCPStore("localhost", 0, None, True, timedelta(seconds=60), False)  # pyright: ignore
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self.processes: dict[str, Any] = {}

    def start(self, name: str, rank: int, work: Callable[..., None], *args: object) -> None:
        words = (self.folder, name, rank, self._store.port, work, *args)
        self.processes[name] = self._context.Process(target=_forked, args=words, daemon=True)
        self.processes[name].start()

    def ended(self, name: str) -> tuple[int | None, list[str]]:
        """Return the exit code of a process and its lines; None if it hangs."""
        self.processes[name].join(ENDS_S)
        return self.processes[name].exitcode, (self.folder / name).read_text().splitlines()

    def wait_for(self, name: str) -> None:
        assert comes(self.folder / name, ENDS_S), name


@contextmanager
def jobs(folder: Path, *names: str) -> Iterator[dict[str, Job]]:
    """Yield jobs with a folder each, and end what is left of them."""
    made = {name: Job(folder / name) for name in names}
    for job in made.values():
        job.folder.mkdir()
    try:
        yield made
    finally:
        for process in (each for job in made.values() for each in job.processes.values()):
            process.kill()
            process.join()


def test_an_impostor_that_joins_first_ends_the_job_with_one_message_and_runs_nothing(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    bomb = pickle.dumps(Bomb(canary))
    messages = {
        "pickle": bomb,
        "pickle as a value": VALUE + bomb,
        "promised": VALUE + bytes(2 * SMALL),  # longer than one exchange, and the rest never comes
        "other": VALUE + b"\x05",
    }
    with jobs(tmp_path, *messages) as every:
        for name, job in every.items():
            job.start("impostor", 1, impostor, messages[name])
            job.start("rank 0", 0, real, SHORT if name == "promised" else LONG)
        for job in every.values():
            job.wait_for("joined")
            job.start("rank 1", 1, real)  # too late: its place is taken
        for name, job in every.items():
            code, lines = job.ended("rank 0")
            assert code == 1, (name, lines)
            (line,) = lines
            if name == "promised":
                assert re.search(r"waiting for (rank 1|one of ranks \[0, 1\]) \(small values of all ranks\)", line)
            else:
                assert line.startswith("error: malformed message from rank 1 (small values of all ranks): not a "), name
                assert "another process took the place of a rank (docs/reliability.md)" in line
            assert not list(job.folder.glob("done *"))
    assert not canary.exists()


def test_a_stranger_that_rewrites_the_store_does_not_disturb_ranks_that_have_met(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    with jobs(tmp_path, "job") as every:
        job = every["job"]
        for rank in (0, 1):
            job.start(f"rank {rank}", rank, real)
        job.start("scribbler", 9, scribbler, pickle.dumps(Bomb(canary)))
        for rank in (0, 1):
            assert job.ended(f"rank {rank}") == (0, [])
        assert {path.name for path in job.folder.glob("done *")} == {"done 0", "done 1"}
    assert not canary.exists()
