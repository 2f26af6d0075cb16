"""How the ranks of a server, and servers with them, end: real processes, whatever ends them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from seqpar.cli.entry import main
from seqpar.serve.messages import Alive, Failed, ImageRequest, ImageResult, ToServer, read
from tests.cli.processes import environment
from tests.support.driver import LIMIT_S, replica
from tests.support.forks import Forked
from tests.support.front import until
from tests.support.pool import server

pytestmark = [pytest.mark.slow, pytest.mark.whole]
CAT = ImageRequest("cat", "builtin", "cat", seed=3, steps=6)


def test_a_deadline_while_the_map_is_fitted_and_ranks_without_a_server(tmp_path: Path) -> None:
    """The next request fits it. Ranks exit on their own when the server disconnects."""
    with replica(tmp_path, 1, "builtin") as driver:
        answer = driver.ask(replace(CAT, deadline_s=0.0, partial_images=2))
        assert isinstance(answer, Failed)
        assert answer.why == "deadline"
        assert isinstance(driver.ask(replace(CAT, id="next", partial_images=2)), ImageResult)
        assert len(driver.partial["next"]) == 2
        driver.line.close()
        assert driver.process.wait(LIMIT_S) == 0


def test_idle_ranks_stay_alive_and_a_killed_one_ends_all(tmp_path: Path) -> None:
    """They wait for longer than the deadline of the host, which ends ranks without messages."""
    flags = "--host-deadline-s", "6", "--first-deadline-s", "6"  # on a busy machine ranks start seconds apart
    with replica(tmp_path, 2, "builtin", *flags) as driver:
        assert all(isinstance(read(driver.line, ToServer), Alive) for _ in range(4))
        assert isinstance(driver.ask(CAT), ImageResult)
        os.kill(driver.ranks()[1], signal.SIGKILL)
        begun = time.monotonic()
        assert driver.process.wait(LIMIT_S) == 128 + signal.SIGKILL
        assert "rank 1 was terminated by SIGKILL" in driver.errors
        assert time.monotonic() - begun < 30


def descendants(process: int) -> list[int]:
    children = map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
    return [pid for child in children for pid in (child, *descendants(child))]


def is_alive(process: int) -> bool:
    """Whether a process has not ended; one that nobody waits for may stay in the table."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("number", "ranks", "state", "forked"),
    [
        (signal.SIGTERM, 2, "ranks started", False),
        (signal.SIGTERM, 2, "ready", True),
        (signal.SIGKILL, 2, "ranks started", True),
        (signal.SIGKILL, 1, "ready", True),
    ],
)
def test_a_signal_to_an_idle_server_ends_all_within_seconds(
    tmp_path: Path, number: signal.Signals, ranks: int, state: str, forked: bool
) -> None:
    """Ranks that load do not read messages. After SIGKILL the server's folder stays, with a socket and a lock alone."""
    (tmp_path / "tmp").mkdir()
    words = ["serve", "builtin", "--ranks", str(ranks), "--port", "0"]
    own, log, processes = {**environment(), "TMPDIR": str(tmp_path / "tmp")}, tmp_path / "log", list[int]()
    log.touch()
    if forked:
        server()
        api = Forked(main, words, own, tmp_path / "output", log)
    else:
        with log.open("wb") as out:
            api = subprocess.Popen([sys.executable, "-m", "seqpar.cli", *words], stderr=out, env=own)
    try:
        until(lambda: f'"event": "{state}"' in log.read_text(), LIMIT_S)
        # the process that encodes images and Python's resource tracker, then the ranks: two have a starter
        count = 1 + (not forked) + ranks + (ranks > 1)
        until(lambda: len(descendants(api.pid)) == count, LIMIT_S)
        processes, begun = descendants(api.pid), time.monotonic()
        os.kill(api.pid, number)
        assert api.wait(LIMIT_S) == (0 if number == signal.SIGTERM else -number)
        until(lambda: not any(map(is_alive, processes)), LIMIT_S)
        assert time.monotonic() - begun < 25.0  # before a deadline of an exchange
    finally:
        if api.poll() is None:
            os.kill(api.pid, signal.SIGKILL)
            api.wait()
    left = {path.name for path in (tmp_path / "tmp").rglob("*") if "torchinductor" not in str(path)}
    assert {name for name in left if not name.startswith("seqpar-")} <= {".seqpar-serve.lock", "ranks"}
    assert len(left) == (0 if number == signal.SIGTERM else 3)


def test_a_rank_that_does_not_end_its_step_exits_without_a_server(tmp_path: Path) -> None:
    path = str(tmp_path / "front")
    work = "import threading\nfrom seqpar.serve.ranks import link\nlink.ALONE_S = 0.1\n"
    work += f"link.ServerLink({path!r})\nthreading.Event().wait()"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(1)
        with subprocess.Popen([sys.executable, "-c", work], env=environment()) as process:
            try:
                listening.settimeout(LIMIT_S)
                listening.accept()[0].close()
                assert process.wait(LIMIT_S) == 1
            finally:
                process.kill()
