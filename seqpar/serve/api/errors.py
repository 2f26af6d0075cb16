"""Errors of requests: OpenAI's JSON shape, one sentence each, with the HTTP status."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from seqpar.serve.messages import Why
from seqpar.types.flags import near

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
CODES = {400: "bad_request", 404: "not_found", 405: "method_not_allowed", 500: "failure", 503: "not_ready"}
STATUSES: Mapping[Why, int] = {"mistake": 400, "failure": 500, "cancelled": 499, "deadline": 504}
NO_RETRY = {"x-should-retry": "false"}  # stops the OpenAI client from retrying 5xx
SHOWN = 80  # characters of a value that a message quotes
NAMED = 3  # unknown fields that a message names


@dataclass(frozen=True)
class Problem:
    """Why a request was refused or failed. param: the invalid field."""

    status: int
    code: str
    text: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def shape(self) -> dict[str, str | None]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"message": self.text, "type": kind, "param": self.param, "code": self.code}

    def response(self) -> JSONResponse:
        return JSONResponse({"error": self.shape}, self.status, headers=dict(self.headers))


class ProblemError(Exception):
    """Ends a request with a problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text)
        self.problem = problem


def refused(status: int, code: str, text: str, param: str | None = None, **headers: str) -> ProblemError:
    """A `ProblemError`; headers by their names with _ in place of -."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return ProblemError(Problem(status, code, text, param, named))


def of_ranks(why: Why, text: str) -> Problem:
    return Problem(STATUSES[why], why, text, headers=NO_RETRY if why == "deadline" else {})


def of_validation(errors: Sequence[Mapping[str, Any]], known: Iterable[str] = ()) -> Problem:
    """One sentence about invalid fields: some unknown ones, or else the first invalid one. known: names of fields."""
    unknown = [_path(error) for error in errors if error["type"] == "extra_forbidden"]
    if unknown:
        more = f" and {len(unknown) - NAMED} more" if len(unknown) > NAMED else ""
        text = f"unknown fields {', '.join(unknown[:NAMED])}{more}{near(unknown[0], known) or '; see /openapi.json'}"
        return Problem(400, "unknown_field", text, unknown[0][:SHOWN])
    error = errors[0]
    name, said = _path(error), str(error["msg"])
    if error["type"] == "json_invalid":
        return Problem(400, "invalid_json", "the body is not JSON; send a JSON object, see /openapi.json")
    if error["type"] == "missing":
        return Problem(400, "missing_field", f"{name} is required; see /openapi.json", name)
    if error["type"] == "value_error":  # from our validators: the text after the value
        said = said.removeprefix("Value error, ")
    else:
        _, should, rest = said.partition("should")
        said = f"{should}{rest}" if should else f"is not valid: {said}"
    text = said if name == "body" and error["type"] == "value_error" else f"{name} {_quoted(error.get('input'))} {said}"
    return Problem(400, "invalid_value", text, name)


def _path(error: Mapping[str, Any]) -> str:
    return short(".".join(str(part) for part in error["loc"] if part != "body") or "body")


def _quoted(value: Any) -> str:
    return short(repr(value))


def short(text: str, most: int = SHOWN) -> str:
    """A client's text for a message: of limited length, printable and on one line."""
    text = text if len(text) <= most else f"{text[:most]}..."
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def handle_errors(app: FastAPI, known: Iterable[str] = ()) -> None:
    """Answer all errors of an application in OpenAI's shape. known: names of the fields of its bodies."""

    async def problem(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ProblemError)
        return error.problem.response()

    async def validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return of_validation(error.errors(), known).response()

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        text = f"no route {request.method} {short(request.url.path)}; see /openapi.json"
        if error.status_code not in (404, 405):
            text = f"the request cannot be read: {short(str(error.detail))}; see /openapi.json"
        code = CODES.get(error.status_code, "bad_request")
        return Problem(error.status_code, code, text, headers=dict(error.headers or {})).response()

    async def bug(request: Request, error: Exception) -> JSONResponse:
        return Problem(500, "failure", "internal error; the server's log has the reason").response()

    app.add_exception_handler(ProblemError, problem)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, bug)
