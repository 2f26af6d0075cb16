"""One replica: an actor with the GPUs, which starts `seqpar serve` as it is and hands calls on to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import httpx
from ray import serve

from seqpar.serve.front.gate import VIDEOS
from seqpar.serve.ray.child import Child

POLL_S = 0.5  # between looks at a video that is made
CHUNK = 1 << 20  # bytes of an answer that are sent on together
EVENTS = b"text/event-stream"
OF_ONE_CONNECTION = (b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer")
GOES_ON = ("queued", "in_progress")
Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class HttpCall:
    """A request. path: with its query, as it came."""

    method: str
    path: bytes
    headers: Headers
    body: bytes

    @property
    def makes_video(self) -> bool:
        """Return whether a job may begin with it whose end no client waits for."""
        return self.method == "POST" and self.path == VIDEOS.encode()


@dataclass(frozen=True)
class Head:
    """How an answer begins."""

    status: int
    headers: Headers


class RayReplica:
    """The deployment. command: of the server, which listens at a free port of this machine."""

    def __init__(self, command: Sequence[str]) -> None:
        self._child = Child(command)
        self._http = httpx.AsyncClient(base_url=self._child.url, timeout=None, trust_env=False, limits=httpx.Limits())

    async def answer(self, call: HttpCall) -> AsyncIterator[Head | bytes | None]:
        """Yield the head of an answer, its body and None. A new video's call lasts as long as the video is made.

        So each job of the server's queue is a call that Serve counts: for its choice of a replica, for autoscaling, and
        before it ends a replica.
        """
        if loras := serve.get_multiplexed_model_id():
            await cast("Any", self.loras)(loras)
        request = self._request(call.method, call.path, call.headers, call.body)
        answer = await self._http.send(request, stream=True)
        try:
            head = Head(answer.status_code, _passed_on(answer.headers.raw))
            yield head
            is_stream = dict(head.headers).get(b"content-type", b"").startswith(EVENTS)
            async for chunk in answer.aiter_raw(None if is_stream else CHUNK):
                yield chunk
        finally:
            await answer.aclose()
        yield None
        if call.makes_video and answer.is_success:
            await self._video_has_ended(answer.headers["x-request-id"], call.headers)

    @serve.multiplexed(max_num_models_per_replica=1)
    async def loras(self, names: str) -> str:
        """Note which LoRAs the server merged last, by which Serve's router finds it."""
        return names

    async def check_health(self) -> None:
        """Raise an error if the server has ended or does not answer; Serve then starts another replica."""
        self._child.check()
        (await self._http.get("/health")).raise_for_status()

    def __del__(self) -> None:
        """End the server; Serve calls it when all calls have ended."""
        if hasattr(self, "_child"):
            self._child.end()

    def _request(self, method: str, path: bytes, headers: Headers, body: bytes = b"") -> httpx.Request:
        url = httpx.URL(self._child.url).copy_with(raw_path=path)
        return httpx.Request(method, url, headers=_passed_on(headers), content=body)

    async def _video_has_ended(self, id_: str, headers: Headers) -> None:
        """Wait until a video has ended, asked for by the same key and the same name of the server."""
        asks = tuple(pair for pair in headers if pair[0] in (b"authorization", b"host"))
        request = self._request("GET", f"{VIDEOS}/{id_}".encode(), asks)
        while (told := await self._http.send(request)).is_success and told.json()["status"] in GOES_ON:
            await asyncio.sleep(POLL_S)


def _passed_on(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """Return headers without those of one connection."""
    return tuple((name.lower(), value) for name, value in headers if name.lower() not in OF_ONE_CONNECTION)
