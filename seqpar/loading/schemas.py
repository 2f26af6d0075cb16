"""Typed fields of config.json, for the models and decoders whose fields this package computes with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from msgspec import inspect as types

from seqpar.types.arguments import shown

# far beyond every published model, and small enough to build a model of these sizes on the meta device
Layers = Annotated[int, Meta(ge=1, le=4096)]
Heads = Annotated[int, Meta(ge=1, le=4096)]
HeadDim = Annotated[int, Meta(ge=1, le=4096)]
Width = Annotated[int, Meta(ge=1, le=1 << 20)]
Channels = Annotated[int, Meta(ge=1, le=1 << 16)]
Patch = Annotated[int, Meta(ge=1, le=256)]
Side = Annotated[int, Meta(ge=1, le=1024)]  # of the latent that a model was trained on
Tokens = Annotated[int, Meta(ge=1, le=1 << 16)]
Classes = Annotated[int, Meta(ge=1, le=1 << 24)]
Epsilon = Annotated[float, Meta(gt=0, lt=1)]
Positive = Annotated[float, Meta(gt=0, le=1e6)]
Number = Annotated[float, Meta(ge=-1e6, le=1e6)]  # NaN and infinity are outside of every range
Zero = Annotated[float, Meta(ge=0, le=0)]
ZeroOrOne = Annotated[float, Meta(ge=0, le=1, multiple_of=1)]
Yes = Annotated[bool, Meta(extra={"only": True})]
No = Annotated[bool, Meta(extra={"only": False})]


class Schema(msgspec.Struct, frozen=True):
    """The base class of schemas; a field that may be absent has the default None."""


S = TypeVar("S", bound=Schema)


def checked(what: str, config: Mapping[str, Any], schema: type[S]) -> S:
    """Return the fields of a config as an object of the schema.

    what: what has the fields, for messages: "a DiT config", or a file. A null counts as absent. Fields that begin with
    "_" are comments; others that the schema lacks are rejected if it forbids them (`forbid_unknown_fields`). Raises
    ValueError for a value of another type or out of its range, and for a missing one.
    """
    fields = {key: value for key, value in config.items() if value is not None and not key.startswith("_")}
    try:
        read = msgspec.convert(fields, schema, strict=True)
    except msgspec.ValidationError as error:
        text, _, path = str(error).replace("`", "").partition(" - at ")
        if (name := re.search(r"\$\.(\w+)", path)) is None:  # an unknown field, or a missing one
            raise ValueError(f"got {what}: {text[:200]}") from error
        raise _error(what, name[1], fields[name[1]], schema, text.removeprefix("Expected ")) from error
    for name in _few(schema).keys() & fields.keys():
        if fields[name] not in _few(schema)[name]:
            raise _error(what, name, fields[name], schema, "")
    return read


def _error(what: str, name: str, value: object, schema: type[Schema], expected: str) -> ValueError:
    if name in _few(schema):
        values = " or ".join(map(repr, _few(schema)[name]))
        expected = f"{values}: the other variant is not implemented"
    return ValueError(f"got {what} with {name}={shown(value)}, expected {expected}")


@cache
def _few(schema: type[Schema]) -> dict[str, tuple[Any, ...]]:
    """Return field -> its values, for fields that take only a few; msgspec knows no single truth value."""
    few: dict[str, tuple[Any, ...]] = {}
    for field in msgspec.structs.fields(schema):
        info = types.type_info(field.type)
        for option in info.types if isinstance(info, types.UnionType) else (info,):
            if isinstance(option, types.LiteralType):
                few[field.name] = option.values
            elif isinstance(option, types.Metadata):
                few[field.name] = ((option.extra or {})["only"],)
    return few
