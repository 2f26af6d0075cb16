"""Command lines from dataclasses: a field is a flag, and the string below it is its help. Imports no torch.

A word that does not parse is a ValueError of one line.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from seqpar._moved import FLAGS

FEW_BITS = re.compile(r"(fp|nf|u?int|float|e\dm)[468](?!\d).*", re.IGNORECASE)  # names of dtypes of 4 to 8 bits
WIDTH, COLUMN = 80, 24  # of the help, and where texts begin in it
NEAR = 0.6  # how alike a word and a name are (`difflib`) that is suggested in its place
SHOWN = 60  # characters of a word in a message
KINDS = {int: ("N", "a whole number"), float: ("X", "a number"), Path: ("PATH", "a path"), str: ("TEXT", "a text")}
T = TypeVar("T")


@dataclass(frozen=True)
class Flag:
    """What the type of a field does not say, in `Annotated`. All are optional.

    value: name of the value in the help. name, alias: of the flag, in place of the field's, and a second one. text:
    help in place of the string below the field. positional: the field is no flag.
    """

    value: str = ""
    name: str = ""
    alias: str = ""
    text: str = ""
    positional: bool = False


@dataclass(frozen=True)
class _Field:
    """A field of a dataclass as a flag. kind: type of one value. many: whether it takes several."""

    field: str
    flag: Flag
    kind: type
    choices: tuple[str, ...]
    many: bool
    default: Any
    text: str

    @property
    def name(self) -> str:
        return "--" + (self.flag.name or self.field).replace("_", "-")

    @property
    def value(self) -> str:
        return self.flag.value or "|".join(self.choices) or KINDS[self.kind][0]

    @property
    def names(self) -> tuple[str, ...]:
        opposite = (f"--no-{self.name[2:]}",) if self.kind is bool else ()
        return (self.name, *filter(None, (self.flag.alias,)), *opposite)

    @property
    def shown(self) -> str:
        """The flag with its value, as the help lists it."""
        if self.kind is bool:
            return self.names[-1] if self.default is True else self.name
        values = self.value + (" ..." if self.many else "")
        if self.flag.positional:
            return values
        return f"{', '.join(self.names)} {values}"

    @property
    def help(self) -> str:
        """The text with the default, unless the text ends with one."""
        default = self.default
        if self.kind is bool or default in (None, (), MISSING) or re.search(r"\]\.?$", self.text):
            return self.text
        values = " ".join(map(str, default)) if self.many else f"{default:g}" if self.kind is float else default
        return f"{self.text.removesuffix('.')} [{values}].".lstrip()

    def read(self, words: Sequence[str]) -> Any:
        values = tuple(map(self._read, words))
        return values if self.many else values[0]

    def _read(self, word: str) -> Any:
        short = word[:SHOWN] or "''"
        if self.choices and word not in self.choices:
            raise ValueError(f"got {self.name} {short}, expected one of {', '.join(self.choices)}")
        try:
            return self.kind(word)
        except ValueError:
            raise ValueError(f"got {self.name} {short}, expected {KINDS[self.kind][1]}") from None


def parsed(
    kind: type[T],
    words: Sequence[str],
    prog: str,
    groups: Mapping[str, Sequence[str]] | None = None,
    *,
    shows: bool = True,
) -> T:
    """Return the words as an object of a dataclass, or print its help and exit.

    groups: title -> fields that the help lists under it; other fields come first. shows: whether this process prints.
    Raises ValueError for words that do not parse, or, where `shows` is False, SystemExit.
    """
    known = _fields(kind)
    if not {"-h", "--help"}.isdisjoint(words):
        if shows:
            print(_help(kind, known, prog, groups or {}))
        raise SystemExit(0)
    try:
        return _object(kind, known, words, prog)
    except ValueError:
        if shows:
            raise
        raise SystemExit(2) from None


def chosen(kinds: Mapping[str, type], words: Sequence[str], prog: str, *, shows: bool = True) -> Any:
    """Parse the words after a command's name as the dataclass of that name; see `parsed`."""
    if words and words[0] in kinds:
        return parsed(kinds[words[0]], words[1:], f"{prog} {words[0]}", shows=shows)
    listed = f"usage: {prog} COMMAND [options]\n\n" + "\n".join(
        f"  {name:<12} {(kind.__doc__ or '').partition(chr(10))[0]}" for name, kind in kinds.items()
    )
    asks = not {"-h", "--help"}.isdisjoint(words)
    if shows:
        wrong = f"{words[0][:SHOWN]!r} is not a command{near(words[0], kinds)}\n" if words and not asks else ""
        print(wrong + listed, file=sys.stdout if asks else sys.stderr)
    raise SystemExit(0 if asks else 2)


