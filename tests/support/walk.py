"""Records the calls between functions while the launcher's code makes a picture on two CPU ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parents[2]
KERNELS = "seqpar/kernels/"


class Place(NamedTuple):
    """A file, relative to the repository, and the qualified name of a function in that file."""

    file: str
    function: str

    @property
    def runs_a_kernel(self) -> bool:
        """Whether this function launches a kernel, or is the plain torch that replaces it on a CPU."""
        return self.file.startswith(KERNELS) and self.function.startswith(("launch", "reference"))


START = Place("seqpar/cli/sample.py", "run")


class Record:
    """Calls between functions of seqpar, in the order of their first occurrence, and stacks from START to kernels.

    A stack ends with the first function of a kernel's file: the one that models, strategies and transports call.
    """

    def __init__(self) -> None:
        self.calls: dict[tuple[Place, Place], int] = {}
        self.stacks: set[tuple[Place, ...]] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call; this is the hook of `sys.setprofile`."""
        if event != "call" or (place := place_of(frame)) is None:
            return
        above = next(callers(frame), None)
        if above is not None and above != place:
            self.calls.setdefault((above, place), len(self.calls))
        if place.runs_a_kernel:
            stack = [key for key, _ in groupby([place, *callers(frame)])]
            if START in stack:
                way = tuple(stack[stack.index(START) :: -1])
                self.stacks.add(way[: 1 + next(i for i, each in enumerate(way) if each.file.startswith(KERNELS))])


def place_of(frame: FrameType) -> Place | None:
    """Return a frame's place, or None outside of seqpar; a nested function or lambda counts as its enclosing one."""
    file = frame.f_code.co_filename
    if not file.startswith(f"{ROOT}/seqpar/"):
        return None
    return Place(str(Path(file).relative_to(ROOT)), frame.f_code.co_qualname.split(".<locals>")[0])


def callers(frame: FrameType) -> Iterator[Place]:
    """Yield the places of seqpar on this frame's stack, innermost first."""
    above = frame.f_back
    while above is not None:
        if (place := place_of(above)) is not None:
            yield place
        above = above.f_back


def recorded(
    rank: int, world: int, device: torch.device, out: str
) -> tuple[list[tuple[Place, Place]], list[tuple[Place, ...]]]:
    """Return this rank's calls and stacks for one picture of the built-in model: two steps, tokens split by ulysses."""
    from seqpar.cli.sample import Args, run

    args = Args(classes=("0",), steps=2, mesh=f"ulysses={world}", transport="collective", out=Path(out))
    record = Record()
    sys.setprofile(record)
    try:
        run(args)
    finally:
        sys.setprofile(None)
    return list(record.calls), sorted(record.stacks)
