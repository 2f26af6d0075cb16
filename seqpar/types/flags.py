"""Parses command lines; an invalid flag is one line, not a box of tyro. Imports no torch."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import Any

import tyro

from seqpar._moved import FLAGS

FEW_BITS = re.compile(r"(fp|nf|u?int|float|e\dm)[468](?!\d).*", re.IGNORECASE)  # names of dtypes of 4 to 8 bits
BORDER = re.compile(r"\x1b\[[0-9;]*m|[│╭╮╰╯]")


def parsed(kind: Any, words: Sequence[str], prog: str, description: str | None = None, *, shows: bool = True) -> Any:
    """Return the words as an object of a dataclass. shows: whether this process prints help.

    Raises ValueError for words that do not parse, or, where `shows` is False, SystemExit.
    """
    shown = io.StringIO()
    try:
        with redirect_stderr(shown):
            return tyro.cli(kind, prog=prog, description=description, args=words, console_outputs=shows)
    except SystemExit as stop:
        if not stop.code or not shows:
            raise
    raise ValueError(_line(shown.getvalue(), words))


def _line(box: str, words: Sequence[str]) -> str:
    """Return a box of tyro as one line. Its first part is the error, the others quote the help."""
    lines = [BORDER.sub("", line).rstrip() for line in box.splitlines()]
    rules = [at for at, line in enumerate(lines) if at > 1 and re.fullmatch(r" *[─-]+", line)]
    rule = rules[0] if rules else len(lines)
    first = 2 if re.fullmatch(r" *-+", "".join(lines[1:2])) else 1  # after the title, which a line is under in ASCII
    said = " ".join(" ".join(lines[first:rule]).split()).partition(" Arguments are applied")[0].rstrip(".")
    more = "\n".join(lines[rule:])
    see = f"; see {found[-1]}" if (found := re.findall(r"seqpar[ \w-]* --help", more)) else ""
    if wrong := re.match(r"Error parsing (--[\w-]+)", said):
        flag = wrong[1]
        kind = re.search(rf"^ *{flag}.*\b(INT|FLOAT)\b", more, re.MULTILINE)
        expected = {"INT": "a whole number", "FLOAT": "a number"}.get(kind[1] if kind else "", "another value")
        return f"got {flag} {_value(words, flag)}, expected {expected}"
    if "convert" not in words[:1] and "--dtype" in said and FEW_BITS.fullmatch(dtype := _value(words, "--dtype")):
        return f"got --dtype {dtype}, which no weights have here; use --precision fp8, which computes in 8 bits"
    if choice := re.match(r"invalid choice .* for argument '(--[\w-]+)'\. Expected one of \((.*)\)$", said):
        return f"got {choice[1]} {_value(words, choice[1])}, expected one of {choice[2].replace(chr(39), '')}"
    if said.startswith("Unrec") and (old := [flag for flag in re.findall(r"--[\w-]+", said) if flag in FLAGS]):
        return f"{old[0]} was removed; use {FLAGS[old[0]]}"
    near = re.search(r"^ +(--[\w-]+) ", more, re.MULTILINE) if said.startswith("Unrec") else None
    return f"{said}; did you mean {near[1]}?" if near else f"{said}{see}"


def _value(words: Sequence[str], flag: str) -> str:
    """Return the words after the last use of a flag, up to the next flag."""
    at = max((at for at, word in enumerate(words) if word.partition("=")[0].replace("_", "-") == flag), default=0)
    _, joined, value = words[at].partition("=")
    rest = [value] if joined else [*words[at + 1 :]]
    end = next((at for at, word in enumerate(rest) if word.startswith("--")), len(rest))
    return " ".join(word[:60] or "''" for word in rest[:end])
