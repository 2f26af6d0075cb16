"""`seqpar serve` under Ray Serve: several replicas on several machines behind one address (docs/deploy/ray.md).

    applications:
      - name: seqpar
        import_path: seqpar.serve.ray:app
        args: {models: [black-forest-labs/FLUX.1-dev], gpus: 4, jobs: /shared/jobs, keys: /shared/keys.txt}

A replica is an actor that starts `seqpar serve` as it is and passes requests on to it. The ingress reads requests on a
CPU and picks a replica: the one that a job's id names, else one with the request's LoRAs, else the one with the fewest
requests. A request whose replica dies before it answers is retried once. Numbers of replicas and their autoscaling are
options of the deployments in the same file, as for any application.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import httpx
import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from ray.serve.request_router import MultiplexMixin, PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from seqpar.serve.api.errors import NO_RETRY, Problem, ProblemError, refused
from seqpar.serve.api.gate import ADMIN_MODELS, BODIES, VIDEOS, read_body, replayed
from seqpar.serve.api.images import encode_event
from seqpar.serve.api.requests import as_list, read_form

MANY = 1000  # concurrent calls of one replica, whose own queue is what refuses requests
DRAIN_S = 3600.0  # for the jobs of a replica that is removed: the longest deadline
HEALTH_S = 5.0  # between health checks
PROGRAM = (sys.executable, "-u", "-m", "seqpar.cli", "serve")
# the kernel kills the server when the actor has died in whatever way; its ranks then exit on their own
BOUND = ("setpriv", "--pdeathsig", "KILL", "--")
START_POLL_S = 0.2  # between checks whether a server is ready
LEAVE_S = 60.0  # from SIGTERM to SIGKILL; the server has finished its jobs before
TAIL = 20  # lines of a server's output that are kept
VIDEO_POLL_S = 0.5  # between checks of a running video
ATTEMPTS = 2  # at a request whose replica died before it answered
SLACK = 1  # requests that a replica may have more than another, before a switch of LoRAs is better than waiting
PROBE_S = 1.0  # for a replica to report its number of requests
CHUNK = 1 << 20  # bytes of an answer that are sent on together
DIED = (RayActorError, httpx.TransportError)
EVENTS = b"text/event-stream"
OF_ONE_CONNECTION = (b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer")
OF_RAY = (b"x-request-id", b"date")  # headers that Ray Serve adds; the id of a job is also in the body
OF_ONE_REPLICA = {  # paths -> what to use: any replica would answer for itself alone
    "/metrics": "Ray's metrics, or a replica's own port",
    ADMIN_MODELS: "another config file, or replicas whose requests load their models",
}
OF_JOB = re.compile(rb"/v1/(?:jobs|videos)/([A-Za-z0-9]+)-[^?]*(?:\?.*)?")
FORWARDED = b"x-forwarded-for"
NO_LORAS = "without LoRAs"
Headers = tuple[tuple[bytes, bytes], ...]
Parts = DeploymentResponseGenerator[Any]  # of an answer, as a replica yields them
logger = logging.getLogger("ray.serve")


class AppArgs(BaseModel):
    """`args` of the config file. Paths must be the same on all nodes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: Annotated[tuple[str, ...], Field(min_length=1, description="The models of every replica.")]
    gpus: Annotated[int | None, Field(ge=1, description="GPUs of a replica, all on one node.")] = None
    ranks: Annotated[int | None, Field(ge=1, description="Processes of a replica on CPUs, in place of gpus.")] = None
    jobs: Annotated[str, Field(description="As --jobs.")]
    keys: Annotated[str | None, Field(description="As --keys.")] = None
    loras: Annotated[str | None, Field(description="As --loras.")] = None
    trusted_proxies: Annotated[tuple[str, ...], Field(description="As --trusted-proxies, before Serve's proxy.")] = ()
    flags: Annotated[tuple[str, ...], Field(description="Further flags of `seqpar serve`.")] = ()
    program: Annotated[tuple[str, ...], Field(description="In place of `seqpar serve`.", min_length=1)] = PROGRAM

    @model_validator(mode="after")
    def _one_kind_of_ranks(self) -> AppArgs:
        if (self.gpus is None) == (self.ranks is None):
            raise ValueError(f"got gpus {self.gpus} and ranks {self.ranks}, expected one of them")
        return self

    @property
    def command(self) -> list[str]:
        flags: dict[str, object] = {"--gpus": self.gpus, "--ranks": self.ranks, "--host": "127.0.0.1", "--port": 0}
        flags |= {"--jobs": self.jobs, "--keys": self.keys, "--loras": self.loras}
        words = [str(word) for flag, value in flags.items() if value is not None for word in (flag, value)]
        proxies = ["--trusted-proxies", "127.0.0.1", *self.trusted_proxies]  # the actor is one of them
        return [*self.program, *self.models, *words, *proxies, *self.flags]


