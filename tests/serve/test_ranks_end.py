"""Ranks that die, that are deaf, that talk nonsense; the end of the server; and mistakes in its flags."""

from __future__ import annotations

import os
import signal
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from seqpar.serve.api.command import main
from seqpar.serve.api.gate import read_keys
from tests.support.front import Running, running, until

PATH = "/v1/images/generations"


def status_of(front: Running, prompt: str) -> int:
    """Return the status of a request for a picture."""
    with front.http() as http:
        return http.post(PATH, json={"prompt": prompt}).status_code


def test_an_order_is_tried_once_more(tmp_path: Path) -> None:
    with running(tmp_path) as front:
        assert status_of(front, "die-once first") == 200
        assert front.prompts == ["die-once first"] * 2
        with front.http() as http:
            assert "seqpar_restarts_total 1.0" in http.get("/metrics").text
        assert status_of(front, "nonsense") == 500  # both ends by it count once
        assert status_of(front, "die") == 503  # the third request that ends ranks
        assert front.wait() == 1


def test_an_order_that_ends_ranks_twice_fails_and_the_next_one_does_not(tmp_path: Path) -> None:
    with running(tmp_path) as front:
        with front.openai(retries=5) as client, pytest.raises(openai.InternalServerError) as error:
            client.images.generate(prompt="die")
        assert error.value.response.headers["x-should-retry"] == "false"
        assert front.prompts == ["die"] * 2
        line = front.event("ranks", line="about to die")
        assert line["request"] == error.value.request_id
        assert status_of(front, "a cat") == 200
        assert status_of(front, "die") == 500  # both ends by one request count once
        assert status_of(front, "die") == 503  # the third request: the server gives up
        assert front.wait() == 1
        assert "error: the ranks exited 3 times in 10 minutes; see the log" in front.lines


def test_ranks_that_give_nothing_up_are_ended(tmp_path: Path) -> None:
    with running(tmp_path, "--stuck-s", "0.1") as front, ThreadPoolExecutor(1) as pool, front.http() as http:
        answer = pool.submit(status_of, front, "deaf")
        until(lambda: front.prompts == ["deaf"])
        (job,) = http.get("/v1/jobs").json()["data"]
        http.delete(f"/v1/jobs/{job['id']}")
        assert answer.result() == 499
        front.event("cancel timed out, terminating ranks")
        os.kill(int(front.event("ranks started")["process"]), signal.SIGKILL)
        assert status_of(front, "a cat") == 200


def test_ranks_that_never_were_ready_end_the_server(tmp_path: Path) -> None:
    (tmp_path / "refuse").touch()
    with running(tmp_path, wait=False) as front:
        assert front.wait() == 2
    assert "error: got no model, expected one" in front.lines


def test_requests_before_the_ranks_are_ready(tmp_path: Path) -> None:
    (tmp_path / "slow-start").touch()
    with running(tmp_path, wait=False) as front, front.http() as http:
        answers = [http.get("/ready"), http.get("/v1/models"), http.post(PATH, json={"prompt": "x"})]
        assert [(each.status_code, each.json()["error"]["code"]) for each in answers] == [(503, "not_ready")] * 3
        assert http.get("/health").status_code == 200
        (tmp_path / "slow-start").unlink()
        front.ready()


