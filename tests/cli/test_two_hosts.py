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
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributed.run import main as agent

from seqpar.cli.main import sample
from tests.cli.processes import LIMIT_S, SCRIPT, environment, seqpar
from tests.support.forks import Forked
from tests.support.pool import server

pytestmark = pytest.mark.slow
CLONE_NEWUTS, NAME = 0x04000000, "SEQPAR_TEST_HOST"
USP = ("--strategy", "usp", "--mesh", "ring=2,ulysses=2")  # the ring is between the hosts
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
CAT = ("--model", "builtin", "--classes", "cat", "--seed", "3")


def hosted() -> None:
    """Run torchrun's agent with a hostname of its own, which its ranks inherit."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(os.environ[NAME])
    agent()


def sample_there() -> None:
    """Run one rank of `launch/sample.py`, which tells its host first."""
    print(f"rank {os.environ['RANK']} on {socket.gethostname()}", flush=True)
    sample()


@dataclass(frozen=True)
class Host:
    """A host's agent, and the files of what it and its ranks print."""

    process: Forked
    output: Path
    errors: Path


def rendezvous() -> int:
    """Return a free port for agents to meet, where they may have hostnames of their own."""
    if subprocess.run(("unshare", "--uts", "true"), check=False, capture_output=True).returncode:
        pytest.skip("a process may not have a hostname of its own here")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def two_hosts(folder: Path, ranks: int, *flags: object) -> Iterator[tuple[Host, Host]]:
    """Start `launch/sample.py` with so many ranks on each of two hosts."""
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


def with_gpu(number: int, words: tuple[str, ...], out: Path) -> subprocess.Popen[bytes]:
    """Start the agent of a host that has one GPU, which NCCL takes for one of another machine. out: of what it prints.

    It is no fork of the tests' server, which has looked for GPUs and found none.
    """
    own = environment(str(number)) | {"NCCL_HOSTID": f"host-{number}", "NCCL_DEBUG": "INFO"}
    own |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    host = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"host-{number}")
    with out.open("wb") as file:
        return subprocess.Popen((*host, *TORCHRUN, *words), env=own, stdout=file, stderr=subprocess.STDOUT)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("strategy", ["ulysses", "ring"])
def test_gpus_of_two_hosts_make_the_picture_of_one_hosts_gpus(tmp_path: Path, strategy: str) -> None:
    """Nobody names the transport: it must be the one that crosses hosts, and NCCL must have gone through sockets."""
    words = (SCRIPT, *CAT, "--steps", "20", "--strategy", strategy)
    words = (*words, "--mesh", f"{'ring' if strategy == 'ring' else 'ulysses'}=2", "--out")
    meets = ("--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={rendezvous()}")
    outs = [tmp_path / f"output{number}" for number in range(2)]
    agents = [
        with_gpu(number, (*meets, f"--node_rank={number}", *words, str(tmp_path / "two.png")), out)
        for number, out in enumerate(outs)
    ]
    try:
        assert [each.wait(LIMIT_S) for each in agents] == [0, 0], [out.read_text()[-2000:] for out in outs]
    finally:
        for each in agents:
            each.kill()
    told = outs[0].read_text()
    assert "via NET/Socket" in told, told
    assert not any(f"via {other}" in told for other in ("P2P", "SHM"))
    one = (*TORCHRUN, "--standalone", "--nproc_per_node=2", *words, str(tmp_path / "one.png"), "--transport")
    done = subprocess.run((*one, "collective"), env=environment("0,1"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert latents(told) == latents(done.stdout)
    assert np.array_equal(pixels(tmp_path / "two.png"), pixels(tmp_path / "one.png"))


def latents(told: str) -> str:
    """Return the digest of the latents that rank 0 prints."""
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
        pid = hosts[1].process.pid
        (rank,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        os.kill(rank, number)
        codes = [host.process.wait(LIMIT_S) for host in hosts]
    assert codes == [1, 1]
    told = hosts[0].errors.read_text()
    assert ("for rank 1" in told and "no sign of life" in told) == (number == signal.SIGKILL)
    assert ("\nstopped\n" in told) == (number == signal.SIGINT)
    assert not (tmp_path / "two.png").exists()
