"""The access log: for each HTTP request its id, one line when its answer has ended, and a count by status."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seqpar.serve.api import log
from seqpar.serve.api.errors import short

PROBES = ("/health", "/ready")  # asked every few seconds, and not logged
BUSY_S = 60.0  # between two lines of answers 503: clients and load balancers ask all the time while models load
LONGEST_PATH = 256  # characters that a line has
LEFT = 499  # of a request whose client left before the answer began


@dataclass(frozen=True)
class AccessLog:
    """ASGI middleware, the outermost one. name: of this server, with which ids begin.

    on_answer(method, route, status): called for each answer; route: "" where no route gave it, method: "" also for 405.
    """

    app: ASGIApp
    name: str
    on_answer: Callable[[str, str, int], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; the answer has the request's id as a header."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        id_, begun = f"{self.name}-{secrets.token_urlsafe(12)}", monotonic()
        state = scope.setdefault("state", {})
        state["id"] = id_
        status, sent = LEFT, 0

        async def send_with_id(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = id_
                status = message["status"]
            sent += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", "")
            # 405: a client's own word, which would stay as a label for ever
            self.on_answer(scope["method"] if route and status != 405 else "", route, status)
            client = scope.get("client")
            # a client's own words, as long as the headers may be
            method, path = short(scope["method"]), short(scope["path"], LONGEST_PATH)
            facts: dict[str, Any] = {"method": method, "path": path, "status": status, "bytes": sent}
            facts |= {"seconds": round(monotonic() - begun, 3), "key": state.get("key"), "client": client and client[0]}
            if status == 503:
                log.often("answered", id_, every_s=BUSY_S, **facts)
            elif scope["path"] not in PROBES:
                log.event("answered", id_, **facts)
