"""Runs a program in a process that is forked from one that has imported torch and diffusers already.

The process is a child of the server of the pool of ranks. If it starts ranks (`seqpar.cli.ranks`, torchrun's
agent, or `seqpar serve`), it forks them instead of starting new Pythons, which saves some ten seconds of CPU time a
job. All else is what a user starts: sessions, process ids, signals, exit codes, pipes, environment, sockets, shared
memory.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import FileIO, TextIOWrapper
from multiprocessing import process, resource_tracker
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

Main = Callable[[], object]


class ForkedRank:
    """A forked rank, or the starter of a server's ranks, as the part of `subprocess.Popen` that starters use."""

    def __init__(
        self,
        main: Main,
        args: tuple[str, ...],
        env: dict[str, str],
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        pass_fds: Sequence[int] = (),
        **_: object,
    ) -> None:
        self.stdin, self.returncode = None, None
        pipes = {number: os.pipe() for number, file in ((1, stdout), (2, stderr)) if file == subprocess.PIPE}
        self.pid = os.fork()
        if self.pid == 0:
            for number, file in enumerate((stdin, stdout, stderr)):
                if number in pipes:
                    os.dup2(pipes[number][1], number)
                elif file is not None:
                    os.dup2(os.open(os.devnull, os.O_RDWR) if file == subprocess.DEVNULL else file.fileno(), number)
            if pipes:  # the streams of a file seek, which a pipe cannot; these write at once, as `python -u`
                sys.stdout, sys.stderr = (
                    TextIOWrapper(FileIO(n, "w", closefd=False), write_through=True) for n in (1, 2)
                )
            _forget_the_starter(pass_fds)
            program = args.index("-m") + 1 if "-m" in args else args.index("-u") + 1
            _become(main, args[program + 1 :], env)
        for number in pipes:
            os.close(pipes[number][1])
        self.stdout, self.stderr = (FileIO(pipes[n][0]) if n in pipes else None for n in (1, 2))

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked rank", timeout)
            time.sleep(0.01)
        return code


class Forked:
    """A forked process, whose output goes to files. main: a function that pickle finds by its name.

    words: of its command line. environment: all of it. rank: what each rank runs that it starts, if that is not `main`.
    The server must run (`tests.support.pool.server`), because threads may start this.
    """

    def __init__(
        self,
        main: Main,
        words: Sequence[object],
        environment: Mapping[str, str],
        output: Path,
        errors: Path,
        rank: Main | None = None,
    ) -> None:
        given = main, tuple(map(str, words)), dict(environment), output, errors, rank or main
        self._process: Any = multiprocessing.get_context("forkserver").Process(target=_start, args=given)
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the exit code; a process that hangs is killed, and None returned."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            self._process.join()
        return code


def _start(
    main: Main, words: tuple[str, ...], environment: dict[str, str], output: Path, errors: Path, rank: Main
) -> None:
    for number, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    for module in (subprocess, subprocess_handler):
        setattr(module, "Popen", partial(ForkedRank, rank))  # noqa: B010
    _become(main, words, environment)


def _forget_the_starter(files: Sequence[int]) -> None:
    """Close all but the standard files, `files` and the tracker of semaphores, and forget what else a server has."""
    gc.freeze()  # an object of the starter that is freed would close another file of the same number
    tracker: Any = resource_tracker
    kept = {0, 1, 2, *files, tracker._resource_tracker._fd}
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        with suppress(OSError):  # that of the list itself
            os.close(number)
    signal.set_wakeup_fd(-1)  # else signals to this process would arrive at the server's event loop
    processes: Any = process
    processes._children.clear()  # Python would wait for them at its end


def _become(main: Main, words: Sequence[str], environment: dict[str, str]) -> None:
    """Run `main` with these words in this process and end it as Python would."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # the starter's handlers are not those of its ranks
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # as in a new Python: semaphores are unlinked at once
    tempfile.tempdir = None  # the environment names the folder of temporary files
    sys.argv = ["seqpar", *words]
    code = 1
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
