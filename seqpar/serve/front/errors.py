"""What a request can end in other than pictures: OpenAI's shape of errors, one sentence each, with its HTTP status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from seqpar.serve.messages import Why

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
CODES = {400: "bad_request", 404: "not_found", 405: "method_not_allowed", 500: "failure", 503: "not_ready"}
ENDS: Mapping[Why, tuple[int, str]] = {
    "mistake": (400, "mistake"),
    "failure": (500, "failure"),
    "cancelled": (499, "cancelled"),
    "deadline": (504, "deadline"),
}
NO_RETRY = {"x-should-retry": "false"}  # the openai client asks again after a 5xx unless it is told not to
SHOWN = 80  # characters of a value that a message quotes
NAMED = 3  # unknown fields that a message names


@dataclass(frozen=True)
class Problem:
    """Why a request was refused or failed. param: the field of the request that is wrong."""

    status: int
    code: str
    text: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def shape(self) -> dict[str, str | None]:
        """Return OpenAI's object of an error."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"message": self.text, "type": kind, "param": self.param, "code": self.code}

    def response(self) -> JSONResponse:
        """Return the answer in OpenAI's shape."""
        return JSONResponse({"error": self.shape}, self.status, headers=dict(self.headers))


class ProblemError(Exception):
    """Raised where a request ends in a problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text)
        self.problem = problem


def of_ranks(why: Why, text: str) -> Problem:
    """Return what the ranks' own word for a failed order is in HTTP. A deadline that has passed is not tried again."""
    status, code = ENDS[why]
    return Problem(status, code, text, headers=NO_RETRY if why == "deadline" else {})


def of_validation(errors: Sequence[Mapping[str, Any]]) -> Problem:
    """Return one sentence about fields that are wrong; it names some unknown ones, or else the first that is wrong."""
    unknown = [_name(each) for each in errors if each["type"] == "extra_forbidden"]
    if unknown:
        more = f" and {len(unknown) - NAMED} more" if len(unknown) > NAMED else ""
        text = f"got unknown fields {', '.join(unknown[:NAMED])}{more}, expected those of /openapi.json; leave them out"
        return Problem(400, "unknown_field", text, unknown[0][:SHOWN])
    first = errors[0]
    name, said = _name(first), str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return Problem(400, "invalid_json", "got a body that is not JSON, expected a JSON object; see /openapi.json")
    if first["type"] == "missing":
        return Problem(400, "missing_field", f"got no {name}, expected one; see /openapi.json", name)
    expected = said.replace("Input should be", "expected", 1)
    expected = expected if "expected" in expected else f"expected another value: {expected}"
    return Problem(400, "invalid_value", f"got {name} {_shown(first.get('input'))}, {expected}", name)


def _name(error: Mapping[str, Any]) -> str:
    """Return the path of a field within the body."""
    return _short(".".join(str(part) for part in error["loc"] if part != "body") or "body")


def _shown(value: Any) -> str:
    return _short(repr(value))


def _short(text: str) -> str:
    """Return a text of limited length that can be encoded and stays on one line."""
    text = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def handle_errors(app: FastAPI) -> None:
    """Answer every error of the application in OpenAI's shape."""

    async def ours(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ProblemError)
        return error.problem.response()

    async def validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return of_validation(error.errors()).response()

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        text = f"got {request.method} {_short(request.url.path)}, expected a path and method of /openapi.json"
        if error.status_code not in (404, 405):
            text = f"got a request that could not be read, expected one of /openapi.json: {_short(str(error.detail))}"
        code = CODES.get(error.status_code, "bad_request")
        return Problem(error.status_code, code, text, headers=dict(error.headers or {})).response()

    async def bug(request: Request, error: Exception) -> JSONResponse:
        return Problem(500, "failure", "the server failed for a reason that its log tells", headers={}).response()

    app.add_exception_handler(ProblemError, ours)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, bug)
