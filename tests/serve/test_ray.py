"""`seqpar serve` under Ray Serve, on two nodes of this machine: replicas are killed, come and go, and own jobs."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from starlette.requests import Request
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from seqpar.serve.api.errors import ProblemError
from seqpar.serve.api.gate import GENERATIONS
from tests.support.fake_replica import pixels_of
from tests.support.front import CHILD, ROOT, RUN, until
from tests.support.ray_nodes import Nodes, parent, tree, two_nodes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install -e '.[ray]'"),
    pytest.mark.filterwarnings("ignore:The Sora API"),
]
FAKE = [sys.executable, "-c", f"CHILD = {CHILD!r}\n{RUN}"]
ONE_PER_NODE = {"num_cpus": 1, "resources": {"node": 1}}
QUICK = {"metrics_interval_s": 0.2, "look_back_period_s": 1.0, "upscale_delay_s": 0.5, "downscale_delay_s": 1.0}


def test_the_config_file_of_the_docs_is_valid() -> None:
    from ray.serve.schema import ServeDeploySchema

    from seqpar.serve.ray import AppArgs

    config = yaml.safe_load((ROOT / "examples" / "deploy" / "ray.yaml").read_text())
    (application,) = ServeDeploySchema.model_validate(config).applications
    args = AppArgs.model_validate(application.args)
    assert application.import_path == "seqpar.serve.ray:app"
    assert args.command[4:] == [
        *("serve", "black-forest-labs/FLUX.1-dev", "--gpus", "4", "--host", "127.0.0.1", "--port", "0"),
        *("--jobs", "/shared/jobs", "--keys", "/shared/keys.txt", "--trusted-proxies", "127.0.0.1"),
    ]
    with pytest.raises(ValueError, match="got gpus 4 and ranks 2, expected one of them"):
        AppArgs.model_validate({**application.args, "ranks": 2})


def test_a_path_names_the_replica_of_its_job() -> None:
    from seqpar.serve.ray import HttpCall

    owners = {
        b"/v1/jobs/ab12cd34-x_Y-z0": "ab12cd34",
        b"/v1/videos/ab12cd34-xyz/content?variant=video": "ab12cd34",
        b"/v1/videos?after=ab12cd34-xyz": None,
        b"/v1/files/ab12cd34-xyz.png": None,
        b"/v1/jobs/..%2Fab-cd": None,
    }
    assert {path: HttpCall("GET", path, (), b"").owner for path in owners} == owners


def test_a_replica_hears_the_address_of_the_client() -> None:
    from seqpar.serve.ray import _call  # pyright: ignore[reportPrivateUsage]

    headers = [(b"host", b"localhost"), (b"x-forwarded-for", b"10.0.0.9"), (b"x-forwarded-for", b"10.0.0.8")]
    scope = {"type": "http", "method": "GET", "path": "/v1/jobs", "query_string": b"", "headers": headers}
    call = asyncio.run(_call(Request({**scope, "client": ("10.0.0.7", 5)})))
    assert call.headers == (headers[0], (b"x-forwarded-for", b"10.0.0.9, 10.0.0.8, 10.0.0.7"))


@pytest.mark.parametrize("path", ["/metrics", "/admin/models"])
def test_what_one_replica_would_do_for_itself_is_refused(path: str) -> None:
    from seqpar.serve.ray import _call  # pyright: ignore[reportPrivateUsage]

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
    with pytest.raises(ProblemError, match=f"{path} is not available here; use ") as refused:
        asyncio.run(_call(Request({**scope, "client": ("10.0.0.7", 5)})))
    assert refused.value.problem.status == 404


@pytest.mark.parametrize(
    "lora", ["style", {"name": "style"}, [{"lora_name": "style"}], {"adapter": "style", "scale": 2}]
)
def test_a_request_has_its_loras_by_each_of_their_names(lora: Any) -> None:
    from seqpar.serve.ray import HttpCall, _loras  # pyright: ignore[reportPrivateUsage]

    body, headers = json.dumps({"prompt": "x", "lora": lora}).encode(), ((b"content-type", b"application/json"),)
    request = Request({"type": "http", "method": "POST", "path": GENERATIONS, "headers": [*headers]})
    assert asyncio.run(_loras(HttpCall("POST", GENERATIONS.encode(), headers, body), request)) == "style"


class Dying:
    """A handle of replicas of which some die within their answers: those whose parts do not end with None."""

    def __init__(self, head: Any, parts: Iterable[list[bytes | None]]) -> None:
        self._head, self._parts, self.answer = head, iter(parts), self

    def options(self, **_: Any) -> Dying:
        return self

    def remote(self, _: Any) -> Any:
        """Answer a call with the next replica."""
        from ray.exceptions import RayActorError
        from ray.serve.handle import DeploymentResponseGenerator

        async def answer(parts: list[bytes | None]) -> AsyncIterator[Any]:
            yield self._head
            for part in parts:
                yield part
            if parts[-1] is not None:
                raise RayActorError

        class Response(DeploymentResponseGenerator[Any]):
            def __init__(self, parts: AsyncIterator[Any]) -> None:
                self._parts = parts

            def __anext__(self) -> Any:
                return self._parts.__anext__()

            def cancel(self) -> None:
                pass  # the replica is dead

        return Response(answer(next(self._parts)))


def answered(kind: str, *parts: list[bytes | None], length: int = 2) -> tuple[int, str]:
    """Status and text of an answer that replicas begin to give."""
    from seqpar.serve.ray import Head, Ingress

    headers = ((b"content-type", kind.encode()), (b"content-length", b"%d" % length))
    ingress = Ingress(Dying(Head(200, headers), parts), has_loras=False)  # pyright: ignore[reportArgumentType]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (await ingress(Request(scope, receive)))(scope, receive, send)

    answer = TestClient(app).get("/v1/models")
    return answer.status_code, answer.text


def test_an_answer_whose_replica_dies_in_its_middle_comes_from_another_one() -> None:
    from ray.exceptions import RayActorError

    assert answered("application/json", [b"{"], [b"{", b"}", None]) == (200, "{}")
    status, text = answered("application/json", [b"{"], [b"["], [b"{", b"}", None])
    assert (status, json.loads(text)["error"]["code"]) == (500, "replica_died")
    assert '"replica_died"' in answered("text/event-stream", [b"event: a\n\n"], [b"event: b\n\n", None])[1]
    with pytest.raises(RayActorError):
        answered("video/mp4", [b"12"], [b"12", None], length=2_000_000)


# two nodes -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two nodes without an application."""
    folder = tmp_path_factory.mktemp("ray")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with two_nodes(folder, port, FAKE_FOLDER=str(folder)) as started:
        yield started


