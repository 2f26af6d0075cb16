"""Tests of a server's ranks: real processes with the built-in models, whose front is the test."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from seqpar.serve.messages import Answer, Failed, ImageRequest, ImageResult
from tests.cli.processes import environment, seqpar
from tests.support.driver import LIMIT_S, Driver, gone, replica
from tests.support.front import until

pytestmark = [pytest.mark.slow, pytest.mark.whole]
FROG = ImageRequest("frog", "builtin-text", "a green frog", seed=3, steps=6)
MANY = 900  # steps, which take many seconds
CAT = ImageRequest("cat", "builtin", "cat", seed=3, steps=6)


def named(order: ImageRequest, id: str, **changed: object) -> ImageRequest:
    """Return an order with another id and other fields."""
    return ImageRequest(**{**{name: getattr(order, name) for name in order.__struct_fields__}, "id": id, **changed})  # pyright: ignore


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """Return two ranks with both built-in models."""
    with replica(tmp_path_factory.mktemp("serve"), 2, "builtin", "builtin-text") as made:
        yield made
        assert made.finish() == 0


def picture(answer: Answer | None) -> np.ndarray:
    """Return the pixels of an answer, (height, width, 3)."""
    assert isinstance(answer, ImageResult), answer
    return np.frombuffer(answer.pixels, np.uint8).reshape(answer.height, answer.width, 3)


def test_what_is_loaded_is_told(driver: Driver) -> None:
    classes, texts = driver.ready.models
    assert (classes.name, classes.kind, classes.size) == ("builtin", "classes", (64, 64))
    assert "cat" in classes.classes
    assert (texts.name, texts.kind, texts.size) == ("builtin-text", "texts", (64, 64))
    assert classes.sizes[:3] == texts.sizes[:3] == ((64, 64), (56, 72), (72, 56))
    assert driver.ready.ranks == 2


def test_a_picture_has_the_bits_of_the_commands(driver: Driver, tmp_path: Path) -> None:
    """Height comes first; the command is given the same seed, size and steps."""
    mine = picture(driver.ask(named(FROG, "tall", size=(64, 48))))
    assert mine.shape == (64, 48, 3)
    file = tmp_path / "frog.png"
    words = ["--prompt", FROG.prompt, "--seed", "3", "--steps", "6", "--size", "64x48", "--ranks", "2"]
    done = seqpar("sample", *words, "--out", file)
    assert done.returncode == 0, done.stderr
    assert np.array_equal(mine, np.asarray(Image.open(file)))
    assert not np.array_equal(mine, picture(driver.ask(named(FROG, "other", size=(64, 48), seed=4))))


@pytest.mark.parametrize("order", [FROG, CAT], ids=["a pipeline of diffusers", "our loop"])
def test_a_cancel_ends_a_run_and_the_next_has_the_same_bits(driver: Driver, order: ImageRequest) -> None:
    """What is loaded, and a scheduler of another name that was used for a time, stay as they were.

    After which step a run ends is tested in tests/graphs/test_boundary.py: here the cancel takes its time to arrive.
    """
    first = picture(driver.ask(named(order, "first")))
    for at in (1, 7):
        id = f"{order.id} {at}"
        other = named(order, id, steps=MANY, scheduler="FlowMatchEulerDiscreteScheduler" if order is FROG else None)
        answer = driver.cancel_at(other, at)
        assert isinstance(answer, Failed)
        assert answer.why == "cancelled"
        assert at <= driver.steps[id][-1] < MANY
        assert np.array_equal(first, picture(driver.ask(named(order, f"{id} again"))))


def test_a_deadline_ends_an_order_alone(driver: Driver) -> None:
    answer = driver.ask(named(CAT, "late", steps=1000, deadline_s=0.3))
    assert isinstance(answer, Failed)
    assert answer.why == "deadline"
    assert picture(driver.ask(named(CAT, "in time", deadline_s=60.0))).any()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"prompt": "no such thing"}, "got class 'no such thing', expected one of cat, dog"),
        ({"model": "builtin-text", "size": (63, 63)}, "got size 63x63, expected multiples of 8"),
        ({"steps": 0}, "got 0 steps, expected 1 to 1000"),
        ({"model": "none"}, "model none is not served; use one of builtin, builtin-text"),
        ({"negative_prompt": "a dog"}, "negative"),
        ({"scheduler": "NoScheduler"}, "got scheduler 'NoScheduler', expected one of diffusers'"),
        ({"guidance": float("nan")}, "guidance"),
        ({"size": (8192, 8192), "deadline_s": 100.0}, "one step is predicted to take"),
        ({"model": "builtin-text", "size": (65536, 65536)}, "the request needs "),
    ],
)
def test_a_mistake_is_the_answer_and_the_ranks_go_on(driver: Driver, changed: dict[str, object], text: str) -> None:
    answer = driver.ask(named(CAT, "wrong", **changed))
    assert isinstance(answer, Failed)
    assert answer.why == "mistake"
    assert text in answer.text
    assert "\n" not in answer.text


def test_idle_ranks_live_on_and_a_killed_one_ends_all_at_once(tmp_path: Path) -> None:
    """They wait for longer than the deadline of the host, which ends ranks that hear nothing."""
    with replica(tmp_path, 2, "builtin", "--host-deadline-s", "3", "--first-deadline-s", "3") as driver:
        driver.idle(5)
        assert picture(driver.ask(named(CAT, "after"))).any()
        os.kill(driver.ranks()[1], signal.SIGKILL)
        code, seconds, text = gone(driver)
        assert (code, "rank 1 was terminated by SIGKILL" in text) == (128 + signal.SIGKILL, True)
        assert seconds < 30


def test_ranks_without_a_front_end_by_themselves(tmp_path: Path) -> None:
    with replica(tmp_path, 1, "builtin") as driver:
        driver.line.close()
        assert gone(driver)[0] == 0


def descendants(process: int) -> list[int]:
    """Return the processes that a process, its children and so on have started."""
    children = map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
    return [each for child in children for each in (child, *descendants(child))]


def lives(process: int) -> bool:
    """Return whether a process has not ended; one that nobody waits for may stay in the table."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGTERM, 2), (signal.SIGKILL, 2), (signal.SIGKILL, 1)])
