"""The gate that every HTTP request passes first: host, origin, API key, and for a body its type and length.

No page of another site gets through. Without keys the Host must be a name of this machine, so that a foreign DNS name
that leads here is refused; an Origin must always be the server's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seqpar.serve.api.access import PROBES
from seqpar.serve.api.errors import ProblemError, refused, short
from seqpar.serve.api.keys import KeyFile

GENERATIONS, EDITS, VIDEOS = "/v1/images/generations", "/v1/images/edits", "/v1/videos"
ADMIN_MODELS = "/admin/models"
JSON, FORM = "application/json", "multipart/form-data"
LONGEST = {JSON: 1_000_000, FORM: 50_000_000}  # bytes of a body
BODIES = {GENERATIONS: (JSON,), EDITS: (FORM,), VIDEOS: (JSON, FORM), ADMIN_MODELS: (JSON,)}  # routes that take a body
BODY_S = 60.0  # for a body to arrive
OPEN = ("/", *PROBES, "/openapi.json")  # need no key
OWN = frozenset({"localhost", "127.0.0.1", "::1"})
NO_KEY = "missing or invalid API key; send the header Authorization: Bearer KEY"


@dataclass(frozen=True)
class Gate:
    """ASGI middleware. hosts: names of this server besides localhost."""

    app: ASGIApp
    keys: KeyFile | None
    hosts: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            if {"content-length", "transfer-encoding"} <= {*Headers(scope=scope)}:
                # a proxy may have believed the other one, and taken the rest for another client's request
                text = "content-length and transfer-encoding exclude each other; send one"
                raise refused(400, "invalid_value", text, connection="close")
            key = self._key_of(scope)
            scope.setdefault("state", {})["key"] = key
            if scope["method"] == "POST" and scope["path"] in BODIES:
                kinds = BODIES[scope["path"]]
                # no name for the body, up to 50 MB, which would keep it until the request is answered
                receive = replayed(await read_body(kinds, Headers(scope=scope), receive), receive)
        except ProblemError as error:
            await error.problem.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _key_of(self, scope: Scope) -> str:
        """The name of the request's key, "" where none is needed; without keys the address of its client."""
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if self.keys is None and not (len(hosts) == 1 and _host_name(hosts[0]) in OWN | self.hosts):
            text = f"Host {short(', '.join(hosts))!r} is no name of this server; use localhost"
            raise refused(403, "forbidden", text)
        if any(not _is_of(origin, hosts) for origin in origins):
            text = f"Origin {short(origins[0])!r} is another site; only the server's own pages may send requests"
            raise refused(403, "forbidden", text)
        if self.keys is None:
            client = address_of(scope)
            if scope["path"] == "/metrics" and client:
                raise refused(403, "forbidden", "a server without API keys sends /metrics to its own machine only")
            return client
        if scope["path"] in OPEN:
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        name = self.keys.keys.name_of(key.strip()) if scheme.lower() == "bearer" else None
        if name is None:
            raise refused(401, "invalid_api_key", NO_KEY, www_authenticate="Bearer")
        return name


async def read_body(kinds: Sequence[str], headers: Headers, receive: Receive) -> bytes:
    """Read the body of a request; ProblemError for another type, or too many bytes.

    A body that is too long is refused before the rest is read, by its stated length or by what has arrived.
    """
    stated_kind, stated = headers.get("content-type", ""), headers.get("content-length", "0")
    kind = stated_kind.partition(";")[0].strip().lower()
    if kind not in kinds:
        text = f"content-type {short(stated_kind)!r} is not supported; use {' or '.join(kinds)}"
        raise refused(415, "unsupported_media_type", text)
    longest = LONGEST[kind]
    _check_length(int(stated) if stated.isdecimal() else 0, longest)
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(BODY_S):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":  # the client reads no answer
                    raise refused(499, "cancelled", "the client disconnected before the body was complete")
                body += message.get("body", b"")
                more = message.get("more_body", False)
                _check_length(len(body), longest)
    except TimeoutError as error:
        raise refused(408, "timeout", f"the body did not arrive within {BODY_S:g} s; retry") from error
    return bytes(body)


def replayed(body: bytes, receive: Receive) -> Receive:
    """An ASGI `receive` that gives a body that was read before, and then what else arrives."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def messages() -> Message:
        return first.pop() if first else await receive()

    return messages


def _check_length(count: int, longest: int) -> None:
    if count > longest:
        raise refused(413, "too_large", f"body of {count} bytes or more exceeds the limit of {longest}; send less")


def _host_name(host: str) -> str | None:
    """The name in a Host header, without the port; None for anything else."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _is_of(origin: str, hosts: Sequence[str]) -> bool:
    """Whether an Origin is of the requested host; an unreadable one is not."""
    try:
        return urlsplit(origin).netloc in hosts
    except ValueError:
        return False


def address_of(scope: Scope) -> str:
    """The client of a request: its address, of IPv6 the /64, because one client has all of it; "" for this machine.

    Behind trusted proxies uvicorn has put the address here that the last of them saw.
    """
    host = (scope.get("client") or ("unknown",))[0]
    try:
        address = ip_address(host)
    except ValueError:
        return "unknown"
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return ""
    return str(address if address.version == 4 else ip_network((int(address), 64), strict=False))


def is_loopback(host: str) -> bool:
    """Whether an address, or localhost, belongs to this machine alone."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
