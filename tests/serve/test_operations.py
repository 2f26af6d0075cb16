"""What operators see and change: counts of answers, the access log, routes without threads, loaded models."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families

from seqpar.serve.api.app import create_app
from seqpar.serve.api.connections import HEAD_BYTES
from seqpar.serve.api.gate import ADMIN_MODELS, GENERATIONS
from seqpar.serve.api.jobs import JobSpec, Queue
from seqpar.serve.api.keys import KeyTerms
from seqpar.serve.api.replica import RanksEndedError, Replica
from seqpar.serve.messages import ImageRequest
from tests.support.front import Running, keys_in, running, until


def samples(front: Running, name: str, label: str, client: httpx.Client | None = None) -> Counter[str]:
    """The values of a metric, added up by one of its labels."""
    counts = Counter[str]()
    for metric in text_string_to_metric_families((client or front.http).get("/metrics").text):
        for sample in metric.samples:
            if sample.name == name:
                counts[sample.labels[label]] += int(sample.value)
    return counts


def test_each_answer_is_counted_and_logged_once(front: Running) -> None:
    known = (("responses", "status"), ("responses", "route"), ("responses", "method"), ("jobs", "end"))
    before, first = [samples(front, f"seqpar_{name}_total", label) for name, label in known], len(front.events)
    calls: list[tuple[str, str, dict[str, Any], int]] = [
        ("GET", "/v1/models", {}, 200),
        ("POST", GENERATIONS, {"json": {"prompt": "counted"}}, 200),
        ("POST", GENERATIONS, {"json": {"prompt": "mistake"}}, 400),
        ("GET", "/no", {}, 404),
        ("GET", "/v1/models", {"headers": {"host": "other.example"}}, 403),
        ("ANYTHING", "/", {}, 405),
    ]
    for method, path, options, status in calls:
        answer = front.http.request(method, path, **options)
        assert answer.status_code == status
        line = front.event("answered", request=answer.headers["x-request-id"])
        about = {"method": method, "path": path, "status": status, "bytes": len(answer.content), "client": "127.0.0.1"}
        assert about.items() <= line.items()
    for head in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"x" * HEAD_BYTES):  # no requests, so not in the log
        with socket.create_connection(("127.0.0.1", front.port)) as line:
            line.sendall(head)
            while line.recv(1000):
                pass
    after = [samples(front, f"seqpar_{name}_total", label) for name, label in known]
    statuses, routes, methods, ends = (new - old for new, old in zip(after, before, strict=True))
    assert statuses == Counter(str(status) for *_, status in calls) + Counter({"400": 1, "431": 1, "200": 4})
    assert routes == {"/metrics": 4, "/v1/models": 1, GENERATIONS: 2, "/": 1, "": 4}
    assert methods == {"GET": 5, "POST": 2, "": 5}  # not a client's own words
    assert ends == {"completed": 1, "mistake": 1}
    paths = Counter(x["path"] for x in front.events[first:] if x["event"] == "answered")
    assert paths - Counter({"/metrics": 9}) == Counter(path for _, path, *_ in calls)
    for name in ("wait_seconds", "latency_seconds", "steps_per_second"):
        assert samples(front, f"seqpar_{name}_count", "model")["toy"] >= 1


def test_the_log_has_the_beginning_of_long_words_of_clients(front: Running) -> None:
    for method, path in (("GET", "/" + "x" * 9000), ("M" * 9000, "/")):
        answer = front.http.request(method, path)
        line = front.event("answered", request=answer.headers["x-request-id"])
        assert (line["method"], line["path"]) == (f"{method[:80]}..."[: len(method)], f"{path[:256]}..."[: len(path)])


def test_no_route_and_no_dependency_takes_a_thread() -> None:
    server: Any = SimpleNamespace(name="", metrics=SimpleNamespace(answered=None))
    app = cast("Any", create_app(server, None, frozenset())).app.app
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    for route in routes:
        calls = [route.endpoint, *(each.call for each in route.dependant.dependencies)]
        assert all(map(inspect.iscoroutinefunction, calls)), route.path
    assert len(routes) > 10


# models --------------------------------------------------------------------------------------------------------------


def loaded(client: httpx.Client) -> list[str]:
    return [model["id"] for model in client.get(ADMIN_MODELS).json()["data"] if model["loaded"]]


def test_an_admin_changes_the_loaded_models_between_two_images(tmp_path: Path) -> None:
    with (
        running(tmp_path, "--keys", keys_in(tmp_path, "admin=true")) as front,
        front.client("key-of-ada") as ada,
        front.client("key-of-bob") as bob,
        ThreadPoolExecutor(4) as pool,
    ):

        def posted(status: int, **body: Any) -> Any:
            answer = ada.post(ADMIN_MODELS, json=body)
            assert answer.status_code == status, answer.text
            return answer.json().get("error")

        def made(model: str | None, prompt: str = "x") -> httpx.Response:
            return bob.post(GENERATIONS, json={"prompt": prompt} | ({"model": model} if model else {}))

        everything = loaded(ada)
        assert bob.get(ADMIN_MODELS).status_code == bob.post(ADMIN_MODELS, json={"load": ["toy"]}).status_code == 403
        for status, body in ((404, {"load": ["none"]}), (400, {}), (400, {"load": ["toy"], "unload": ["toy"]})):
            posted(status, **body)
        assert front.heard == []

        # a model leaves after the running image, before what waits: its jobs get 409
        runs = pool.submit(made, "toy", "hold change")
        until(lambda: front.prompts)
        change = pool.submit(posted, 200, unload=["other", "toy"])
        waits = [pool.submit(made, model) for model in ("other", "toy")]
        until(lambda: len(bob.get("/v1/jobs").json()["data"]) == 3)
        front.event("change of models", key="ada")
        front.release("change")
        change.result()
        assert (runs.result().status_code, [x.result().status_code for x in waits]) == (200, [409, 409])
        refused = made("toy")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_not_loaded")
        assert refused.headers["x-should-retry"] == "false"  # openai's client would retry 409
        assert "toy" not in made("none").text  # only those that it may name
        left = [name for name in everything if name not in ("other", "toy")]
        assert [model["id"] for model in bob.get("/v1/models").json()["data"]] == loaded(ada) == left
        assert made(None).status_code == 200  # by a model that is loaded

        # a load that fails, or that ends the ranks, leaves what was loaded
        (tmp_path / "no-load").touch()
        assert "no weights in the folder" in posted(503, load=["toy"])["message"]
        (tmp_path / "no-load").unlink()
        (tmp_path / "die-load").touch()
        assert posted(503, load=["toy"])["code"] == "ranks_ended"
        until(lambda: ada.get("/ready").status_code == 200)
        assert loaded(ada) == left
        posted(200, load=["toy"])
        posted(200, load=["toy"])  # is loaded: no load
        assert made("toy").status_code == 200
        gauge = samples(front, "seqpar_model_loaded", "model", ada)
        assert (gauge["toy"], gauge["other"]) == (1, 0)
        assert samples(front, "seqpar_load_failures_total", "model", ada) == {"toy": 1}
        assert samples(front, "seqpar_load_seconds_count", "model", ada) == {"toy": 1}


def test_a_model_may_have_several_names(tmp_path: Path) -> None:
    """All are listed and taken; the ranks, and answers about jobs, know the first."""
    words = "x", "--name", "toy=x", "dall-e-9=x", "--keys", keys_in(tmp_path, "admin=true")
    with running(tmp_path, *words) as front, front.client("key-of-ada") as ada:
        listed = [model["id"] for model in ada.get("/v1/models").json()["data"]]
        assert (listed.count("toy"), listed.count("dall-e-9")) == (1, 1)
        assert ada.get("/v1/models/dall-e-9").json()["id"] == "dall-e-9"
        made = [ada.post(GENERATIONS, json={"prompt": "x", "model": name}).json() for name in ("toy", "dall-e-9")]
        assert [[*answer["data"][0]] for answer in made] == [["b64_json", "seed"], ["url", "seed"]]  # as dall-e's did
        assert [order["model"] for order in front.orders] == ["toy", "toy"]
        assert ada.post(ADMIN_MODELS, json={"unload": ["dall-e-9"]}).status_code == 200
        assert "toy" not in loaded(ada)
        assert ada.post(GENERATIONS, json={"prompt": "x", "model": "dall-e-9"}).status_code == 409


def test_a_request_loads_its_model_with_swap(tmp_path: Path) -> None:
    flags = "--keys", keys_in(tmp_path, "admin=true"), "--swap"
    with running(tmp_path, *flags) as front, front.client("key-of-ada") as ada:
        assert ada.post(ADMIN_MODELS, json={"unload": ["other"]}).status_code == 200
        assert [model["seqpar"]["loaded"] for model in ada.get("/v1/models").json()["data"]].count(False) == 1
        (tmp_path / "no-load").touch()
        failed = ada.post(GENERATIONS, json={"prompt": "x", "model": "other"})
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "model_not_loaded")
        assert "no weights" not in failed.text  # may have paths of the server
        assert front.event("models not changed", reason="no weights in the folder")
        (tmp_path / "no-load").unlink()
        for is_swapped in (True, False):
            made = ada.post(GENERATIONS, json={"prompt": "x", "model": "other"}).json()
            assert ("swap" in made["seqpar"]["seconds"]) == is_swapped
        assert front.event("models changed", loaded=loaded(ada))

        # a model that fits in memory only alone
        large = {"prompt": "x", "model": "other", "size": "1024x1024"}
        for is_swapped in (True, False):
            made = ada.post(GENERATIONS, json=large).json()
            assert ("swap" in made["seqpar"]["seconds"], loaded(ada)) == (is_swapped, ["other"])
        assert ada.post(GENERATIONS, json=large | {"size": "2048x2048"}).json()["error"]["param"] == "size"


def test_a_request_after_a_change_does_not_wait_for_ranks_that_exited_between_them(tmp_path: Path) -> None:
    replica = Replica([], tmp_path, 0, 1, lambda: None)
    with pytest.raises(RanksEndedError):
        asyncio.run(asyncio.wait_for(replica.run(ImageRequest("a/0/0", "toy", "x"), lambda message: None), 10))


def test_the_key_of_the_first_job_of_a_model_pays_for_its_swap() -> None:
    async def shares() -> tuple[list[float | None], list[str], dict[str, float]]:
        loads = {"other": 20.0}
        queue = Queue(9, 1e6, lambda job: None, lambda key: KeyTerms(), lambda model: loads.get(model, 0.0))
        calls = (("ada", "toy"), ("ada", "other"), ("bob", "other"))
        for number, (key, model) in enumerate(calls):
            queue.add(str(number), key, JobSpec(ImageRequest("", model, "x"), "normal", 1, 5.0, 1e6))
        expected = [queue.estimate_s(job) for job in queue.active]
        order, tags = list[str](), dict[str, float]()
        while (job := queue.begin()) is not None:
            order.append(job.id)
            queue.ran(job, 5.0 + loads.pop(job.spec.request.model, 0.0))  # the swap is within the run's seconds
            tags[job.id] = queue.shares.tag(job.key)
            queue.image_done(job)
            queue.end(job, "completed")
        return expected, order, tags

    assert asyncio.run(shares()) == ([5.0, 35.0, 30.0], ["0", "2", "1"], {"0": 5.0, "2": 25.0, "1": 10.0})
