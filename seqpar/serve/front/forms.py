"""Reads bodies of multipart/form-data: texts that become the fields of a request, and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import UploadFile

from seqpar.serve.front.errors import Problem, ProblemError, of_validation
from seqpar.serve.front.schema import CommonFields

MOST_FILES, MOST_FIELDS = 17, 64  # sixteen pictures and a mask
FieldsT = TypeVar("FieldsT", bound=CommonFields)


@dataclass(frozen=True)
class FormBody:
    """A body of several parts. Files have no names here: what a client calls them means nothing."""

    texts: dict[str, str]
    files: Mapping[str, Sequence[bytes]]

    def fields(self, kind: type[FieldsT]) -> FieldsT:
        """Return the texts as the fields of a request, "3" as a number; ProblemError for what does not fit."""
        try:
            return kind.model_validate(self.texts, strict=False)
        except ValidationError as error:
            raise ProblemError(of_validation(error.errors())) from error

    def files_of(self, *names: str) -> list[bytes]:
        """Return the files of some fields, in order; ProblemError for files of any other."""
        other = next((name for name in self.files if name not in names), None)
        if other is not None:
            text = f"got unknown files {other[:80]!r}, expected {' or '.join(names)}; leave them out"
            raise ProblemError(Problem(400, "unknown_field", text, other[:80]))
        return [file for name in names for file in self.files.get(name, ())]


async def read_form(request: Request) -> FormBody:
    """Return the body of a request; ProblemError for a text that is given twice. The gate has bounded its length."""
    texts, files = dict[str, str](), dict[str, list[bytes]]()
    async with request.form(max_files=MOST_FILES, max_fields=MOST_FIELDS) as form:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                files.setdefault(name, []).append(await value.read())
            elif name in texts:
                text = f"got {name[:80]!r} twice, expected it once"
                raise ProblemError(Problem(400, "invalid_value", text, name[:80]))
            else:
                texts[name] = value
    return FormBody(texts, files)


def body_of(kind: type[CommonFields], files: Mapping[str, Any]) -> dict[str, Any]:
    """Return how /openapi.json describes such a body. files: what is said of each of its files."""
    schema = kind.model_json_schema()
    schema["properties"] |= {name: {"type": "string", "format": "binary", **about} for name, about in files.items()}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
