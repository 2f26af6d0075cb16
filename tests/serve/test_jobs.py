"""The queue: its bound, its order, cancels, clients that leave, deadlines; and whose jobs are whose."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.front import Running, running, until

PATH = "/v1/images/generations"


class Asked:
    """Requests in threads, each of which waits for its answer."""

    def __init__(self, front: Running, http: httpx.Client, pool: ThreadPoolExecutor) -> None:
        self.front, self.http, self._pool = front, http, pool

    def ask(self, prompt: str, **fields: Any) -> Future[httpx.Response]:
        """Send a request and return its answer to come, once the server has taken it or answered."""
        before = len(self.jobs())
        answer = self._pool.submit(lambda: self.http.post(PATH, json={"prompt": prompt, **fields}))
        until(lambda: answer.done() or len(self.jobs()) > before)
        return answer

    def jobs(self) -> list[dict[str, Any]]:
        """Return all jobs, in order of arrival."""
        return self.http.get("/v1/jobs").json()["data"]


@contextmanager
def asking(front: Running) -> Iterator[Asked]:
    """Yield requests in threads."""
    with front.http() as http, ThreadPoolExecutor(8) as pool:
        yield Asked(front, http, pool)


def test_priorities_go_first_and_the_queue_is_bounded(front: Running) -> None:
    before = len(front.prompts)
    with asking(front) as asked:
        running_ = asked.ask("hold priorities", n=2, seed=1)
        until(lambda: "hold priorities" in front.prompts)
        others = [asked.ask(f"{each} job", priority=each) for each in ("low", "normal", "high")]
        assert [job["position"] for job in asked.jobs()[-4:]] == [0, 3, 2, 1]
        with front.openai() as client, pytest.raises(openai.RateLimitError, match=r"queue is full \(3 requests\); "):
            client.images.generate(prompt="too many")
        full = asked.http.post(PATH, json={"prompt": "too many"})
        assert int(full.headers["retry-after"]) >= 1
        (front.folder / "priorities").touch()
        assert [each.result().status_code for each in (running_, *others)] == [200] * 4
        estimates = [job["estimated_s"] for job in asked.jobs()[-4:]]
    # the second picture of the first request came before, and waits for those of a higher priority
    wanted = ["hold priorities", "high job", "hold priorities", "normal job", "low job"]
    assert front.prompts[before:] == wanted
    assert estimates == [None] * 4


def test_estimates_come_from_what_was_measured(front: Running) -> None:
    with asking(front) as asked:
        assert asked.ask("measured").result().status_code == 200
        holding = asked.ask("hold estimates", steps=10)
        until(lambda: asked.jobs()[-1]["step"] == 1)
        waiting = asked.ask("behind", n=2)
        first, second = asked.jobs()[-2:]
        assert (first["state"], first["estimated_s"]) == ("running", 2.0 * 9 + 1)
        assert (second["state"], second["estimated_s"]) == ("queued", 2.0 * 9 + 1 + 2 * 9)
        (front.folder / "estimates").touch()
        assert (holding.result().status_code, waiting.result().status_code) == (200, 200)


def test_delete_cancels_what_runs_and_what_waits(front: Running) -> None:
    with asking(front) as asked:
        runs = asked.ask("wait")
        until(lambda: asked.jobs()[-1]["step"] == 1)
        waits = asked.ask("never made")
        for job in asked.jobs()[-2:][::-1]:
            assert asked.http.delete(f"/v1/jobs/{job['id']}").json()["state"] == "cancelled"
        for answer in (runs, waits):
            assert (answer.result().status_code, answer.result().json()["error"]["code"]) == (499, "cancelled")
        job = asked.jobs()[-1]
        assert asked.http.get(f"/v1/jobs/{job['id']}").json() == job
        assert asked.http.delete(f"/v1/jobs/{job['id']}").json() == job
        assert asked.ask("after a cancel").result().status_code == 200
    assert "never made" not in front.prompts
    assert front.heard[-2]["type"] == "cancel"


def test_a_client_that_hangs_up_cancels_its_job(front: Running) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with asking(front) as asked:
        lines: list[socket.socket] = []
        for prompt in ("wait", "left the queue"):
            before, body = len(asked.jobs()), f'{{"prompt": "{prompt}"}}'
            line = socket.create_connection(("127.0.0.1", front.event("listening")["port"]))
            line.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            lines.append(line)
            until(lambda before=before: len(asked.jobs()) > before)
        until(lambda: asked.jobs()[-2]["step"] == 1)
        for line in reversed(lines):
            line.close()
            until(lambda: asked.jobs()[-1]["state"] == "cancelled")
        until(lambda: asked.jobs()[-2]["state"] == "cancelled")
        assert asked.ask("after a hang-up").result().status_code == 200
    assert "left the queue" not in front.prompts


def test_deadlines_of_what_runs_and_what_waits(front: Running) -> None:
    with asking(front) as asked:
        runs = asked.ask("wait", deadline_s=3)
        waits = asked.ask("too late", deadline_s=0.05)
        for answer in (waits, runs):
            assert (answer.result().status_code, answer.result().json()["error"]["code"]) == (504, "deadline")
            assert answer.result().headers["x-should-retry"] == "false"
        assert asked.ask("after a deadline").result().status_code == 200
    assert "too late" not in front.prompts


@pytest.mark.parametrize(
    ("prompt", "status", "code"), [("mistake", 400, "mistake"), ("failure", 500, "failure"), ("short", 500, "failure")]
)
def test_what_the_ranks_say_of_an_order(front: Running, prompt: str, status: int, code: str) -> None:
    with front.http() as http:
        answer = http.post(PATH, json={"prompt": prompt})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_keys_do_not_see_each_others_jobs(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# who may ask\nada: key-of-ada\nbob: key-of-bob\n")
    keys.chmod(0o600)
    words = ("--keys", str(keys), "--host", "0.0.0.0", "--show-prompts")
    with running(tmp_path, *words) as front, front.http("key-of-ada") as ada, front.http("key-of-bob") as bob:
        with front.openai("wrong") as client, pytest.raises(openai.AuthenticationError, match="missing or invalid"):
            client.images.generate(prompt="never")
        with front.http() as nobody:
            statuses = [nobody.get(path).status_code for path in ("/health", "/ready", "/v1/jobs", "/metrics", "/no")]
            assert statuses == [200, 200, 401, 401, 401]
        with front.openai("key-of-ada") as client:
            data: Any = client.images.generate(prompt="for ada", response_format="url").data
        (job,) = ada.get("/v1/jobs", headers={"host": "proxy.example"}).json()["data"]
        for path in (f"/v1/jobs/{job['id']}", data[0].url):
            assert (ada.get(path).status_code, bob.get(path).status_code) == (200, 404)
        assert bob.delete(f"/v1/jobs/{job['id']}").status_code == 404
        assert bob.get("/v1/jobs").json()["data"] == []
        assert bob.get("/metrics").status_code == 200
        assert front.event("accepted")["prompt"] == "for ada"
        assert front.prompts == ["for ada"]