def app(args: dict[str, Any]) -> serve.Application:
    """The application that a config file names as `seqpar.serve.ray:app`."""
    checked = AppArgs.model_validate(args)
    replica = serve.deployment(
        name="Replica",
        ray_actor_options={"num_gpus": checked.gpus or 0, "num_cpus": checked.ranks or 1},
        max_ongoing_requests=MANY,
        graceful_shutdown_timeout_s=DRAIN_S,
        health_check_period_s=HEALTH_S,
        request_router_config={"request_router_class": Router},
    )(RayReplica)
    ingress = serve.deployment(name="Ingress", ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=MANY)(Ingress)
    return ingress.bind(replica.bind(checked.command), checked.loras is not None)


@dataclass(frozen=True)
class HttpCall:
    """A request. path: with its query, as it arrived."""

    method: str
    path: bytes
    headers: Headers
    body: bytes

    @property
    def makes_video(self) -> bool:
        """Whether it may begin a job whose end no client waits for."""
        return self.method == "POST" and self.path == VIDEOS.encode()

    @property
    def owner(self) -> str | None:
        """The replica that has the job of a path, which is the first part of the job's id."""
        match = OF_JOB.fullmatch(self.path)
        return None if match is None else match[1].decode()


@dataclass(frozen=True)
class Head:
    """Status and headers of an answer."""

    status: int
    headers: Headers

    @property
    def is_stream(self) -> bool:
        return dict(self.headers).get(b"content-type", b"").startswith(EVENTS)


class Router(MultiplexMixin, RequestRouter):
    """Ranks replicas for a request. Ray takes the one with the fewest requests of the first rank, or else the next."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The owner of the job; else replicas that had the same LoRAs last, then those without, then all."""
        if pending_request is None:
            return [candidate_replicas]
        name = cast("HttpCall", pending_request.args[0]).owner
        owner = [replica for replica in candidate_replicas if replica.replica_id.unique_id == name]
        loras = pending_request.metadata.multiplexed_model_id
        if owner or not loras:
            return [owner or candidate_replicas]
        lengths = await asyncio.gather(*map(self._length, candidate_replicas), return_exceptions=True)
        known = [(n, replica) for n, replica in zip(lengths, candidate_replicas, strict=True) if isinstance(n, int)]
        least = min((length for length, _ in known), default=0)
        near = [replica for length, replica in known if length <= least + SLACK]
        same = [replica for replica in near if loras in replica.multiplexed_model_ids]
        new = [replica for replica in near if not replica.multiplexed_model_ids]
        return [rank for rank in (same, new, candidate_replicas) if rank]

    async def _length(self, replica: RunningReplica) -> int:
        """Number of requests of a replica, also the ones just sent to it; an error if it is dead."""
        length = self.replica_queue_len_cache.get(replica.replica_id)
        if length is None:
            length = await replica.get_queue_len(deadline_s=PROBE_S)
            self.on_new_queue_len_info(replica.replica_id, length)
        return length


# the replica ---------------------------------------------------------------------------------------------------------


