"""A pool of ranks that is spawned once per test run, because spawning ranks takes seconds.

On CPUs ranks are forked from a server that has already imported torch and diffusers. Each call runs one function as
`fn(rank, world, device, *args)` on the first `world` ranks, in a process group made for that world and kept while the
world stays the same. Results come back in rank order; the first error of a rank is raised here with its traceback.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

from seqpar.mesh.processes import close
from tests.support.garbage import SELDOM
from tests.support.server import server

KEPT = 1 << 30  # bytes of a GPU's memory that a process may keep for its next test
TIMEOUT_S = 60  # of one call: a rank that waits longer for the others fails
ALSO_S = 10  # in which others may fail, too, after one rank has: those that wait for it would do so for TIMEOUT_S


class RankError(AssertionError):
    """The traceback of a rank that failed."""


class Pool:
    """Ranks that run functions of test modules; a function must be importable by name."""

    def __init__(self, device: str) -> None:
        self.device = device  # "cuda" (one rank a GPU, NCCL) or "cpu" (gloo)
        # a process cannot use CUDA if its parent initialised it before the fork, as importing diffusers may do
        self._context: Any = multiprocessing.get_context("spawn") if device == "cuda" else server()
        self._ranks: list[tuple[Any, Connection]] = []
        self._world, self._groups = 0, 0
        self._stores: tempfile.TemporaryDirectory[str] | None = None

    def run(self, world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `fn` on each rank and return the results; a single rank is this process, which needs no group."""
        if world == 1:
            where = torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")
            return [_cpu(fn(0, 1, where, *args))]
        if self.device == "cuda" and world > torch.cuda.device_count():
            pytest.skip(f"needs {world} GPUs")
        while len(self._ranks) < world:
            self._ranks.append(self._spawn(len(self._ranks)))
        if world != self._world:
            self._leave()
            self._world, self._groups = world, self._groups + 1
        self._stores = self._stores or tempfile.TemporaryDirectory(prefix="seqpar-test-")
        store = os.path.join(self._stores.name, str(self._groups))
        answers = self._ask(world, _pack((fn.__module__, fn.__qualname__, world, store, args)))
        if failed := [text for ok, text in answers if not ok]:
            self.close()  # the other ranks may wait for the failed one forever
            raise RankError("\n".join(failed))
        return [value for _, value in answers]

    def close(self) -> None:
        """End all ranks and remove the files of their rendezvous."""
        for process, _ in self._ranks:
            process.kill()
            process.join()
        self._ranks, self._world = [], 0
        if self._stores is not None:
            self._stores.cleanup()
            self._stores = None

    def _leave(self) -> None:
        """End the old process group on all ranks at once, because NCCL waits for missing ranks."""
        if failed := [text for ok, text in self._ask(len(self._ranks), _pack(None)) if not ok]:
            self.close()
            raise RankError("\n".join(failed))

    def _spawn(self, rank: int) -> tuple[Any, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(rank, self.device, there), daemon=True)
        process.start()
        there.close()
        return process, here

    def _ask(self, world: int, question: bytes) -> list[tuple[bool, Any]]:
        try:
            for _, pipe in self._ranks[:world]:
                pipe.send_bytes(question)
        except BrokenPipeError:
            return [(False, "a rank died before it was asked")]
        answers = dict[int, tuple[bool, Any]]()
        end = time.monotonic() + TIMEOUT_S + 30
        while waiting := {self._ranks[rank][1]: rank for rank in range(world) if rank not in answers}:
            ready = wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe, rank in waiting.items():
                if pipe in ready:
                    answers[rank] = self._answer(rank)
                    end = end if answers[rank][0] else min(end, time.monotonic() + ALSO_S)
        return [answers.get(rank, (False, f"rank {rank} did not answer in time")) for rank in range(world)]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        try:
            return _unpack(self._ranks[rank][1].recv_bytes())
        except EOFError:
            return False, f"rank {rank} died"


@cache
def quicken() -> None:
    """Make the interpreter of kernels faster in this process and its forks."""
    from tests.support.interpreter import keep_language, keep_types  # Triton must load after its variable is set

    keep_language()
    keep_types()


def share_device() -> None:
    """Let all groups of this process have one device of gloo, because each one has a thread that looks for work."""
    gloo: Any = dist.ProcessGroupGloo
    own, devices = gloo.__init__, [gloo.create_default_device()]

    def init(self: Any, store: Any, rank: int, size: int, timeout: timedelta, **new: bool) -> None:  # of torch 2.15
        options = gloo._Options()
        options._devices, options._timeout = devices, timeout
        own(self, store, rank, size, options)

    gloo.__init__ = init


def _serve(rank: int, device: str, pipe: Connection) -> None:
    torch.set_num_threads(1)  # ranks share the cores
    gc.freeze()  # what was imported is no garbage, and need not be looked through
    gc.set_threshold(*SELDOM)
    where = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(where)
    else:
        quicken()
        share_device()
    joined = ""
    while True:
        question = _unpack(pipe.recv_bytes())
        if question is None:
            joined = _leave_group()
            pipe.send_bytes(_pack((True, None)))
            continue
        module, name, world, store, args = question
        try:
            if joined != store:
                joined = _join(rank, world, device, store)
            function = getattr(__import__(module, fromlist=[name]), name)
            answer = True, function(rank, world, where, *args)
        except BaseException:
            answer = False, f"rank {rank} of {world}:\n{traceback.format_exc()}"
        give_back()
        pipe.send_bytes(_pack(answer))


def give_back() -> None:
    """Give back a GPU's memory that no tensor of this process uses any more, because other processes need it."""
    if torch.cuda.memory_reserved() > KEPT:
        torch.cuda.empty_cache()


def _leave_group() -> str:
    """End the process group. Meshes that are kept would keep its threads, which look for work all the time."""
    if "tests.support.meshes" in sys.modules:
        sys.modules["tests.support.meshes"].forget()
    close()
    return ""


def _join(rank: int, world: int, device: str, store: str) -> str:
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S)
    )
    return store


def _cpu(value: Any) -> Any:
    return _unpack(_pack(value))


def _pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False, map_location="cpu")