@pytest.mark.parametrize("state", ["ranks started", "ready"])
def test_a_signal_to_an_idle_server_ends_all_within_seconds(
    tmp_path: Path, number: signal.Signals, ranks: int, state: str
) -> None:
    """Ranks that load do not hear of the front. After SIGKILL its folder stays, with a socket and a lock alone."""
    (tmp_path / "tmp").mkdir()
    words = [sys.executable, "-m", "seqpar.cli", "serve", "builtin", "--ranks", str(ranks), "--port", "0"]
    with (tmp_path / "log").open("wb") as out:
        server = subprocess.Popen(words, stderr=out, env={**environment(), "TMPDIR": str(tmp_path / "tmp")})
    log, processes = tmp_path / "log", list[int]()
    try:
        until(lambda: f'"event": "{state}"' in log.read_text(), LIMIT_S)
        # the process that encodes pictures and what tracks it, then the ranks: those of two have a starter
        wanted = 2 + ranks + (ranks > 1)
        until(lambda: len(descendants(server.pid)) == wanted, LIMIT_S)
        processes, begun = descendants(server.pid), time.monotonic()
        server.send_signal(number)
        assert server.wait(LIMIT_S) == (0 if number == signal.SIGTERM else -number)
        until(lambda: not any(map(lives, processes)), LIMIT_S)
        assert time.monotonic() - begun < (3.0 if number == signal.SIGTERM else 10.0)
    finally:
        server.kill()
        server.wait()
    left = {path.name for path in (tmp_path / "tmp").rglob("*") if "torchinductor" not in str(path)}
    assert {each for each in left if not each.startswith("seqpar-")} <= {".seqpar-serve.lock", "ranks"}
    assert len(left) == (0 if number == signal.SIGTERM else 3)


def test_a_rank_that_does_not_end_its_step_ends_without_a_front(tmp_path: Path) -> None:
    path = str(tmp_path / "front")
    work = f"""
import threading
from seqpar.serve.ranks.link import ServerLink
ServerLink({path!r}, 0.1)
threading.Event().wait()
"""
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