class Child:
    """A running server that is ready; RuntimeError with its last error if it exits before."""

    def __init__(self, command: Sequence[str]) -> None:
        words = [*BOUND, *command]
        self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self._tail, self._ready = deque[str](maxlen=TAIL), threading.Event()
        self.url = ""
        threading.Thread(target=self._pump, daemon=True).start()
        while not self._ready.wait(START_POLL_S):
            self.check()

    def check(self) -> None:
        """Raise RuntimeError if it has exited."""
        if self._process.poll() is not None:
            errors = [line for line in self._tail if line.startswith("error:")]
            unknown = f"error: the server exited with code {self._process.poll()}; see its log"
            raise RuntimeError(errors[-1] if errors else unknown)

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _pump(self) -> None:
        # pass its log on, and note where it listens and that it is ready
        for line in self._process.stderr or ():
            print(line, end="", file=sys.stderr, flush=True)
            self._tail.append(line.rstrip())
            event = json.loads(line) if line.startswith("{") and not self._ready.is_set() else {}
            if event.get("event") == "listening":
                self.url = f"http://127.0.0.1:{event['port']}"
            elif event.get("event") == "ready":
                self._ready.set()


class RayReplica:
    """The deployment with the GPUs. command: of its server, which gets the replica's id as its name."""

    def __init__(self, command: Sequence[str]) -> None:
        self._child = Child([*command, "--name", serve.get_replica_context().replica_tag])
        self._http = httpx.AsyncClient(base_url=self._child.url, timeout=None, trust_env=False, limits=httpx.Limits())

    async def answer(self, call: HttpCall) -> AsyncIterator[Head | bytes | None]:
        """Yield the head of an answer, its body and None. The call of a new video lasts as long as the video is made.

        So each job of the server's queue is a call that Ray counts: to choose a replica, for autoscaling, and before it
        removes a replica.
        """
        if loras := serve.get_multiplexed_model_id():
            await cast("Any", self.loras)(loras)
        answer = await self._http.send(self._request(call.method, call.path, call.headers, call.body), stream=True)
        try:
            head = Head(answer.status_code, _passed_on(answer.headers.raw))
            yield head
            async for chunk in answer.aiter_raw(None if head.is_stream else CHUNK):
                yield chunk
        finally:
            await answer.aclose()
        yield None
        if call.makes_video and answer.is_success:
            await self._video_has_ended(answer.headers["x-request-id"], call.headers)

    @serve.multiplexed(max_num_models_per_replica=1)
    async def loras(self, names: str) -> str:
        """Note which LoRAs the server merged last, by which Ray's router finds it."""
        return names

    async def check_health(self) -> None:
        """Raise an error if the server has exited or does not answer; Ray then starts another replica."""
        self._child.check()
        (await self._http.get("/health")).raise_for_status()

    def __del__(self) -> None:
        """Stop the server; Ray calls this when all calls have ended."""
        if hasattr(self, "_child"):
            self._child.end()

    def _request(self, method: str, path: bytes, headers: Headers, body: bytes = b"") -> httpx.Request:
        url = httpx.URL(self._child.url).copy_with(raw_path=path)
        return httpx.Request(method, url, headers=_passed_on(headers), content=body)

    async def _video_has_ended(self, id_: str, headers: Headers) -> None:
        """Wait until a video has ended, with the key, address and Host of its client."""
        client = tuple(pair for pair in headers if pair[0] in (b"authorization", b"host", FORWARDED))
        request = self._request("GET", f"{VIDEOS}/{id_}".encode(), client)
        while (answer := await self._http.send(request)).is_success:
            if answer.json()["status"] not in ("queued", "in_progress"):
                break
            await asyncio.sleep(VIDEO_POLL_S)