def near(word: str, names: Iterable[str]) -> str:
    """Return "; did you mean NAME?" if one of the names is like the word, otherwise nothing."""
    close = get_close_matches(word[:SHOWN].lower(), lower := {name.lower(): name for name in names}, 1, NEAR)
    return f"; did you mean {lower[close[0]]}?" if close else ""


def _object(kind: type[T], known: Sequence[_Field], words: Sequence[str], prog: str) -> T:
    flags = {name: field for field in known if not field.flag.positional for name in field.names}
    values, alone = dict[str, Any](), list[str]()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--" or not word.startswith("--"):
            alone += [] if word == "--" else [word]
            continue
        name, joined, value = word.partition("=")
        name = name.replace("_", "-")
        dtype = value or "".join(rest[:1])
        if name == "--dtype" and prog != "seqpar convert" and FEW_BITS.fullmatch(dtype):
            raise ValueError(f"got --dtype {dtype[:SHOWN]}; use --precision fp8, which computes in 8 bits")
        if name not in flags:
            raise ValueError(_unknown(name, flags, prog))
        field, given = flags[name], [value] if joined else []
        if field.kind is bool:
            if joined:
                raise ValueError(f"got {word[:SHOWN]}, but {name} takes no value")
            values[field.field] = name != field.names[-1]
            continue
        while not joined and rest and not rest[0].startswith("--") and (field.many or not given):
            given.append(rest.pop(0))
        if not given and not field.many:
            raise ValueError(f"{name} needs a value ({field.value}); see {prog} --help")
        values[field.field] = (*values.get(field.field, ()), *field.read(given)) if field.many else field.read(given)
    for field in (field for field in known if field.flag.positional):
        taken = len(alone) if field.many else 1
        if alone[:taken]:
            values[field.field] = field.read(alone[:taken])
        elif field.default is MISSING:
            raise ValueError(f"{field.value} is missing: {field.text[0].lower()}{field.text[1:]} See {prog} --help")
        del alone[:taken]
    if alone:
        raise ValueError(f"got {alone[0][:SHOWN]!r}, which belongs to no flag; see {prog} --help")
    if missing := [field for field in known if field.default is MISSING and field.field not in values]:
        raise ValueError(f"{missing[0].name} is missing; see {prog} --help")
    return kind(**values)


def _unknown(name: str, flags: Iterable[str], prog: str) -> str:
    if name in FLAGS:
        return f"{name} was removed; use {FLAGS[name]}"
    return f"{name[:SHOWN]} is not a flag of {prog}{near(name, flags) or f'; see {prog} --help'}"


def _help(kind: type, known: Sequence[_Field], prog: str, groups: Mapping[str, Sequence[str]]) -> str:
    placed = {name for names in groups.values() for name in names}
    by_name = {field.field: field for field in known}
    sections = {"Arguments": [field for field in known if field.flag.positional]}
    sections["Options"] = [field for field in known if not field.flag.positional and field.field not in placed]
    sections |= {title: [by_name[name] for name in names if name in by_name] for title, names in groups.items()}
    words = " ".join(field.shown for field in sections["Arguments"])
    lines = [f"usage: {prog} {words}{' ' if words else ''}[options]", "", *_wrapped(" ".join(_doc(kind)), WIDTH)]
    for title, listed in sections.items():
        lines += ["", f"{title}:"] if listed else []
        for field in listed:
            text, head = _wrapped(field.help, WIDTH - COLUMN), f"  {field.shown}"
            fits = len(head) < COLUMN - 1 and text
            lines += [f"{head:<{COLUMN}}{text.pop(0)}" if fits else head]
            lines += [" " * COLUMN + line for line in text]
    return "\n".join(lines)


def _doc(kind: type) -> list[str]:
    return (kind.__doc__ or "").split()


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _fields(kind: type) -> list[_Field]:
    hints, texts = get_type_hints(kind, include_extras=True), dict[str, str]()
    for base in reversed(kind.__mro__[:-1]):
        texts |= _texts(base)
    found = []
    for field in fields(kind):  # pyright: ignore[reportArgumentType]
        hint, flag = hints[field.name], Flag()
        if get_origin(hint) is Annotated:
            hint, *more = get_args(hint)
            flag = next(extra for extra in more if isinstance(extra, Flag))
        choices, many = tuple[str, ...](), False
        if get_origin(hint) in (Union, UnionType):
            (hint,) = (part for part in get_args(hint) if part is not NoneType)
        if get_origin(hint) is tuple:
            hint, many = get_args(hint)[0], True
        if get_origin(hint) is Literal:
            choices, hint = get_args(hint), str
        text = flag.text or texts.get(field.name, "")
        found.append(_Field(field.name, flag, hint, choices, many, field.default, text))
    return found


def _texts(kind: type) -> dict[str, str]:
    """Return the strings below the fields that a class itself has, on one line each."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for line, below in zip(node.body, node.body[1:], strict=False):
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[line.target.id] = " ".join(str(below.value.value).split())
    return found