@pytest.mark.parametrize(("held", "grace", "status"), [("hold end", "60", 200), ("wait", "0", 503)])
def test_what_runs_may_end_and_what_waits_may_not(tmp_path: Path, held: str, grace: str, status: int) -> None:
    with running(tmp_path, "--grace-s", grace) as front, ThreadPoolExecutor(2) as pool, front.http() as http:
        runs = pool.submit(status_of, front, held)
        until(lambda: front.prompts == [held])
        waits = pool.submit(status_of, front, "waits")
        until(lambda: len(http.get("/v1/jobs").json()["data"]) == 2)
        front.process.send_signal(signal.SIGINT)
        assert waits.result() == 503
        if grace != "0":
            assert http.get("/ready").status_code == status_of(front, "new") == 503
        (tmp_path / "end").touch()
        assert runs.result() == status
        assert front.wait() == 0
    assert front.lines[-1] == "torch was not loaded"
    assert "finish" in [each["type"] for each in front.heard]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is reachable from other machines and requires --keys"),
        (["--gpus", "1", "--ranks", "1"], "expected one of them"),
        (["--ranks", "0"], "got --ranks 0, expected at least 1"),
        (["--port", "70000"], "got --port 70000, expected at most 65535"),
        (["--deadline-s", "nan"], "got --deadline-s nan, expected at least 0"),
        (["--keys", "/nowhere"], "--keys /nowhere cannot be read"),
    ],
)
def test_mistakes_in_flags(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words, ["false"]) == 2
    line = capfd.readouterr().err
    assert line.startswith("error: ")
    assert said in line
    assert line.count("\n") == 1


def test_a_port_in_use(tmp_path: Path) -> None:
    with running(tmp_path, wait=False) as front:
        port = str(front.event("listening")["port"])
        with running(tmp_path, "--port", port, wait=False) as second:
            assert second.wait() == 1
    assert any(f"--port {port}: " in line for line in second.lines)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in which servers make their private ones."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
@pytest.mark.parametrize("state", ["slow-start", "ready"])
def test_no_folder_is_left_after_a_signal(tmp_path: Path, temporary: Path, number: int, state: str) -> None:
    (tmp_path / state).touch()
    with running(tmp_path, wait=state == "ready") as front:
        front.event("ranks", line="fake ranks start")
        assert len([*temporary.iterdir()]) == 1
        assert front.end(number) == 0
    assert [*temporary.iterdir()] == []


@pytest.mark.parametrize("words", [("--port", "x"), (), ("--jobs", __file__)])
def test_no_folder_is_left_after_a_failure(tmp_path: Path, temporary: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "refuse").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = tuple(each.replace("x", str(taken.getsockname()[1])) if each == "x" else each for each in words)
        with running(tmp_path, *words, wait=False) as front:
            assert front.wait() in (1, 2)
    assert [*temporary.iterdir()] == []


def test_a_start_removes_folders_of_killed_servers_when_nothing_of_them_lives(tmp_path: Path, temporary: Path) -> None:
    other = temporary / "seqpar-other"  # not of a server: it has no lock
    other.mkdir()

    def folders() -> set[Path]:
        return {*temporary.iterdir()} - {other}

    with running(tmp_path) as living:
        alive = folders()
        (tmp_path / "killed").mkdir()
        (tmp_path / "killed" / "slow-start").touch()  # these ranks do not see that their front is killed
        with running(tmp_path / "killed", wait=False) as killed:
            killed.event("ranks", line="fake ranks start")
            ranks = int(killed.event("ranks started")["process"])
            assert killed.end(signal.SIGKILL) == -signal.SIGKILL
            left = folders() - alive
            assert len(left) == 1
            with running(tmp_path):
                assert folders() > alive | left
            os.kill(ranks, signal.SIGKILL)
        with running(tmp_path):
            assert len(folders() - alive) == 1
            assert not folders() & left
        assert folders() == alive
        assert living.end() == 0
    assert [*temporary.iterdir()] == [other]


@pytest.mark.parametrize("text", ["", "secret", "a:\n", ":b", "a:b\na:c", "a:b\nc:b"])
def test_files_of_keys(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ValueError, match="--keys ") as error:
        read_keys(file)
    assert "secret" not in str(error.value).replace(str(file), "")
    file.write_text("a:b")
    keys = read_keys(file)
    assert (keys.name_of("b"), keys.name_of("a"), keys.name_of("")) == ("a", None, None)
    file.chmod(0o640)
    with pytest.raises(ValueError, match="has mode 640, expected 600; run: chmod 600"):
        read_keys(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
