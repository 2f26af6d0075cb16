"""Starts a job from a process that has already imported torch and diffusers; the job is otherwise what a user starts.

The starter of the ranks (`seqpar.cli.ranks`) is forked from the server of the pool of ranks, and
it forks its ranks instead of starting new Pythons, which saves some ten seconds of CPU time a job. All else is real:
sessions, process ids, signals, exit codes, pipes, environment, sockets, shared memory.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from launch.benches.fault_job import Job, Started


class Forked:
    """A forked rank, as the part of `subprocess.Popen` that the starter uses."""

    def __init__(self, words: tuple[str, ...], env: dict[str, str], start_new_session: bool) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _become(words[words.index("-m") + 2 :], env)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the exit code, or raise what the starter expects."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked rank", timeout)
            time.sleep(0.01)
        return code


class Starter:
    """The process that starts the ranks, as `launch.benches.fault_job` watches it."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None."""
        return self._process.exitcode


def forked(job: Job) -> Started:
    """Start `seqpar WORDS` with its ranks; `fault_job.by_command` does the same with new Pythons.

    The server must run (`tests.support.pool.server`), because threads call this.
    """
    process = multiprocessing.get_context("forkserver").Process(target=_start, args=(job,))
    process.start()
    return Starter(process)


def _start(job: Job) -> None:
    """Become the starter."""
    told = os.open(job.folder / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(told, 1)
    os.dup2(told, 2)
    setattr(subprocess, "Popen", Forked)  # noqa: B010
    _become(job.command(), {**os.environ, **job.settings()})


def _become(words: tuple[str, ...] | list[str], environment: dict[str, str]) -> None:
    """Run `launch.benches.planted WORDS` in this process and end it as Python would."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # the starter's handlers are not those of its ranks
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # as in a new Python: semaphores are unlinked at once
    tempfile.tempdir = None  # the folder of temporary files is the job's
    sys.argv = ["seqpar", *words]
    from launch.benches import planted

    code = 1
    try:
        planted.main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
