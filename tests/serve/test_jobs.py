"""The queue: its bound, its order, cancellations, clients that disconnect, deadlines; and whose jobs are whose."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from seqpar.serve.api import jobs
from seqpar.serve.api.gate import GENERATIONS
from seqpar.serve.api.jobs import JobSpec, Queue, ServerJob, Speeds
from seqpar.serve.api.keys import KeyTerms
from seqpar.serve.messages import ImageRequest
from tests.support.front import Running, keys_in, running, until

Ask = Callable[..., Future[httpx.Response]]


@pytest.fixture
def ask(front: Running) -> Iterator[Ask]:
    """Sends a request in a thread, and returns its future answer once the server has queued or answered it."""

    def send(prompt: str, **fields: Any) -> Future[httpx.Response]:
        before = len(front.jobs())
        answer = pool.submit(lambda: front.http.post(GENERATIONS, json={"prompt": prompt, **fields}))
        until(lambda: answer.done() or len(front.jobs()) > before)
        return answer

    with ThreadPoolExecutor(8) as pool:
        yield send


def test_priorities_go_first_and_the_queue_is_bounded(front: Running, ask: Ask) -> None:
    before = len(front.prompts)
    running_ = ask("hold priorities", n=2, seed=1)
    until(lambda: "hold priorities" in front.prompts)
    others = [ask(f"{priority} job", priority=priority) for priority in ("low", "normal", "high")]
    assert [job["position"] for job in front.jobs()[-4:]] == [0, 3, 2, 1]
    with pytest.raises(openai.RateLimitError, match=r"queue is full \(3 requests\); ") as full:
        front.ai.images.generate(prompt="too many")
    assert int(full.value.response.headers["retry-after"]) >= 1
    front.release("priorities")
    assert [answer.result().status_code for answer in (running_, *others)] == [200] * 4
    assert [job["estimated_s"] for job in front.jobs()[-4:]] == [None] * 4
    # the second image of the first request waits for requests of a higher priority, and precedes the others
    assert front.prompts[before:] == ["hold priorities", "high job", "hold priorities", "normal job", "low job"]


def test_estimates_come_from_measured_steps(front: Running, ask: Ask) -> None:
    assert ask("measured", model="other").result().status_code == 200
    holding = ask("hold estimates", model="other", steps=10)
    until(lambda: front.jobs()[-1]["step"] == 1)
    waiting = ask("behind", model="other", n=2)
    first, second = front.jobs()[-2:]
    assert (first["state"], first["estimated_s"]) == ("running", 2.0 * 9 + 1)
    assert (second["state"], second["estimated_s"]) == ("queued", 2.0 * 9 + 1 + 2 * 9)
    front.release("estimates")
    assert (holding.result().status_code, waiting.result().status_code) == (200, 200)
    small = JobSpec(ImageRequest("", "toy", "x"), "normal", 4, 0.5, 100.0)
    large = replace(small, request=ImageRequest("", "toy", "x", size=(48, 64)), work=8.0)
    speeds = Speeds()
    assert (speeds.estimate(small, 4), speeds.estimate(large, 4)) == (2, 16)
    speeds.measured(small, 4, {"steps": 8.0, "decode": 1.0})
    speeds.measured(small, 2, {"encode": 1.0, "steps": 8.0, "decode": 2.0})
    assert (speeds.estimate(small, 10), speeds.estimate(large, 10)) == (3 * 10 + 2, 8 * (3 * 10 + 2))
    speeds.measured(large, 4, {"steps": 48.0})
    assert (speeds.estimate(small, 10), speeds.estimate(large, 10)) == (3 * 10 + 2, 12 * 10)
    assert speeds.estimate(replace(small, ratio=0.5, request=ImageRequest("", "other", "x")), 4) == 1
    assert speeds.estimate(replace(small, request=ImageRequest("", "other", "x")), 4) == 2


def test_a_request_does_not_visit_the_jobs_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    visited = set[str]()

    class Watched(ServerJob):
        def __getattribute__(self, name: str) -> Any:
            if name != "id":
                visited.add(object.__getattribute__(self, "id"))
            return object.__getattribute__(self, name)

    async def requests(count: int, first: int = 0) -> None:
        spec = JobSpec(ImageRequest("", "toy", "x"), "normal", 1, 1.0, 100.0)
        for number in range(first, first + count):
            job = queue.add(str(number), "ada", spec)
            assert (queue.find(job.id), queue.length, queue.active, queue.ahead(job)) == (job, 1, [job], 0)
            assert (queue.begin(), queue.estimate_s(job)) == (job, 1)
            queue.ran(job, 1.0)
            queue.image_done(job)
            queue.end(job, "completed")

    monkeypatch.setattr(jobs, "ServerJob", Watched)
    monkeypatch.setattr(jobs, "MOST_ENDED", 50)
    queue = Queue(9, 1e6, lambda job: None, lambda key: KeyTerms())
    asyncio.run(requests(60))
    assert [job.id for job in queue.of_key("ada")] == [str(number) for number in range(10, 60)]
    visited.clear()
    asyncio.run(requests(1, first=60))
    assert visited == {"60", "10"}  # the request itself, and the oldest job, whether to forget it


def test_jobs_are_forgotten_in_the_order_of_their_ends() -> None:
    async def kept(keep_s: float, most: int) -> list[str]:
        queue = Queue(9, keep_s, lambda job: None, lambda key: KeyTerms())
        spec = JobSpec(ImageRequest("", "toy", "x"), "normal", 1, 1.0, 100.0)
        first, second, third = (queue.add(name, "ada", spec) for name in ("first", "second", "third"))
        for job in (third, first):
            queue.end(job, "completed")
        third.ended = time.time() - 60
        queue.forget(second.id)  # which has not ended
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jobs, "MOST_ENDED", most)
            assert queue.find(second.id) is second
            return [job.id for job in queue.of_key("ada")]

    assert asyncio.run(kept(1e6, 2)) == ["first", "second", "third"]
    assert asyncio.run(kept(1e6, 1)) == asyncio.run(kept(30.0, 2)) == ["first", "second"]
    assert asyncio.run(kept(-1.0, 2)) == ["second"]


def test_delete_cancels_running_and_waiting_jobs(front: Running, ask: Ask) -> None:
    runs = ask("wait")
    until(lambda: front.jobs()[-1]["step"] == 1)
    waits = ask("never made")
    for job in front.jobs()[-2:][::-1]:
        assert front.http.delete(f"/v1/jobs/{job['id']}").json()["state"] == "cancelled"
    for answer in (runs, waits):
        assert (answer.result().status_code, answer.result().json()["error"]["code"]) == (499, "cancelled")
    job = front.jobs()[-1]
    assert front.http.get(f"/v1/jobs/{job['id']}").json() == job
    assert front.http.delete(f"/v1/jobs/{job['id']}").json() == job
    assert ask("after a cancel").result().status_code == 200
    assert "never made" not in front.prompts
    assert front.heard[-2]["type"] == "cancel"


def test_a_client_that_disconnects_cancels_its_job(front: Running, ask: Ask) -> None:
    head = f"POST {GENERATIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    lines: list[socket.socket] = []
    for prompt in ("wait", "left the queue"):
        before, body = len(front.jobs()), f'{{"prompt": "{prompt}"}}'
        line = socket.create_connection(("127.0.0.1", front.port))
        line.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        lines.append(line)
        until(lambda before=before: len(front.jobs()) > before)
    until(lambda: front.jobs()[-2]["step"] == 1)
    for line, index in zip(reversed(lines), (-1, -2), strict=True):
        line.close()
        until(lambda index=index: front.jobs()[index]["state"] == "cancelled")
    assert ask("after a disconnect").result().status_code == 200
    assert "left the queue" not in front.prompts


def test_deadlines_of_running_and_waiting_jobs(front: Running, ask: Ask) -> None:
    runs = ask("wait", deadline_s=3)
    waits = ask("too late", deadline_s=0.05)
    for answer in (waits, runs):
        assert (answer.result().status_code, answer.result().json()["error"]["code"]) == (504, "deadline")
        assert answer.result().headers["x-should-retry"] == "false"
    assert ask("after a deadline").result().status_code == 200
    assert "too late" not in front.prompts


def test_failures_on_the_ranks_have_their_status(front: Running) -> None:
    for prompt, status, code in (("mistake", 400, "mistake"), ("failure", 500, "failure"), ("short", 500, "failure")):
        answer = front.http.post(GENERATIONS, json={"prompt": prompt})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_keys_do_not_see_each_others_jobs(tmp_path: Path) -> None:
    """Nor videos, whose files have a bound of bytes."""
    words = ("--keys", keys_in(tmp_path), "--host", "0.0.0.0", "--show-prompts", "--keep-bytes", "2000")
    with running(tmp_path, *words) as front, front.client("key-of-ada") as ada, front.client("key-of-bob") as bob:
        with front.openai("wrong") as client, pytest.raises(openai.AuthenticationError, match="missing or invalid"):
            client.images.generate(prompt="never")
        paths = ("/health", "/ready", "/v1/jobs", "/metrics", "/no")
        assert [front.http.get(path).status_code for path in paths] == [200, 200, 401, 401, 401]
        made = ada.post(GENERATIONS, json={"prompt": "for ada", "response_format": "url"}).json()
        (job,) = ada.get("/v1/jobs", headers={"host": "proxy.example"}).json()["data"]
        for path in (f"/v1/jobs/{job['id']}", made["data"][0]["url"]):
            assert (ada.get(path).status_code, bob.get(path).status_code) == (200, 404)
        assert bob.delete(f"/v1/jobs/{job['id']}").status_code == 404
        assert bob.get("/v1/jobs").json()["data"] == bob.get("/v1/videos").json()["data"] == []
        assert bob.get("/metrics").status_code == 200
        assert front.event("accepted")["prompt"] == "for ada"
        assert front.prompts == ["for ada"]

        def video(**fields: Any) -> str:
            path = f"/v1/videos/{ada.post('/v1/videos', json={'prompt': 'x', **fields}).json()['id']}"
            until(lambda: ada.get(path).json()["status"] in ("completed", "failed"))
            return path

        first = video()
        assert [bob.request(*way).status_code for way in (("GET", first), ("DELETE", first))] == [404, 404]
        assert bob.get(f"{first}/content").status_code == 404
        second = video()  # in place of the first one
        assert "the file of the video has expired" in ada.get(f"{first}/content").json()["error"]["message"]
        assert len(ada.get(f"{second}/content").content) == 3 * 24 * 16
        assert ada.get(video(size="40x40")).json()["error"]["code"] == "too_large"
