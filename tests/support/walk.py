"""Records the calls between a driver's entry and the kernels, while a picture is made or a transformer is called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parents[2]
KERNELS = "seqpar/kernels/"


class Step(NamedTuple):
    """A file, relative to the repository, and the qualified name of a function in that file."""

    file: str
    function: str

    @property
    def runs_a_kernel(self) -> bool:
        """Whether this function launches a kernel, or is the plain torch that replaces it on a CPU."""
        return self.file.startswith(KERNELS) and self.function.startswith(("launch", "reference"))


DRIVERS = {
    "loop": Step("seqpar/loop/loop.py", "Sampler.__call__"),
    "parallelize": Step("seqpar/transformer/call.py", "ShardedCall.__call__"),
    "decoder": Step("seqpar/pipelines/own_loop.py", "Loaded.decode"),
}
Stack = tuple[Step, ...]


class Record:
    """The stacks from a driver's entry to kernels, by driver.

    A stack ends with the first function of a kernel's file: the one that models, strategies and transports call.
    """

    def __init__(self) -> None:
        self.stacks: dict[str, set[Stack]] = {name: set() for name in DRIVERS}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call; this is the hook of `sys.setprofile`."""
        if event != "call" or (step := step_of(frame)) is None or not step.runs_a_kernel:
            return
        stack = [key for key, _ in groupby([step, *callers(frame)])]
        # a decoder's kernels are not those of a step, although the picture is decoded by the same command
        names = ["decoder"] if DRIVERS["decoder"] in stack else [name for name in DRIVERS if DRIVERS[name] in stack]
        for name in names:
            way = tuple(stack[stack.index(DRIVERS[name]) :: -1])
            first = next(index for index, each in enumerate(way) if each.file.startswith(KERNELS))
            self.stacks[name].add(way[: 1 + first])


def step_of(frame: FrameType) -> Step | None:
    """Return a frame's function, or None outside of seqpar; a nested function or lambda counts as its enclosing one."""
    file = frame.f_code.co_filename
    if not file.startswith(f"{ROOT}/seqpar/"):
        return None
    return Step(str(Path(file).relative_to(ROOT)), frame.f_code.co_qualname.split(".<locals>")[0])


def callers(frame: FrameType) -> Iterator[Step]:
    """Yield the functions of seqpar on this frame's stack, innermost first."""
    above = frame.f_back
    while above is not None:
        if (step := step_of(above)) is not None:
            yield step
        above = above.f_back


def recorded(rank: int, world: int, device: torch.device, out: str) -> dict[str, Stack]:
    """Return the longest way of each driver to a kernel on this rank.

    The loop makes a picture of the built-in model in two steps and decodes it, its tokens split by ulysses.
    Transformers of diffusers are called twice.
    """
    from seqpar.cli.sample import Args, run
    from tests.support.foreign import StayDouble

    record = Record()
    args = Args(classes=("0",), steps=2, mesh=f"ulysses={world}", transport="collective", out=Path(out))
    with StayDouble():
        calls = [_call_of(name, world, device) for name in ("flux", "sd3")]
    sys.setprofile(record)
    try:
        run(args)
        with StayDouble():
            for call in calls:
                call()
    finally:
        sys.setprofile(None)
    return {name: max(stacks, key=lambda stack: (len(stack), stack)) for name, stacks in record.stacks.items()}


def _call_of(name: str, world: int, device: torch.device) -> Callable[[], Any]:
    """Return a call of a parallelized transformer of diffusers, after a first one, which makes its exchanges."""
    from seqpar import parallelize
    from tests.support.diffusers_tiny import MODELS
    from tests.support.meshes import mesh_for

    tiny = MODELS[name]
    module, arguments = tiny.build().to(device), tiny.arguments(device)
    parallelize(module, mesh=mesh_for("ulysses", world, device), transport="collective")
    module(**arguments)
    return lambda: module(**arguments)
