"""Tests of how the code is built: few calls from a driver's entry to a kernel, and names with one meaning."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import seqpar
from tests.support.diffusers_tiny import MODELS
from tests.support.foreign import StayDouble
from tests.support.meshes import mesh_for
from tests.support.pool import Pool
from tests.support.structure import ROOT, files, parsed, relative

CALLS = 10  # from the entry of a driver to a kernel
KERNELS = "seqpar/kernels/"
DRIVERS = {
    "loop": ("seqpar/loop/loop.py", "Sampler.__call__"),
    "parallelize": ("seqpar/transformer/call.py", "ShardedCall.__call__"),
    "decoder": ("seqpar/pipelines/own_loop.py", "Loaded.decode"),
}
Step = tuple[str, str]
"""A file and the qualified name of a function in it; what is nested in a function counts as that function."""


def steps(frame: FrameType | None) -> Iterator[Step]:
    """Yield the functions of seqpar on a frame's stack, innermost first."""
    while frame is not None:
        if (file := frame.f_code.co_filename).startswith(f"{ROOT}/seqpar/"):
            yield str(Path(file).relative_to(ROOT)), frame.f_code.co_qualname.split(".<locals>")[0]
        frame = frame.f_back


def recorded(rank: int, world: int, device: torch.device, out: str) -> dict[str, tuple[Step, ...]]:
    """Return the longest way of each driver to the first function of a kernel's file on this rank.

    The loop makes a picture of the built-in model in two steps and decodes it, its tokens split by ulysses.
    Transformers of diffusers are called twice.
    """
    from seqpar.cli.sample import Args, run

    ways: dict[str, set[tuple[Step, ...]]] = {name: set() for name in DRIVERS}

    def on_call(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_qualname
        if event != "call" or KERNELS not in frame.f_code.co_filename or not name.startswith(("launch", "reference")):
            return
        stack = [step for step, _ in groupby(steps(frame))]
        # a decoder's kernels are not those of a step, although the picture is decoded by the same command
        drivers = [driver for driver in ("decoder", "loop", "parallelize") if DRIVERS[driver] in stack]
        for driver in drivers[:1] if "decoder" in drivers else drivers:
            way = stack[stack.index(DRIVERS[driver]) :: -1]
            first = next(index for index, (file, _) in enumerate(way) if file.startswith(KERNELS))
            ways[driver].add(tuple(way[: first + 1]))

    calls = []
    for name in ("flux", "sd3"):
        module, mesh = MODELS[name].build().to(device), mesh_for("ulysses", world, device)
        seqpar.parallelize(module, mesh, transport="collective")
        calls.append((module, MODELS[name].arguments(device)))
    args = Args(classes=("0",), steps=2, mesh=f"ulysses={world}", transport="collective", out=Path(out))
    for profile in (None, on_call):  # the first calls make exchanges
        sys.setprofile(profile)
        try:
            with StayDouble():
                for module, arguments in calls:
                    module(**arguments)
            if profile is not None:
                run(args)
        finally:
            sys.setprofile(None)
    return {name: max(found, key=lambda way: (len(way), way)) for name, found in ways.items()}


def test_from_a_drivers_entry_to_a_kernel_are_few_calls(ranks: Pool, tmp_path: Path) -> None:
    if ranks.device != "cpu":
        pytest.skip("a GPU replays a graph, and calls nothing in it")
    for driver, way in ranks.run(2, recorded, str(tmp_path / "picture.png"))[0].items():
        assert way[0] == DRIVERS[driver]
        assert len(way) - 1 <= CALLS, " > ".join(function for _, function in way)


def test_no_two_classes_have_one_name() -> None:
    """Members of a folder that the code reads share the names of their protocol: `Config`, `Model`, `Transport`."""
    places: dict[str, list[str]] = {}
    for path in files("seqpar"):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(relative(path))
    rooms = ("attention", "transports", "local", "kernels", "loop/models", "families", "pipelines")
    members = tuple(f"seqpar/{room}/" for room in rooms)
    assert not [
        name for name, where in places.items() if len(where) > 1 and not all(x.startswith(members) for x in where)
    ]
