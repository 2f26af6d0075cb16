"""Workers of pytest-xdist on CPUs, forked from the server of ranks: torch, diffusers and tests are imported once.

Else each worker and each worker's server would import them, which takes some ten seconds of CPU time.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from types import ModuleType, SimpleNamespace
from typing import Any

from execnet.gateway_base import Popen2IO
from execnet.gateway_io import Popen2IOMaster

from tests.support.collected import FILES
from tests.support.server import server


def fork_workers(paths: Sequence[str]) -> None:
    """Let execnet fork the processes that it starts from now on. paths: pytest's arguments, the tests to run."""
    files = {number: os.dup(number) for number in (1, 2)}
    with open(os.devnull, "w") as nowhere:
        for number in files:  # what ranks print, as where pytest captures it, and Python's tracker of semaphores
            os.dup2(nowhere.fileno(), number)
    try:
        server("tests.support.collected", environment={FILES: json.dumps([*paths])})
    finally:
        for number, file in files.items():
            os.dup2(file, number)
            os.close(file)
    starter: Any = Popen2IOMaster
    starter.__init__ = _start


def _start(io: Any, args: object, execmodel: Any) -> None:
    """Start a worker, as `Popen2IOMaster.__init__` does, whose standard input and output are pipes."""
    (their_input, our_output), (our_input, their_output) = multiprocessing.Pipe(False), multiprocessing.Pipe(False)
    theirs = their_input, their_output, Connection(os.dup(2), readable=False)
    process = multiprocessing.get_context("forkserver").Process(target=_serve, args=theirs)
    process.start()
    for file in theirs:
        file.close()
    io.popen = SimpleNamespace(wait=process.join, kill=process.kill)
    output, inputs = os.fdopen(os.dup(our_output.fileno()), "wb", 0), os.fdopen(os.dup(our_input.fileno()), "rb", 0)
    Popen2IO.__init__(io, output, inputs, execmodel)


def _serve(*files: Connection) -> None:
    """Run what execnet sends, as `python -c` would: its first line is a program. files: standard ones."""
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
        file.close()
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.modules["__main__"] = main = ModuleType("__main__")
    its_server: Any = forkserver
    # this process's ranks come from the server of which it comes
    its_server.ensure_running = its_server._forkserver.ensure_running = lambda: None
    try:
        exec(eval(sys.stdin.readline()), vars(main))
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing leaves them out