def _passed_on(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    return tuple((name.lower(), value) for name, value in headers if name.lower() not in OF_ONE_CONNECTION)


# the ingress ---------------------------------------------------------------------------------------------------------


class Ingress:
    """The deployment that gets requests. has_loras: whether requests may name LoRAs."""

    def __init__(self, replicas: DeploymentHandle, has_loras: bool) -> None:
        self._replicas, self._has_loras = replicas, has_loras
        self._videos = set[asyncio.Task[None]]()  # calls that last until a video is made

    async def __call__(self, request: Request) -> Response:
        try:
            call = await _call(request)
            loras = await _loras(call, request) if self._has_loras and call.body else ""
            return await self._answer(call, loras)
        except ProblemError as error:
            return error.problem.response()

    async def _answer(self, call: HttpCall, loras: str) -> Response:
        """Ask a replica, and a second one if it dies before the answer is whole, or before a long one has begun."""
        for _ in range(ATTEMPTS):
            handle = self._replicas.options(stream=True, multiplexed_model_id=loras)
            answer = cast("Parts", handle.answer.remote(call))
            try:
                head = await anext(answer)
                body = self._body(call, head, answer)
                is_large = call.method == "GET" and int(dict(head.headers).get(b"content-length", b"0")) > CHUNK
                if is_large or head.is_stream:
                    response: Response = StreamingResponse(body, head.status)
                else:  # read whole first, so that it can be retried when its replica dies within it
                    response = Response(b"".join([chunk async for chunk in body]), head.status)
            except DIED as error:
                logger.warning("a replica died before it answered: %s", error)
                continue
            except asyncio.CancelledError:
                answer.cancel()
                raise
            response.raw_headers = [pair for pair in head.headers if pair[0] not in OF_RAY]
            return response
        text = f"the replica of the request died {ATTEMPTS} times; the request is not retried, change it"
        raise ProblemError(Problem(500, "replica_died", text, headers=NO_RETRY))

    async def _body(self, call: HttpCall, head: Head, answer: Parts) -> AsyncIterator[bytes]:
        """Yield the body. A stream of events whose replica dies ends with an error, any other answer raises it."""
        has_ended = False
        try:
            async for chunk in answer:
                if chunk is None:
                    has_ended = True
                    break
                yield chunk
        except DIED:
            if not head.is_stream:
                raise
            problem = Problem(500, "replica_died", "the replica died before the answer was complete; retry")
            yield encode_event("error", error=problem.shape)
        finally:
            if has_ended and call.makes_video:
                task = asyncio.create_task(_drain(answer))
                self._videos.add(task)
                task.add_done_callback(self._videos.discard)
            elif not has_ended:
                answer.cancel()


async def _drain(answer: Parts) -> None:
    try:
        async for _ in answer:
            pass
    except DIED as error:
        logger.warning("a replica died while it made a video: %s", error)


async def _call(request: Request) -> HttpCall:
    """Read a request, with a body only where one is taken, whose length is bounded."""
    path, scope = request.url.path, request.scope
    if path in OF_ONE_REPLICA:
        raise refused(404, "not_found", f"{path} is not available here; use {OF_ONE_REPLICA[path]}")
    kinds = BODIES.get(path) if request.method == "POST" else None
    body = b"" if kinds is None else await read_body(kinds, request.headers, request.receive)
    query = scope["query_string"]
    raw = scope.get("raw_path") or path.encode()
    headers = [pair for pair in scope["headers"] if pair[0] != FORWARDED]
    before = [value for name, value in scope["headers"] if name == FORWARDED]
    if request.client is not None:  # whom Serve's proxy has answered; without keys its address is its key
        headers.append((FORWARDED, b", ".join([*before, request.client.host.encode()])))
    return HttpCall(request.method, raw + (b"?" + query if query else b""), tuple(headers), body)


class LoraField(msgspec.Struct):
    """The field of a body that decides which replica is best; the replica checks all of it."""

    lora: Any = None


async def _loras(call: HttpCall, request: Request) -> str:
    """The names of a body's LoRAs as one word. An invalid body has none here; the replica refuses it."""
    try:
        if request.headers.get("content-type", "").lower().startswith("multipart/"):
            form = await read_form(Request(request.scope, replayed(call.body, request.receive)))
            lora = form.texts.get("lora")
        else:
            lora = msgspec.json.decode(call.body, type=LoraField).lora
    except (ProblemError, msgspec.MsgspecError):
        return NO_LORAS
    loras = as_list(lora)
    named = [x for x in loras if isinstance(x, dict)] if isinstance(loras, list) else []
    names = [str(x.get("name") or x.get("lora_name") or x.get("adapter")) for x in named]
    return "+".join(sorted(names)) or NO_LORAS
