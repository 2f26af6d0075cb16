"""Tests of ranks on two hosts: two torchrun agents, each with a hostname of its own, by which hosts are told apart."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributed.run import main as agent

from seqpar.cli import main
from seqpar.cli.exits import guarded
from seqpar.cli.main import sample
from tests.cli.processes import LIMIT_S, SCRIPT, environment, ranks_of, seqpar
from tests.support.forks import Forked
from tests.support.pool import server

pytestmark = [pytest.mark.slow, pytest.mark.whole]
CLONE_NEWUTS, NAME = 0x04000000, "SEQPAR_TEST_HOST"
USP = ("--strategy", "usp", "--mesh", "ring=2,ulysses=2")  # the ring is between the hosts
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
MEETS = ("--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1")
CAT = ("--model", "builtin", "--classes", "cat", "--seed", "3")


def hosted() -> None:
    """Run torchrun's agent with a hostname of its own, which its ranks inherit."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(os.environ[NAME])
    agent()


def sample_there() -> None:
    """Run one rank of `launch/sample.py`, which tells its host first.

    After Ctrl-C it waits longer than usual for the end of a step, which takes seconds on a busy machine.
    """
    print(f"rank {os.environ['RANK']} on {socket.gethostname()}", flush=True)
    with patch.object(main, "guarded", partial(guarded, interrupted_s=LIMIT_S)):
        sample()


@dataclass(frozen=True)
class Host:
    process: Forked
    output: Path
    errors: Path


def rendezvous() -> int:
    if subprocess.run(("unshare", "--uts", "true"), check=False, capture_output=True).returncode:
        pytest.skip("a process may not have a hostname of its own here")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def two_hosts(folder: Path, ranks: int, *flags: object) -> Iterator[tuple[Host, Host]]:
    port, every = rendezvous(), list[Host]()
    server()
    for number in range(2):
        words = ("--nnodes=2", f"--nproc_per_node={ranks}", f"--node_rank={number}", "--master_addr=127.0.0.1")
        output, errors = folder / f"output{number}", folder / f"errors{number}"
        own = environment() | {NAME: f"host-{number}"}
        words = (*words, f"--master_port={port}", SCRIPT, *flags)
        errors.touch()
        every.append(Host(Forked(hosted, words, own, output, errors, sample_there), output, errors))
    try:
        yield every[0], every[1]
    finally:
        for each in every:
            each.process.wait(0)


@pytest.mark.parametrize(
    ("ranks", "flags", "same"),
    [
        (2, USP, (*USP, "--ranks", 4)),
        (1, ("--dtype", "fp64", "--strategy", "ulysses", "--mesh", "ulysses=2"), ("--ranks", 1, "--dtype", "fp64")),
    ],
    ids=["bits of one host's ranks", "picture of one rank"],
)
def test_a_picture_of_two_hosts_is_that_of_one(
    tmp_path: Path, ranks: int, flags: tuple[str, ...], same: tuple[object, ...]
) -> None:
    words = (*CAT, "--steps", 4)
    with two_hosts(tmp_path, ranks, *words, *flags, "--out", tmp_path / "two.png") as hosts:
        codes = [host.process.wait(LIMIT_S) for host in hosts]
        assert codes == [0, 0], [host.errors.read_text()[-2000:] for host in hosts]
    for number, host in enumerate(hosts):
        told = host.output.read_text()
        assert {f"rank {ranks * number + each} on host-{number}" for each in range(ranks)} <= set(told.splitlines())
    done = seqpar("sample", *words, *same, "--out", tmp_path / "one.png")
    assert done.returncode == 0, done.stderr
    assert np.array_equal(pixels(tmp_path / "two.png"), pixels(tmp_path / "one.png"))


def on_gpus(gpus: str, words: tuple[str, ...], out: Path, host: str | None = None) -> subprocess.Popen[bytes]:
    """Start torchrun with these GPUs. out: of what is printed. host: the name of one, which NCCL takes for a machine.

    It is no fork of the tests' server, which has looked for GPUs and found none.
    """
    own = environment(gpus) | {"NCCL_DEBUG": "INFO"}
    if host is not None:
        own |= {"NCCL_HOSTID": host, "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
        words = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host, *TORCHRUN, *words)
    else:
        words = (*TORCHRUN, "--standalone", *words)
    with out.open("wb") as file:
        return subprocess.Popen(words, env=own, stdout=file, stderr=subprocess.STDOUT)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("strategy", ["ulysses", "ring"])
def test_gpus_of_two_hosts_make_the_picture_of_one_hosts_gpus(tmp_path: Path, strategy: str) -> None:
    """Nobody names the transport: it must be the one that crosses hosts, and NCCL must have gone through sockets."""
    run = (SCRIPT, *CAT, "--steps", "20", "--strategy", strategy, "--mesh", f"{strategy}=2", "--out")
    outs, port = [tmp_path / name for name in ("host-0", "host-1", "one")], rendezvous()
    jobs = list[subprocess.Popen[bytes]]()
    for number in range(2):
        words = (*MEETS, f"--master_port={port}", f"--node_rank={number}", *run, str(tmp_path / "two.png"))
        jobs.append(on_gpus(str(number), words, outs[number], outs[number].name))
    words = ("--nproc_per_node=2", *run, str(tmp_path / "one.png"), "--transport", "collective")
    jobs.append(on_gpus("0,1", words, outs[2]))
    try:
        codes = [job.wait(LIMIT_S) for job in jobs]
    finally:
        for job in jobs:
            job.terminate()  # which ends its ranks
    two, _, one = (out.read_text() for out in outs)
    assert codes == [0, 0, 0], (two[-2000:], one[-2000:])
    assert "via NET/Socket" in two
    assert not any(f"via {other}" in two for other in ("P2P", "SHM"))
    assert "via NET/Socket" not in one
    assert latents(two) == latents(one)
    assert np.array_equal(pixels(tmp_path / "two.png"), pixels(tmp_path / "one.png"))


def latents(told: str) -> str:
    (found,) = re.findall(r"latents (\w{16})", told)
    return found


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_a_rank_that_ends_on_one_host_ends_the_job_on_both(tmp_path: Path, number: signal.Signals) -> None:
    """After Ctrl-C on its host all ranks end at one boundary; of a rank that was killed the others must find out."""
    with two_hosts(tmp_path, 1, *CAT, "--steps", 900, "--mesh", "ulysses=2", "--out", tmp_path / "two.png") as hosts:
        end = time.monotonic() + LIMIT_S
        while "step/s" not in hosts[0].errors.read_text():
            assert time.monotonic() < end, hosts[0].errors.read_text()[-2000:]
            time.sleep(0.05)
        (rank,) = ranks_of(hosts[1].process.pid)
        os.kill(rank, number)
        codes = [host.process.wait(LIMIT_S) for host in hosts]
    assert codes == [1, 1]
    told = hosts[0].errors.read_text()
    assert ("for rank 1" in told and "no heartbeat" in told) == (number == signal.SIGKILL)
    assert ("\nstopped\n" in told) == (number == signal.SIGINT)
    assert not (tmp_path / "two.png").exists()