def deploy(nodes: Nodes, name: str, args: dict[str, Any], count: int, **options: Any) -> None:
    """Deploy an application, and wait for so many replicas. options: of the replicas."""
    application = {
        "name": name,
        "route_prefix": "/",
        "import_path": "seqpar.serve.ray:app",
        "args": {"ranks": 1, "jobs": str(nodes.folder / name), **args},
        "deployments": [{"name": "Replica", "ray_actor_options": ONE_PER_NODE, **options}],
    }
    http = {"host": "127.0.0.1", "port": nodes.port}
    nodes.deploy({"proxy_location": "HeadOnly", "http_options": http, "applications": [application]})
    nodes.running(name, count)


@pytest.mark.timeout(600)
@pytest.mark.cluster
def test_a_replica_that_is_killed_under_load_costs_no_answer_and_is_replaced(nodes: Nodes) -> None:
    deploy(nodes, "real", {"models": ["builtin"]}, 2, num_replicas=2)
    before = nodes.replicas("real")
    assert {parent(pid) for pid in before} == set(nodes.raylets)
    assert len(set(nodes.raylets)) == 2
    victim = tree(before[0])
    assert len(victim) > 2  # the actor, its server, and the server's ranks

    def image(seed: int) -> str:
        answer = http.post(GENERATIONS, json={"prompt": "cat", "seed": seed, "steps": 10})
        assert answer.status_code == 200, answer.text
        return answer.json()["data"][0]["b64_json"]

    with nodes.http() as http, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(image, seed) for seed in range(16)]
        until(lambda: sum(answer.done() for answer in answers) > 4)
        os.kill(before[0], signal.SIGKILL)
        images = [answer.result() for answer in answers]
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in victim))
        until(lambda: len({*nodes.replicas("real")} - {*before}) == 1)  # Serve has noticed, and started another one
        nodes.running("real", 2)
        assert before[1] in nodes.replicas("real")
        assert {parent(pid) for pid in nodes.replicas("real")} == set(nodes.raylets)
        assert list(map(image, range(0, 16, 8))) == images[::8]
        assert len(set(images)) == 16


