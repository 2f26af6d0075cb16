"""What every HTTP request passes first: its origin, its key, and for a body its type and its length.

No page of another site gets through: without keys the Host must be a name of this machine, so that a name that leads
here by someone else's DNS is refused, and an Origin must always be the server's own.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from time import monotonic
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seqpar.serve.front import log
from seqpar.serve.front.errors import Problem, ProblemError
from seqpar.serve.front.keys import Keys

GENERATIONS, EDITS, VIDEOS = "/v1/images/generations", "/v1/images/edits", "/v1/videos"
JSON, FORM = "application/json", "multipart/form-data"
LONGEST = {JSON: 1_000_000, FORM: 50_000_000}  # bytes of a body
BODIES = {GENERATIONS: (JSON,), EDITS: (FORM,), VIDEOS: (JSON, FORM)}  # the routes that take one
BODY_S = 60.0  # for a body to arrive
OPEN = ("/", "/health", "/ready", "/openapi.json")  # need no key
OWN = frozenset({"localhost", "127.0.0.1", "::1"})
NO_KEY = "got no key of this server, expected the header Authorization: Bearer KEY; ask who runs it for one"


@dataclass(frozen=True)
class Gate:
    """An ASGI application before another one. hosts: names by which this server may be called if it has no keys."""

    app: ASGIApp
    keys: Keys | None
    hosts: frozenset[str]
    body_s: float = BODY_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer what is wrong with it; every answer has the request's id."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        id_, begun = secrets.token_urlsafe(12), monotonic()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = id_
                told = {"method": scope["method"], "path": scope["path"], "status": message["status"]}
                log.event("answered", id_, **told, seconds=round(monotonic() - begun, 3))
            await send(message)

        try:
            key = self._key_of(scope)
            scope.setdefault("state", {}).update(id=id_, key=key)
            if scope["method"] == "POST" and scope["path"] in BODIES:
                kinds = BODIES[scope["path"]]
                # no name for the body, up to 50 MB, which would keep it until the request is answered
                receive = replayed(await read_body(kinds, Headers(scope=scope), receive, self.body_s), receive)
        except ProblemError as error:
            await error.problem.response()(scope, receive, named)
            return
        await self.app(scope, receive, named)

    def _key_of(self, scope: Scope) -> str:
        """Return the name of the request's key, "" where none is needed."""
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if self.keys is None and not (len(hosts) == 1 and _name(hosts[0]) in OWN | self.hosts):
            raise _refused(f"got Host {', '.join(hosts)[:80]!r}, expected a name of this server, as localhost")
        if any(not _is_of(origin, hosts) for origin in origins):
            raise _refused(f"got Origin {origins[0][:80]!r}, expected none or the server's own; ask from no other site")
        if self.keys is None:
            if scope["path"] == "/metrics" and not _is_local(scope):
                raise _refused("got /metrics from another machine, expected a key; start the server with --keys")
            return ""
        if scope["path"] in OPEN:
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        name = self.keys.name_of(key.strip()) if scheme.lower() == "bearer" else None
        if name is None:
            raise ProblemError(Problem(401, "invalid_api_key", NO_KEY, headers={"www-authenticate": "Bearer"}))
        return name


async def read_body(kinds: Sequence[str], headers: Headers, receive: Receive, within_s: float = BODY_S) -> bytes:
    """Return the body of a request; ProblemError if it is of no such type, or long.

    A body that states its length, or that grows too long, is refused before the rest is read.
    """
    named, stated = headers.get("content-type", ""), headers.get("content-length", "0")
    kind = named.partition(";")[0].strip().lower()
    if kind not in kinds:
        text = f"got content-type {named[:80]!r}, expected {' or '.join(kinds)}"
        raise ProblemError(Problem(415, "unsupported_media_type", text))
    longest = LONGEST[kind]
    _check_length(int(stated) if stated.isdecimal() else 0, longest)
    try:
        async with asyncio.timeout(within_s):
            return await _body(receive, longest)
    except TimeoutError as error:
        text = f"got no whole body within {within_s:g} s, expected one of at most {longest} bytes; send it again"
        raise ProblemError(Problem(408, "timeout", text)) from error


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return what gives a body that was read to an application, and then what else comes."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def messages() -> Message:
        return first.pop() if first else await receive()

    return messages


async def _body(receive: Receive, longest: int) -> bytes:
    """Return a body; ProblemError if the client leaves before its end, who then reads no answer."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ProblemError(Problem(499, "cancelled", "the client left before the body was whole"))
        body += message.get("body", b"")
        more = message.get("more_body", False)
        _check_length(len(body), longest)
    return bytes(body)


def _check_length(count: int, longest: int) -> None:
    if count > longest:
        text = f"got a body of {count} bytes or more, expected at most {longest}; send a shorter one"
        raise ProblemError(Problem(413, "too_large", text))


def _refused(text: str) -> ProblemError:
    return ProblemError(Problem(403, "forbidden", text))


def _name(host: str) -> str | None:
    """Return the name in a Host header, without the port; None if it is no such thing."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _is_of(origin: str, hosts: Sequence[str]) -> bool:
    """Return whether an Origin is of the host that was asked; none is that cannot be read, or of a request without."""
    try:
        return urlsplit(origin).netloc in hosts
    except ValueError:
        return False


def _is_local(scope: Scope) -> bool:
    client = scope.get("client")
    return client is not None and is_loopback(client[0])


def is_loopback(host: str) -> bool:
    """Return whether an address, or localhost, is of this machine alone."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
