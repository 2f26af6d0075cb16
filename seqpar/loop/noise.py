"""Noise that is new at every evaluation, drawn on several CPU cores with the bits of one draw after the other.

A generator that is passed over the numbers of the draws before a part gives the part's noise without drawing theirs:
each value takes one number of 32 bits, and Box-Muller, which takes most of the time, runs on all cores at once. That
each part ends where the next one begins is checked, so other consumption gives the same noise, only later.
When it wins: in half precision, which torch 2.11 draws value by value; one core takes 9 ms for the texts of 50
evaluations of UniDiffuser (246,400 values), as long as a denoising step on an H200, which has to wait for it. In fp32
it takes 2.6 ms by vector instructions, and is left to one core.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch
from torch import Tensor

from seqpar.loop.loop import draw_noise
from seqpar.mesh.shard import Shard

MOST = 8  # parts
LEAST = 1 << 14  # values of a part: fewer take less time than a thread
BLOCK = 16  # torch draws a multiple of 16 values from as many numbers; other counts draw their last 16 again

Shapes = Mapping[str, tuple[int, ...]]


def draw_steps(
    shapes: Shapes, count: int, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return noise (count, *shape) of each stream, as `draw_noise` gives it stream by stream in each of `count` turns.

    The generator is on the CPU; it ends where that would leave it. dtype: see `draw_noise`.
    """
    sizes = [prod(shape) for shape in shapes.values()]
    parts = min(MOST, os.cpu_count() or 1, count, sum(sizes) * count // LEAST)
    if parts > 1 and dtype.itemsize < 4 and all(size and size % BLOCK == 0 for size in sizes):
        noise = _in_parts(shapes, Shard(count, parts), generator, dtype)
        if noise is not None:
            return noise
    return _in_turn(shapes, count, generator, dtype)


def _in_turn(shapes: Shapes, count: int, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    turns = [{name: draw_noise(shape, generator, dtype) for name, shape in shapes.items()} for _ in range(count)]
    return {name: torch.stack([turn[name] for turn in turns]) for name in shapes}


def _in_parts(shapes: Shapes, turns: Shard, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """Draw parts of the turns at the same time; None, and the generator as it was, if they do not join."""

    def part(state: Tensor, count: int) -> tuple[dict[str, Tensor], Tensor]:
        own = torch.Generator()
        own.set_state(state)
        return _in_turn(shapes, count, own, dtype), own.get_state()

    states, ahead = [generator.get_state()], torch.Generator()
    ahead.set_state(states[0])
    values = sum(prod(shape) for shape in shapes.values())
    with ThreadPoolExecutor(turns.parts) as pool:  # torch draws without Python's lock
        drawing = []
        for count in turns.sizes:
            drawing.append(pool.submit(part, states[-1], count))
            torch.empty(values * count, dtype=torch.int32).random_(generator=ahead)
            states.append(ahead.get_state())
        parts = [each.result() for each in drawing]
    if any(not torch.equal(end, state) for (_, end), state in zip(parts, states[1:], strict=True)):
        return None
    generator.set_state(states[-1])
    return {name: torch.cat([noise[name] for noise, _ in parts]) for name in shapes}
