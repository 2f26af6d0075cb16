"""Typed schemas of configs: every field has a type and a range, which are checked before anything is allocated.

A schema is a class with annotated fields, which msgspec (https://jcristharif.com/msgspec) converts without coercion: no
text becomes a number, and no number a truth value. The message names the field, its value and what is expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from msgspec import inspect as types
from msgspec.structs import FieldInfo

# far beyond every published model, and small enough that a model of these sizes can be described without memory for it
Layers = Annotated[int, Meta(ge=1, le=4096)]
Heads = Annotated[int, Meta(ge=1, le=4096)]
HeadDim = Annotated[int, Meta(ge=1, le=4096)]
Width = Annotated[int, Meta(ge=1, le=1 << 20)]
Channels = Annotated[int, Meta(ge=1, le=1 << 16)]
Patch = Annotated[int, Meta(ge=1, le=256)]
Side = Annotated[int, Meta(ge=1, le=1024)]  # of the latent that a model was trained on, if nothing else is asked for
Tokens = Annotated[int, Meta(ge=1, le=1 << 16)]
Classes = Annotated[int, Meta(ge=1, le=1 << 24)]
Epsilon = Annotated[float, Meta(gt=0, lt=1)]
Part = Annotated[float, Meta(ge=0, le=1)]
Number = Annotated[float, Meta(ge=-1e6, le=1e6)]  # NaN and infinity are outside of every range
Zero = Annotated[float, Meta(ge=0, le=0)]
ZeroOrOne = Annotated[float, Meta(ge=0, le=1, multiple_of=1)]
Yes = Annotated[bool, Meta(extra={"only": True})]
No = Annotated[bool, Meta(extra={"only": False})]

SHOWN = 60  # characters of a value in a message
VARIANT = ": the other variant is not implemented"


class Schema(msgspec.Struct, frozen=True):
    """The base class of schemas; a field that may be absent has the default None."""


S = TypeVar("S", bound=Schema)


def checked(what: str, config: Mapping[str, Any], schema: type[S]) -> S:
    """Return the fields of a config as an object of the schema.

    what: what has the fields, for messages: "a DiT config", or a file. A null counts as absent. Fields that begin with
    "_" are comments; others that the schema lacks are refused if it forbids them (`forbid_unknown_fields`). Raises
    ValueError, with the field, for a value of another type or out of its range, and for one that is absent and needed.
    """
    given = {key: value for key, value in config.items() if value is not None and not key.startswith("_")}
    known = _fields(schema)
    if schema.__struct_config__.forbid_unknown_fields:
        for key in given:
            if key not in known:
                raise ValueError(f"got {what} with the unknown field {key[:SHOWN]}={shown(given[key])}")
    made = {}
    for name, field in known.items():
        if name in given:
            made[name] = _converted(what, name, given[name], field.type)
        elif field.required:
            raise ValueError(f"got {what} without {name}, expected {described(field.type)}")
    return schema(**made)


def shown(value: object) -> str:
    """Return a value as text for a message, cut if it is long."""
    if isinstance(value, int) and abs(value) >= 10**SHOWN:
        return f"a number of {value.bit_length()} bits"
    text = repr(value[:SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def described(kind: Any) -> str:
    """Return the values that a field takes, as text for a message: "a whole number from 1 to 4096"."""
    return _text(types.type_info(kind))


def _converted(what: str, name: str, value: object, wanted: Any) -> Any:
    """Return a value as the type of its field; `ValueError` with both if it is no such value."""
    try:
        made = msgspec.convert(value, wanted, strict=True)
        if _only(types.type_info(wanted)) in (None, made):
            return made
    except (msgspec.ValidationError, RecursionError):
        pass
    raise ValueError(f"got {what} with {name}={shown(value)}, expected {described(wanted)}")


@cache
def _fields(schema: type[Schema]) -> dict[str, FieldInfo]:
    return {field.name: field for field in msgspec.structs.fields(schema)}


def _only(info: types.Type) -> bool | None:
    """Return the only truth value that a field takes, or None if it takes both or is no such field."""
    for each in info.types if isinstance(info, types.UnionType) else (info,):
        if isinstance(each, types.Metadata):
            return (each.extra or {}).get("only")
    return None


def _text(info: types.Type) -> str:
    match info:
        case types.UnionType(types=several):
            return " or ".join(_text(each) for each in several if not isinstance(each, types.NoneType)) or "null"
        case types.Metadata():
            return f"{str(_only(info)).lower()}{VARIANT}"
        case types.LiteralType(values=values):
            return " or ".join(repr(value) for value in values if value is not None) + VARIANT
        case types.IntType() | types.FloatType():
            return _range(info)
        case types.ListType() | types.VarTupleType():
            return f"a list{_length(info)} of {_text(info.item_type)}"
        case types.TupleType(item_types=items):
            return f"a list of {len(items)}, each {_text(items[0])}"
        case types.DictType(value_type=values):
            return f"an object whose values are {_text(values)}"
    plain = {types.BoolType: "true or false", types.StrType: "text", types.NoneType: f"null{VARIANT}"}
    return plain.get(type(info), "another type")


def _range(info: types.IntType | types.FloatType) -> str:
    """Return the range of a number as text."""
    if info.ge is not None and info.ge == info.le:
        return f"{info.ge:g}{VARIANT}"
    name = "a whole number" if isinstance(info, types.IntType) or info.multiple_of == 1 else "a number"
    multiple = f", a multiple of {info.multiple_of:g}" if (info.multiple_of or 1) != 1 else ""
    ends = ((" from", info.ge), (" over", info.gt), (" to", info.le), (" to below", info.lt))
    return name + "".join(f"{word} {_short(end)}" for word, end in ends if end is not None) + multiple


def _short(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def _length(info: types.ListType | types.VarTupleType) -> str:
    ends: Iterable[str] = (str(end) for end in (info.min_length, info.max_length) if end is not None)
    return f" of length {' to '.join(ends)}" if info.max_length is not None else ""