def fake(nodes: Nodes, count: int, **options: Any) -> None:
    """Deploy servers with fake ranks."""
    deploy(nodes, "fake", {"models": ["toy"], "program": FAKE, "loras": str(nodes.folder)}, count, **options)


@pytest.mark.timeout(600)
@pytest.mark.cluster
def test_the_ingress_streams_cancels_refuses_and_finds_the_replica_with_a_lora(nodes: Nodes) -> None:
    fake(nodes, 2, num_replicas=2)
    with nodes.http() as http:

        def replica_of(lora: str) -> str:
            answer = http.post(GENERATIONS, json={"prompt": "x", "lora": lora}).json()
            return answer["seqpar"]["id"].partition("-")[0]

        def keeps() -> bool:
            replicas = [replica_of(lora) for lora in ("style", "lines") * 7][2:]
            return (len(set(replicas[::2])), len(set(replicas[1::2])), len(set(replicas))) == (1, 1, 2)

        # each file keeps to one replica; Ray takes another where a busy one does not say its load in time
        assert any(keeps() for _ in range(6))
        queued = ("event: seqpar.queued", "event: seqpar.step")
        busy = {"prompt": "hold go", "lora": "style", "stream": True, "stream_steps": True}
        with ExitStack() as stack:  # more than one replica can hold
            streams = [stack.enter_context(http.stream("POST", GENERATIONS, json=busy)).iter_lines()]
            for _ in range(4):
                assert next(streams[-1]) in queued
                streams.append(stack.enter_context(http.stream("POST", GENERATIONS, json=busy)).iter_lines())
            (nodes.folder / "go").touch()
            ends = [[line for line in stream if line.startswith("data: ")][-1] for stream in streams]
        assert len({json.loads(end[6:])["seqpar"]["id"].partition("-")[0] for end in ends}) == 2
        events = {"prompt": "hold stream", "stream": True, "stream_steps": True}
        with http.stream("POST", GENERATIONS, json=events) as answer:
            lines = answer.iter_lines()
            assert next(lines) in queued
            (nodes.folder / "stream").touch()
            assert "event: image_generation.completed" in [*lines]
        with pytest.raises(httpx.ReadTimeout):
            http.post(GENERATIONS, json={"prompt": "wait", "user": "leaves"}, timeout=1)
        records = nodes.folder.glob
        until(lambda: any('"state":"cancelled"' in path.read_text() for path in records("fake/*/*.json")))
        long = http.post(GENERATIONS, content=b"1" * 2_000_000, headers={"content-type": "application/json"})
        assert (long.status_code, long.json()["error"]["code"]) == (413, "too_large")
        assert http.get("/metrics").status_code == 404
        assert http.get("/v1/models", headers={"host": "evil.example"}).status_code == 403


@pytest.mark.timeout(600)
@pytest.mark.cluster
def test_waiting_videos_start_a_second_replica_and_finished_ones_outlive_it(nodes: Nodes) -> None:
    fake(nodes, 1, autoscaling_config={"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1.5, **QUICK})
    with openai.OpenAI(base_url=f"{nodes.url}/v1", api_key="none", max_retries=0) as client:
        made = [client.videos.create(prompt="hold videos", extra_body={"seed": seed}) for seed in range(3)]
        nodes.running("fake", 2)  # though no client waits
        assert {client.videos.retrieve(made[0].id).status for _ in range(8)} == {"in_progress"}
        (nodes.folder / "videos").touch()
        for video in made:
            until(lambda video=video: client.videos.retrieve(video.id).status == "completed")
        nodes.running("fake", 1)
        for seed, video in enumerate(made):
            assert client.videos.download_content(video.id).content == pixels_of(seed, 24, 16)
        assert client.videos.delete(made[0].id).deleted
        until(lambda: {video.id for video in client.videos.list()} == {video.id for video in made[1:]})
